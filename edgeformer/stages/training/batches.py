"""Which rows an optimizer step sees, in the planned order, and rows as torch batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from edgeformer.data.batching import plan_batches

Batch = dict[str, Tensor]
"""Arrays of the same rows, int64 [B, …]."""


class PlannedBatches(Sampler[list[int]]):
    """Row numbers of each optimizer step: a function of (seed, epoch) alone, so a resumed run sees the same steps."""

    def __init__(self, lengths: NDArray[np.integer], rows_per_step: int, seed: int, *, bucketed: bool) -> None:
        self._lengths, self._seed, self._bucketed = lengths, seed, bucketed
        self.batch_size, self.drop_last = rows_per_step, False  # what Accelerate reads
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
    """Row numbers; the task turns them into tensors, a micro-batch at a time."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> int:
        return index


def training_loader(rows: int, sampler: PlannedBatches) -> DataLoader[int]:
    """A DataLoader that yields the row numbers of each optimizer step, int64 [rows_per_step]."""
    return DataLoader(
        _Rows(rows),
        batch_sampler=sampler,
        # Of its own: a loader draws a number each time it is started, and a resumed run starts it once more. Drawn from
        # torch's global generator, that would shift every dropout mask after the resumption.
        generator=torch.Generator(),
        collate_fn=torch.tensor,
    )


def as_tensors(arrays: dict[str, NDArray[np.int64]], device: torch.device | None = None) -> Batch:
    """numpy arrays as tensors on ``device``."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
