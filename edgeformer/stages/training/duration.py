"""How long training will take, before it starts: by a few steps that are timed here, or by a device's stated rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from edgeformer.data.batching import plan_batches
from edgeformer.families import family_of
from edgeformer.families.network import Place
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.plan import PlannedTime
from edgeformer.formats.progress import SILENT, Progress, bar
from edgeformer.formats.recipe import Recipe
from edgeformer.stages.training.memory import filled
from edgeformer.stages.training.timing import timed
from edgeformer.tasks import task_named

SHARE_OF_PEAK = (0.04, 0.5)
"""Of a device's stated rate that training reaches: small models reach little of it. benchmarks/plan_time.py has what
finished trainings reached on a CPU; no GPU was ever measured."""
_TIMED = (0.7, 1.5)
"""Of what timed steps say: machines change their speed within minutes."""
_VALIDATION = 1.15
"""Of the time of the steps, with validation after each epoch; assumed."""
_UNKNOWN_ROWS = 1000
_MOST_PREPARED = 64 << 20
"""Bytes of files that are read and encoded for it; `plan` is meant to answer in seconds."""


@dataclass(frozen=True)
class _Length:
    """What a training reads: optimizer steps and rows over all epochs, tokens per row of a batch, padding included."""

    steps: int | None
    rows: int
    tokens: int
    said: str


def planned_time(
    recipe: Recipe, device: DeviceProfile, precision: str, *, fits: bool, progress: Progress = SILENT
) -> PlannedTime:
    """How long training ``recipe`` on ``device`` will take.

    Where the device is this host and the recipe's data is on it, some steps are timed. Elsewhere the products of a step
    are counted, on tensors without data, and divided by the rate that the profile states.

    Args:
        recipe: with what its teacher computes, if that is known.
        precision: what it would compute in there, resolved.
        fits: a recipe that does not fit is not tried.
    """
    if not _local(recipe):
        return _by_rates(recipe, device, precision, _unread(recipe))
    try:
        with TemporaryDirectory() as cache:  # of encoded data, for the process that times steps: plan leaves no file
            length = _read(recipe, Path(cache), progress)
            if device.name == "host" and fits:
                return _by_steps(recipe, Path(cache), length, progress)
    except EdgeformerError as error:
        return _none(recipe, str(error))
    return _by_rates(recipe, device, precision, length)


def _none(recipe: Recipe, reason: str) -> PlannedTime:
    return PlannedTime(status="unavailable", rows=_UNKNOWN_ROWS * recipe.training.epochs, basis=reason)


def _local(recipe: Recipe) -> bool:
    """Whether all that a recipe reads is on this machine, and little enough to be read now."""
    data, tokenizer = recipe.data, recipe.model_dump(include={"tokenizer"})["tokenizer"]
    sources = [source for part in data.parts.values() for source in part]
    files = [Path(source.path) for source in sources if source.kind == "file"]
    if data.stream or tokenizer.get("kind") == "hub" or any(source.kind == "hub" for source in sources):
        return False
    return all(path.is_file() for path in files) and sum(path.stat().st_size for path in files) <= _MOST_PREPARED


def _read(recipe: Recipe, cache: Path, progress: Progress) -> _Length:
    """What the data here comes to. Raises DataError."""
    prepared = task_named(recipe.task).prepare(recipe, cache, progress)
    training, sizes = recipe.training, prepared.train.sizes(np.arange(len(prepared.train)))
    bucketed = training.batching == "bucketed"
    batches = plan_batches(sizes, training.effective_batch, seed=recipe.seed, epoch=0, bucketed=bucketed)
    padded = sum(len(batch) * int(sizes[batch].max(initial=1)) for batch in batches)
    rows, epochs = len(sizes), training.epochs
    tokens = recipe.data.tokens_at_once if getattr(training, "score_padding", False) else math.ceil(padded / rows)
    return _Length(len(batches) * epochs, rows * epochs, tokens, f"{rows:,} rows of {tokens} tokens, padding included")


def _unread(recipe: Recipe) -> _Length:
    rows, tokens = _UNKNOWN_ROWS * recipe.training.epochs, recipe.data.tokens_at_once
    return _Length(
        None, rows, tokens,
        f"{_UNKNOWN_ROWS:,} rows of {tokens} tokens, its longest: how many there are is known with its data (--data)",
    )  # fmt: skip


def _by_steps(recipe: Recipe, cache: Path, length: _Length, progress: Progress) -> PlannedTime:
    with bar(progress, "Timing some steps", None, ""):
        found = timed(recipe, cache, accelerator="cpu")  # which the host's profile is of
    low, high = (share * found.total_s for share in _TIMED)
    basis = f"{found.timed_steps} steps timed here; {recipe.training.epochs} epochs of {length.said}"
    return PlannedTime(
        status="estimated", low_s=low, high_s=high, steps=found.steps, rows=length.rows, basis=basis
    )  # fmt: skip


def _by_rates(recipe: Recipe, device: DeviceProfile, precision: str, length: _Length) -> PlannedTime:
    # Products are summed in FP32 whatever they multiply; a CPU that multiplies in bf16 does so up to twice as fast.
    rates = device.peaks.of("fp32" if precision == "fp32" or device.kind == "cpu" else "fp16") if device.peaks else ()
    if not rates:
        remedy = "measure them with edgeformer profile --calibrate" if device.name == "host" else "its profile has none"
        return _none(recipe, f"the rates of {device.title} are not known: {remedy}")
    rate, faster = rates[0].value, 2.0 if device.kind == "cpu" and precision == "bf16" else 1.0
    operations = step_operations(recipe, length.tokens) * length.rows / recipe.training.batch_size
    low = operations / (rate * faster * SHARE_OF_PEAK[1])
    high = operations / (rate * SHARE_OF_PEAK[0]) * _VALIDATION
    basis = (
        f"{operations:.2g} operations for {recipe.training.epochs} epochs of {length.said}, at {SHARE_OF_PEAK[0]:.0%} "
        f"to {SHARE_OF_PEAK[1]:.0%} of {rate / 1e12:.3g} TFLOP/s ({rates[0].source})"
        + ("; these shares were seen on CPUs, and never checked on a GPU" if device.kind == "cuda" else "")
    )
    return PlannedTime(
        status="estimated", low_s=low, high_s=high, steps=length.steps, rows=length.rows, basis=basis
    )  # fmt: skip


def step_operations(recipe: Recipe, tokens: int) -> int:
    """Floating-point operations of products in one micro-batch, forward and backward, whatever is computed again too.

    Args:
        tokens: per row.

    Raises:
        InputError: the model cannot be built.
    """
    task, network = task_named(recipe.task), family_of(recipe).network
    length = recipe.data.model_copy(update={recipe.data.length_key: tokens})
    shorter = recipe.model_copy(update={"data": length})
    with FakeTensorMode():
        model, _ = network.build(recipe, Place(for_export=True))
        loss = network.loss(model.train(), recipe, None)
        counter = FlopCounterMode(display=False)
        with counter:
            batch = filled(task.example(shorter, recipe.training.batch_size))
            loss(model, batch).total.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
