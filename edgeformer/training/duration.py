"""How long training will take, before it starts: by a few steps that are timed here, or by a device's stated rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.plan import PlannedTime
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Place
from edgeformer.tasks import task_named
from edgeformer.training.gpu_time import WITH_VALIDATION, gpu_time
from edgeformer.training.memory import filled
from edgeformer.training.timing import timed

SHARE_OF_PEAK = (0.04, 0.5)
"""Of a CPU's stated rate that training reaches: small models reach little of it. benchmarks/plan_time.py has what
finished trainings reached. CUDA cards: :mod:`~edgeformer.training.gpu_time`."""
_TIMED = (0.7, 1.5)
"""Of what timed steps say: machines change their speed within minutes."""
_UNKNOWN_ROWS = 1000
_MOST_PREPARED = 64 << 20
"""Bytes of files that are read and encoded for it; `plan` is meant to answer in seconds."""


@dataclass(frozen=True)
class TrainingLength:
    """What a training reads.

    Attributes:
        steps: optimizer steps of all epochs; None: the number of rows is not known.
        rows: training rows of all epochs; 1,000 where their number is not known.
        tokens: per row of a batch, padding included.
        rows_from: who counted the rows.
        text: the length for people.
    """

    steps: int | None
    rows: int
    tokens: int
    rows_from: Literal["data", "recipe", "unknown"]
    text: str


@dataclass(frozen=True)
class PlannedData:
    """A recipe and the length of its training.

    Attributes:
        recipe: with the vocabulary that its tokenizer turned out to have.
        length: None: the data is here and cannot be used.
        problem: why not.
        notes: what is worth saying of the recipe, and of its data where that was read.
    """

    recipe: Recipe
    length: TrainingLength | None
    problem: str = ""
    notes: tuple[str, ...] = ()


def planned_data(recipe: Recipe, cache: Path, progress: Progress = SILENT) -> PlannedData:
    """Find the length of a training: from its data where that is on this machine, else from ``data.expected_rows``.

    Args:
        cache: where encoded data is kept for the process that times steps.
    """
    unread = _why_unread(recipe)
    if unread is not None:
        return PlannedData(recipe, _unread(recipe, unread))
    notes: list[str] = []
    try:
        prepared = task_named(recipe.task).prepare(recipe, cache, progress)
    except EdgeformerError as error:
        return PlannedData(recipe, None, str(error))
    recipe = fitted_recipe(recipe, prepared.tokenizer, notes.append)
    findings = tuple(finding.message for finding in prepared.summary.findings)
    training, sizes = recipe.training, prepared.train.sizes(np.arange(len(prepared.train)))
    if (wrong_count := recipe.data.row_count_warning(len(sizes))) is not None:
        notes.append(wrong_count)
    bucketed = training.batching == "bucketed"
    batches = plan_batches(prepared.train, training.effective_batch, seed=recipe.seed, epoch=0, bucketed=bucketed)
    padded = sum(len(batch) * int(sizes[batch].max(initial=1)) for batch in batches)
    rows, epochs = len(sizes), training.epochs
    tokens = recipe.data.tokens_at_once if getattr(training, "score_padding", False) else math.ceil(padded / rows)
    text = f"{_epochs(recipe)} of {rows:,} rows of {tokens:,} tokens, padding included"
    return PlannedData(
        recipe, TrainingLength(len(batches) * epochs, rows * epochs, tokens, "data", text), notes=(*notes, *findings)
    )


def _why_unread(recipe: Recipe) -> str | None:
    """Return why a recipe's data is not read for a plan, or None if all of it is on this machine and small enough."""
    data, tokenizer = recipe.data, recipe.model_dump(include={"tokenizer"})["tokenizer"]
    sources = [source for part in data.parts.values() for source in part]
    files = [Path(source.path) for source in sources if source.kind == "file"]
    missing = [str(path) for path in files if not path.is_file()]
    if any(source.kind == "hub" for source in sources):
        return "the data is on the hub; --data DIR plans with files"
    if tokenizer.get("kind") == "hub":
        return "the tokenizer is on the hub; --tokenizer FILE plans with a file"
    if data.stream:
        return "the data is streamed"
    if missing:
        return f"{missing[0]} does not exist"
    if sum(path.stat().st_size for path in files) > _MOST_PREPARED:
        return f"the data is larger than {_MOST_PREPARED >> 20} MiB"
    return None


def _unread(recipe: Recipe, reason: str) -> TrainingLength:
    data, epochs = recipe.data, recipe.training.epochs
    up_to = "" if getattr(data, "mode", None) == "packed" else "up to "
    tokens = f"{up_to}{data.tokens_at_once:,} tokens"
    if data.expected_rows is None:
        text = f"rows of {tokens}; the number of rows is not known: {reason}"
        return TrainingLength(None, _UNKNOWN_ROWS, data.tokens_at_once, "unknown", text)
    rows = data.expected_rows
    steps = -(-rows // recipe.training.effective_batch) * epochs
    text = f"{_epochs(recipe)} of {rows:,} rows of {tokens}; rows as the recipe states them, not counted: {reason}"
    return TrainingLength(steps, rows * epochs, data.tokens_at_once, "recipe", text)


def _epochs(recipe: Recipe) -> str:
    epochs = recipe.training.epochs
    return "1 epoch" if epochs == 1 else f"{epochs} epochs"


def planned_time(
    data: PlannedData, device: DeviceProfile, precision: str, cache: Path, *, fits: bool, progress: Progress = SILENT
) -> PlannedTime:
    """Estimate how long training takes on ``device``.

    Where the device is this host and the data was read, some steps are timed. Elsewhere the work of a step is counted,
    on tensors without data, and divided by the rates that the profile states.

    Args:
        data: of :func:`planned_data`; its recipe with what its teacher computes, if that is known.
        precision: what it would compute in there, resolved.
        cache: as of :func:`planned_data`.
        fits: a recipe that does not fit is not tried.
    """
    recipe, length = data.recipe, data.length
    if length is None:
        return _unavailable(data.problem)
    try:
        if device.name == "host" and fits and length.rows_from == "data":
            return _by_steps(recipe, cache, length, progress)
        with bar(progress, "Counting the work of a step", None, ""):
            return _by_rates(recipe, device, precision, length)
    except EdgeformerError as error:
        return _unavailable(str(error))


def _unavailable(reason: str) -> PlannedTime:
    return PlannedTime(status="unavailable", rows=_UNKNOWN_ROWS, basis=reason)


def _by_steps(recipe: Recipe, cache: Path, length: TrainingLength, progress: Progress) -> PlannedTime:
    with bar(progress, "Timing some steps", None, ""):
        timing = timed(recipe, cache, accelerator="cpu")  # which the host's profile is of
    low, high = (share * timing.total_s for share in _TIMED)
    basis = f"{timing.timed_steps} steps timed here; {length.text}"
    return PlannedTime(
        status="estimated", low_s=low, high_s=high, steps=timing.steps, rows=length.rows,
        epochs=recipe.training.epochs, rows_from=length.rows_from, basis=basis,
    )  # fmt: skip


def _by_rates(recipe: Recipe, device: DeviceProfile, precision: str, length: TrainingLength) -> PlannedTime:
    estimated = partial(
        PlannedTime,
        status="estimated",
        steps=length.steps,
        rows=length.rows,
        epochs=1 if length.steps is None else recipe.training.epochs,
        rows_from=length.rows_from,
    )
    if device.kind == "cuda":
        estimate = gpu_time(recipe, device, precision, tokens=length.tokens, rows=length.rows)
        low_share, high_share = estimate.share_of_peak
        basis = (
            f"{length.text}. {estimate.operations:.2g} operations; {low_share:.0%} to {high_share:.0%} of "
            f"{estimate.rate / 1e12:.3g} TFLOP/s, from the work of each kernel and assumed efficiencies; "
            "never checked on a GPU"
        )
        return estimated(
            low_s=estimate.low_s, high_s=estimate.high_s, basis=basis, low_reason=estimate.low_reason,
            high_reason=estimate.high_reason, share_of_peak=estimate.share_of_peak,
        )  # fmt: skip
    # Products are summed in FP32 whatever they multiply; a CPU that multiplies in bf16 does so up to twice as fast.
    rates = device.peaks.of("fp32")
    if not rates:
        remedy = "measure them with edgeformer calibrate" if device.name == "host" else "its profile has none"
        return _unavailable(f"the rates of {device.title} are not known: {remedy}")
    rate, faster = rates[0].value, 2.0 if precision == "bf16" else 1.0
    operations = step_operations(recipe, length.tokens) * length.rows / recipe.training.batch_size
    low = operations / (rate * faster * SHARE_OF_PEAK[1])
    high = operations / (rate * SHARE_OF_PEAK[0]) * WITH_VALIDATION
    basis = (
        f"{length.text}. {operations:.2g} operations, at {SHARE_OF_PEAK[0]:.0%} to {SHARE_OF_PEAK[1]:.0%} of "
        f"{rate / 1e12:.3g} TFLOP/s ({rates[0].source})"
    )
    return estimated(low_s=low, high_s=high, basis=basis)


def step_operations(recipe: Recipe, tokens: int) -> int:
    """Floating-point operations of products in one micro-batch, forward and backward, whatever is computed again too.

    Args:
        tokens: per row.

    Raises:
        InputError: the model cannot be built.
    """
    task, adapter = task_named(recipe.task), model_spec_of(recipe).adapter
    length = recipe.data.model_copy(update={recipe.data.length_key: tokens})
    shorter = recipe.model_copy(update={"data": length})
    with FakeTensorMode():
        model, _ = adapter.build(recipe, Place(for_export=True))
        loss = adapter.loss(model.train(), recipe, None)
        counter = FlopCounterMode(display=False)
        with counter:
            batch = filled(task.example(shorter, recipe.training.batch_size))
            loss(model, batch).total.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
