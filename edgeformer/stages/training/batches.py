"""Encoded rows as torch batches, in the planned order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from edgeformer.data.batching import collate, plan_batches
from edgeformer.data.encoding import Encoded
from edgeformer.schema.recipe import TrainingConfig

Batch = dict[str, Tensor]
"""input_ids, attention_mask int64 [B, S]; labels int64 [B]"""


class PlannedBatches(Sampler[list[int]]):
    """A batch sampler whose order is a pure function of (seed, epoch), so that a resumed run sees the same batches."""

    def __init__(self, lengths: np.ndarray, config: TrainingConfig, seed: int) -> None:
        self._lengths, self._seed = lengths, seed
        self._bucketed = config.batching == "bucketed"
        self.batch_size, self.drop_last = config.batch_size, False  # what Accelerate reads
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration belongs to."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        batches = plan_batches(
            self._lengths, self.batch_size, seed=self._seed, epoch=self._epoch, bucketed=self._bucketed
        )
        return (batch.tolist() for batch in batches)


class _Rows(Dataset[int]):
    """Row numbers; the collation looks the rows up, a whole batch at once."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> int:
        return index


def to_batch(encoded: Encoded, indices: np.ndarray, pad_id: int) -> Batch:
    """The rows at ``indices`` as one padded batch."""
    arrays = collate(encoded, indices, pad_id)
    arrays["labels"] = encoded.labels[indices]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def training_loader(encoded: Encoded, sampler: PlannedBatches, pad_id: int) -> DataLoader[int]:
    """A DataLoader over planned batches of ``encoded``."""
    return DataLoader(
        _Rows(len(encoded)),
        batch_sampler=sampler,
        # Of its own: a loader draws a number each time it is started, and a resumed run starts it once more. Drawn from
        # torch's global generator, that would shift every dropout mask after the resumption.
        generator=torch.Generator(),
        collate_fn=lambda rows: to_batch(encoded, np.asarray(rows), pad_id),
    )


def drop_tokens(batch: Batch, share: float, unk_id: int, special: Tensor) -> Tensor:
    """``input_ids`` with about ``share`` of the ordinary tokens replaced by [UNK].

    Args:
        special: ids that are never replaced ([CLS], [SEP], [PAD], …).
    """
    ids = batch["input_ids"]
    chosen = (torch.rand(ids.shape, device=ids.device) < share) & ~torch.isin(ids, special)
    return torch.where(chosen, unk_id, ids)
