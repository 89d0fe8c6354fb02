"""What training works on: a recipe's data as batches, the loss of its family, and the score of its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from edgeformer.data.batching import ordered_batches, plan_batches
from edgeformer.families import family_of
from edgeformer.families.network import Batch, Losses, Place, run_scorer
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import Causality
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import Score
from edgeformer.tasks import Prepared, task_named


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed at once, int64 [B, …] by name, and how much of them counts in the loss."""

    tensors: Batch
    weight: int


class Objective:
    """A model with fresh weights, its data and its loss; the weights depend on the recipe's seed alone.

    Args:
        recipe: what is trained.
        cache: where encoded data is kept between runs.
        place: where the model will compute, and in what.
        progress: reports what is read.

    Raises:
        InputError: recipe, data or tokenizer cannot be used; a model that leaks without ``allow_leak``.
    """

    def __init__(self, recipe: Recipe, cache: Path, place: Place, progress: Progress) -> None:
        self.recipe, self.task, self.family = recipe, task_named(recipe.task), family_of(recipe)
        network = self.family.network
        set_seed(recipe.seed)
        self.model, self.attention = network.build(recipe, place)
        if self.attention.reason:
            requested, used = self.attention.requested, self.attention.used.upper()
            progress.message(f"model.attention: {requested} is not used, torch {used} instead: {self.attention.reason}")
        # Before the data: the probe takes a second and may end the run.
        self.causality = network.causality(self.model, recipe.seed)
        _refuse_leak(recipe, self.causality)
        self.prepared: Prepared = self.task.prepare(recipe, cache, progress)
        self._loss = network.loss(self.model, recipe, self.prepared)
        self._pad_to = recipe.data.tokens_at_once if getattr(recipe.training, "score_padding", False) else None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every training row, int64 [n]."""
        return self.prepared.train.lengths

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the test sets; the first is the protocol's own."""
        return tuple(self.prepared.tests)

    def batch(self, rows: NDArray[np.integer], device: torch.device) -> MicroBatch:
        """Training rows as one padded batch on ``device``."""
        arrays = self.task.batch(self.prepared.train, rows, self.prepared.pad, pad_to=self._pad_to)
        return MicroBatch(as_tensors(arrays, device), self.task.weight(arrays))

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Summed losses of a micro-batch, with gradients. ``model``: as Accelerate wrapped it."""
        return self._loss(model, batch)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, name: str, device: torch.device) -> Score:
        """Score of ``model`` in float32 on "validation" or a test set; leaves it in evaluation mode."""
        model.eval()
        rows = self.prepared.validation if name == "validation" else self.prepared.tests[name]
        scorer = self.family.network.scorer(model).eval()
        meter = self.task.meter(self.family.trained_exits(self.recipe.model))
        count = self.task.evaluation_rows(int(rows.lengths.max(initial=1)))
        for numbers in ordered_batches(rows.lengths, count):
            arrays = self.task.batch(rows, numbers, self.prepared.pad, pad_to=self._pad_to)
            outputs = run_scorer(scorer, as_tensors(arrays, device))
            meter.add({key: output.cpu().numpy() for key, output in outputs.items()}, arrays)
        # Padding that counts as text belongs to no word.
        return meter.score(None if self._pad_to else self.task.words(rows))

    def criterion(self, score: Score) -> float:
        """What picks the epoch whose weights are kept; smaller is better."""
        return self.task.criterion(score, self.recipe.training)


def _refuse_leak(recipe: Recipe, found: Causality | None) -> None:
    if found is not None and found.leaks and not getattr(recipe, "allow_leak", False):
        raise InputError(
            f"{recipe.name}: the model sees the tokens it is asked to predict (outputs depend on at least "
            f"{found.reach} positions ahead), so its loss would mean nothing; set model.causal: true, or train it "
            "all the same with allow_leak: true (--allow-leak), and everything made of it will say so"
        )


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


def as_tensors(arrays: Mapping[str, NDArray[np.int64]], device: torch.device | None = None) -> dict[str, Tensor]:
    """numpy arrays as tensors on ``device``; a mask without padding is left out, for SDPA's fastest path."""
    kept = {name: array for name, array in arrays.items() if name != "attention_mask" or not array.all()}
    return {name: torch.from_numpy(array).to(device) for name, array in kept.items()}
