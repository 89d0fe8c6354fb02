"""What a training optimizes: the model, its data as batches, the loss, and the score."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.units import format_duration
from edgeformer.data.batching import concatenate, cut_batches, pad_batch, padded_lengths, plan_batches
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import FittedAdapter, run_scorer
from edgeformer.models.blocks.segments import SDPA, Segments
from edgeformer.models.distillation import Batch, Losses
from edgeformer.tasks import Prepared, get_task
from edgeformer.training.loop.distributed import Processes
from edgeformer.training.loop.frozen import CPU, FrozenStart
from edgeformer.training.loop.teacher import Teacher


class Objective:
    """A model with initial weights, its data and its loss. The weights depend on the recipe's seed only.

    Args:
        cache: folder of encoded data, of teachers' logits, and of a frozen encoder's vectors.
        is_resumed: a checkpoint will replace the weights; otherwise they are those that training starts from.
        device: where a teacher and a frozen encoder compute.

    Raises InputError: recipe, data or tokenizer cannot be used, or a language model sees future tokens without
    ``allow_leak``.
    """

    attention = AttentionUse()
    """Of training, see ``choose_attention``; by default with padding, as of scoring."""

    def __init__(
        self, recipe: Recipe, cache: Path, progress: Progress, *, is_resumed: bool = False,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        # 1. Build the model
        self.recipe, self.task, self.model_spec = recipe, get_task(recipe.task), model_spec_of(recipe)
        adapter = self.model_spec.adapter
        self.per_token = self.task.can_write  # what the loss is a mean of
        set_seed(recipe.seed)
        self.model = adapter.build(recipe)
        fresh = () if is_resumed else adapter.start(self.model, recipe)
        has_frozen_start = getattr(recipe.training, "start", "source") == "frozen"
        if fresh and not has_frozen_start:
            progress.message(
                f"the source has no weights for {', '.join(fresh)}, so training initialises them at random"
            )

        # 2. Probe it
        # Before the data is read: the probe takes a second and may end the run.
        self.causality = causality = adapter.causality(self.model, recipe.seed)
        if causality is not None and causality.leaks and not getattr(recipe, "allow_leak", False):
            raise InputError(
                f"{recipe.name}: the model sees the tokens that it predicts (outputs depend on at least "
                f"{causality.reach} later positions), so its loss is void; set model.causal: true, or train anyway "
                "with --allow-leak, which marks all results"
            )

        # 3. Prepare the data
        has_teacher = getattr(recipe.training, "teacher", None) is not None
        # Logits for every token would not fit: the loss of a language model computes them batch by batch.
        teacher = Teacher(recipe, cache, device) if has_teacher and not self.per_token else None
        self.prepared: Prepared = self.task.rows.prepare(recipe, cache, progress)
        logits = teacher.logits(self.prepared, progress) if teacher is not None else None
        # Without the texts, which would stay in memory.
        self.prepared = replace(self.prepared, train_texts=None, teacher_logits=logits)
        fitted = fitted_recipe(recipe, self.prepared.tokenizer, progress.message)
        if fitted is not recipe:  # the same weights as a recipe that states this vocabulary size
            self.recipe = recipe = fitted
            set_seed(recipe.seed)
            self.model = adapter.build(recipe)
            adapter.start(self.model, recipe)
            adapter.causality(self.model, recipe.seed)

        # 4. Fit the head of a frozen start
        if isinstance(adapter, FittedAdapter):
            self.recipe, self.model = recipe, _ = adapter.sized(recipe, self.prepared)
        self.start_seconds = 0.0  # of a frozen start
        if has_frozen_start and not is_resumed:
            started = time.perf_counter()
            FrozenStart(self.model, recipe, self.prepared, cache, device).fit(progress)
            self.start_seconds = time.perf_counter() - started

        # 5. Make the loss
        self._loss = adapter.loss(self.model, recipe, self.prepared)
        longest, compile_ = recipe.data.tokens_at_once, recipe.training.compile
        self._pad_to = longest if getattr(recipe.training, "score_padding", False) else None
        self._compiled_lengths: NDArray[np.int64] | None = None  # tokens that batches are padded to if compiled
        if compile_ is not None:
            rows = self.prepared.train
            if self._pad_to is None and not recipe.data.stream:  # a stream does not know its longest row
                longest = min(longest, int(rows.sizes(np.arange(len(rows))).max(initial=1)))
            self._compiled_lengths = padded_lengths(longest, 1 if self._pad_to is not None else compile_.shapes)

    def steps(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Return the row numbers of each optimizer step, which depend on seed and epoch only, so a run can resume."""
        training, rows, seed = self.recipe.training, self.prepared.train, self.recipe.seed
        size, bucketed = training.effective_batch, training.batching == "bucketed"
        streamed = self.recipe.data.stream
        return plan_batches(rows, size, seed=seed, epoch=epoch, bucketed=bucketed, streamed=streamed)

    def batch(self, rows: NDArray[np.int64], device: torch.device, *, pinned: bool = False) -> tuple[Batch, int]:
        """Return training rows as a batch (int64 [B, …] by name) on ``device``, and its weight in the loss.

        A batch without padding has segments in place of the attention mask, or of a language model's positions.
        ``pinned``: copy to a card out of page-locked memory, without waiting.
        """
        loaded, numbers = self.prepared.train.loaded(rows)
        arrays = self.task.rows.batch(loaded, numbers, self.prepared.pad, pad_to=self._pad_to)
        weight, use = self.task.rows.weight(arrays), self.attention
        if use.unpadded:
            arrays = concatenate(arrays) if use.used == SDPA else concatenate(arrays, 0)
        if (lengths := self._compiled_lengths) is not None:
            index = np.searchsorted(lengths, arrays["input_ids"].shape[1])
            arrays = pad_batch(arrays, int(lengths[index]), self.prepared.pad)
        batch: dict[str, Any] = _to_tensors(arrays, device, pinned=pinned, keep_mask=lengths is not None)
        if "ends" in arrays:
            longest = int(arrays["positions"].max()) + 1
            segments = Segments(batch.pop("ends"), batch.pop("positions"), batch.pop("places"), longest, use.used)
            batch["positions" if self.per_token else "attention_mask"] = segments
        if self.prepared.teacher_logits is not None:
            batch["teacher_logits"] = torch.from_numpy(self.prepared.teacher_logits[rows]).to(device)
        return batch, weight

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the summed losses of a micro-batch, with gradients. ``model`` is as Accelerate wrapped it."""
        return self._loss(model, batch)

    def evaluate(
        self, model: nn.Module, name: str, processes: Processes | None = None, progress: Progress = SILENT, *,
        max_s: float = math.inf,
    ) -> Score:  # fmt: skip
        """Score ``model`` in float32 on "validation" or a test set. Leaves it in evaluation mode.

        ``processes`` share the batches, and all return the score; None: this one computes all. ``max_s``: batches are
        left out, evenly over the lengths of the rows, if all would take longer, and ``progress`` says how many rows are
        scored; without effect with several processes, which must leave out the same ones.
        """
        # Shards gather the weights with which training continues: these must not be inference tensors.
        is_sharded = processes is not None and processes.sharded
        count, rank = (processes.count, processes.rank) if processes is not None else (1, 0)
        with torch.no_grad() if is_sharded else torch.inference_mode():
            model.eval()
            device = next(model.parameters()).device
            rows = self.prepared.validation if name == "validation" else self.prepared.tests[name]
            scorer = self.model_spec.adapter.scorer(model).eval()
            meter = self.task.meter(self.model_spec.trained_exits(self.recipe.model), data=self.recipe.data)
            batches = cut_batches(rows.lengths, self.task.rows.rows_at_once(int(rows.lengths.max(initial=1))))
            first, started = 0, time.perf_counter()
            while first < len(batches):
                # A process without a batch computes the last one: all must gather the shards of the weights.
                numbers = batches[min(first + rank, len(batches) - 1)]
                arrays = self.task.rows.batch(rows, numbers, self.prepared.pad, pad_to=self._pad_to)
                outputs = run_scorer(scorer, _to_tensors(arrays, device))
                answers = {key: output.cpu().numpy() for key, output in outputs.items()}
                scored = [(answers, arrays)] if processes is None else processes.gather((answers, arrays))
                for pair in scored[: len(batches) - first]:
                    meter.add(*pair)
                progress.advance(sum(map(len, batches[first : first + count])))
                seconds = (time.perf_counter() - started) * len(batches)
                if first == 0 and count == 1 and len(batches) > 1 and seconds > max_s:
                    stride = math.ceil(seconds / max_s)
                    batches = [batches[0], *batches[stride::stride]]
                    progress.message(
                        f"{name}: scored on {sum(map(len, batches)):,} of {len(rows):,} rows, because all would take "
                        f"{format_duration(seconds)}"
                    )
                first += count
            is_whole = sum(map(len, batches)) == len(rows)
            # Padding that counts as text belongs to no word, and the number of words is that of all rows.
            return meter.score(getattr(rows, "words", None) if is_whole and not self._pad_to else None)


def _to_tensors(
    arrays: Mapping[str, NDArray[np.int64]], device: torch.device, *, pinned: bool = False, keep_mask: bool = False
) -> dict[str, Tensor]:
    """Copy arrays to ``device``. A mask without padding is omitted, for SDPA's fastest kernel, unless ``keep_mask``."""
    used = {name: array for name, array in arrays.items() if keep_mask or name != "attention_mask" or not array.all()}
    tensors = {name: torch.from_numpy(array) for name, array in used.items()}
    if pinned:
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}
