"""What training works on: a recipe's data as batches, the loss of its family, and the score of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.data.batching import few_lengths, lengthened, ordered_batches, plan_batches
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Batch, Losses, Place, run_scorer
from edgeformer.tasks import Prepared, task_named
from edgeformer.training.distributed import Processes


class Objective:
    """A model with fresh weights, its data and its loss; the weights depend on the recipe's seed alone.

    Args:
        recipe: what is trained.
        cache: where encoded data is kept between runs.
        place: where the model will compute, and in what.
        progress: reports what is read.
        goes_on: the weights will be those of a checkpoint; else they are those that a training starts from.

    Raises:
        InputError: recipe, data or tokenizer cannot be used; a model that leaks without ``allow_leak``.
    """

    def __init__(self, recipe: Recipe, cache: Path, place: Place, progress: Progress, *, goes_on: bool = False) -> None:
        self.recipe, self.task, self.model_spec = recipe, task_named(recipe.task), model_spec_of(recipe)
        adapter = self.model_spec.adapter
        self._place = place
        self._build(recipe)
        if self.attention.reason:
            requested, used = self.attention.requested, self.attention.used.upper()
            progress.message(f"model.attention: {requested} is not used, torch {used} instead: {self.attention.reason}")
        fresh = () if goes_on else adapter.start(self.model, recipe)
        if fresh:
            progress.message(f"the source has no weights for {', '.join(fresh)}: training starts them afresh")
        # Before the data: the probe takes a second and may end the run.
        self.causality = found = adapter.causality(self.model, recipe.seed)
        if found is not None and found.leaks and not getattr(recipe, "allow_leak", False):
            raise InputError(
                f"{recipe.name}: the model sees the tokens it is asked to predict (outputs depend on at least "
                f"{found.reach} positions ahead), so its loss would mean nothing; set model.causal: true, or train it "
                "all the same with allow_leak: true (--allow-leak), and everything made of it will say so"
            )
        self.prepared: Prepared = self.task.prepare(recipe, cache, progress)
        fitted = fitted_recipe(recipe, self.prepared.tokenizer, progress.message)
        if fitted is not recipe:  # the same weights as of a recipe that states this size
            self.recipe = recipe = fitted
            self._build(recipe)
            adapter.start(self.model, recipe)
            adapter.causality(self.model, recipe.seed)
        self._loss = adapter.loss(self.model, recipe, self.prepared)
        self._pad_to = recipe.data.tokens_at_once if getattr(recipe.training, "score_padding", False) else None
        self._lengths = self._compiled_lengths()

    def _build(self, recipe: Recipe) -> None:
        """Make the model, whose weights depend on the recipe's seed alone."""
        set_seed(recipe.seed)
        self.model, self.attention = self.model_spec.adapter.build(recipe, self._place)

    def _compiled_lengths(self) -> NDArray[np.int64] | None:
        """Those that training's batches are padded to where they are compiled; None: they are not."""
        compile_, longest, rows = self.recipe.training.compile, self.recipe.data.tokens_at_once, self.prepared.train
        if compile_ is None:
            return None
        if self._pad_to is not None:  # every batch is that long
            return few_lengths(longest, 1)
        if not self.recipe.data.stream:  # else it is not known
            longest = min(longest, int(rows.sizes(np.arange(len(rows))).max(initial=1)))
        return few_lengths(longest, compile_.shapes)

    def rows_of(self, name: str) -> int:
        """Return the rows of "validation" or a test set."""
        return len(self.prepared.validation if name == "validation" else self.prepared.tests[name])

    def build(self) -> nn.Module:
        """Another model of the same kind, with other weights."""
        return self.model_spec.adapter.build(self.recipe, self._place)[0]

    def steps(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Row numbers of each optimizer step: a function of seed and epoch alone, so a resumed run sees the same."""
        training, rows, seed = self.recipe.training, self.prepared.train, self.recipe.seed
        size, bucketed = training.effective_batch, training.batching == "bucketed"
        streamed = self.recipe.data.stream
        return plan_batches(rows, size, seed=seed, epoch=epoch, bucketed=bucketed, streamed=streamed)

    def batch(self, rows: NDArray[np.int64], device: torch.device, *, pinned: bool = False) -> tuple[Batch, int]:
        """Training rows as one padded batch on ``device``, int64 [B, …] by name, and how much counts in its loss.

        Args:
            pinned: copied to a card out of page-locked memory; nothing waits for it here.
        """
        loaded, numbers = self.prepared.train.loaded(rows)
        arrays = self.task.batch(loaded, numbers, self.prepared.pad, pad_to=self._pad_to)
        weight = self.task.weight(arrays)
        if (lengths := self._lengths) is not None:
            place = np.searchsorted(lengths, arrays["input_ids"].shape[1])
            arrays = lengthened(arrays, int(lengths[place]), self.prepared.pad)
        arrays = self.model_spec.adapter.batch(self.recipe, arrays)
        return _as_tensors(arrays, device, pinned=pinned, whole=lengths is not None), weight

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Summed losses of a micro-batch, with gradients. ``model``: as Accelerate wrapped it."""
        return self._loss(model, batch)

    def evaluate(
        self,
        model: nn.Module,
        name: str,
        processes: Processes | None = None,
        advance: Callable[[int], None] = lambda rows: None,
    ) -> Score:
        """Score of ``model`` in float32 on "validation" or a test set; leaves it in evaluation mode.

        Args:
            processes: share the batches; all get the score. None: this one computes all of them.
            advance: is called with the rows of every batch that is scored.
        """
        sharded = processes is not None and processes.sharded  # gathers weights that training goes on with
        with torch.no_grad() if sharded else torch.inference_mode():
            return self._evaluate(model, name, processes, advance)

    def _evaluate(
        self, model: nn.Module, name: str, processes: Processes | None, advance: Callable[[int], None]
    ) -> Score:
        model.eval()
        device = next(model.parameters()).device
        rows = self.prepared.validation if name == "validation" else self.prepared.tests[name]
        scorer = self.model_spec.adapter.scorer(model).eval()
        meter = self.task.meter(self.model_spec.trained_exits(self.recipe.model), data=self.recipe.data)
        batches = ordered_batches(rows.lengths, self.task.evaluation_rows(int(rows.lengths.max(initial=1))))
        count, rank = (processes.count, processes.rank) if processes is not None else (1, 0)
        for first in range(0, len(batches), count):
            # One that has none left computes another's again: shards of weights are gathered by all at once.
            numbers = batches[min(first + rank, len(batches) - 1)]
            arrays = self.task.batch(rows, numbers, self.prepared.pad, pad_to=self._pad_to)
            outputs = run_scorer(scorer, _as_tensors(arrays, device))
            answers = {key: output.cpu().numpy() for key, output in outputs.items()}
            found = [(answers, arrays)] if processes is None else processes.gather((answers, arrays))
            for pair in found[: len(batches) - first]:
                meter.add(*pair)
            advance(sum(map(len, batches[first : first + count])))
        # Padding that counts as text belongs to no word.
        return meter.score(None if self._pad_to else self.task.words(rows))


def _as_tensors(
    arrays: Mapping[str, NDArray[np.int64]], device: torch.device, *, pinned: bool = False, whole: bool = False
) -> dict[str, Tensor]:
    """numpy arrays as tensors on ``device``; a mask without padding is left out, for SDPA's fastest path.

    Args:
        pinned: copy out of page-locked memory, and do not wait.
        whole: keep such a mask all the same.
    """
    kept = {name: array for name, array in arrays.items() if whole or name != "attention_mask" or not array.all()}
    tensors = {name: torch.from_numpy(array) for name, array in kept.items()}
    if pinned:
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}
