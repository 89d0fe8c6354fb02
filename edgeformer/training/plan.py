"""plan: will training a recipe fit a device, before a step is run, and if not, what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import DataError, InputError, MissingDependencyError, RecipeError
from edgeformer.artifacts.plan import MemoryBreakdown, Plan, Suggestion
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Place, count_parameters
from edgeformer.tasks import task_named
from edgeformer.training.duration import planned_data, planned_time
from edgeformer.training.memory import DeviceKind, free_bytes, predict_peak, predict_peaks
from edgeformer.training.optimizer import resolve_precision
from edgeformer.training.teacher import with_teacher, without_teacher

Peak = Callable[[Recipe], int]
"""The predicted peak of training a recipe, in bytes."""

_MOST_LOOKED_AT = 64 << 20
"""Bytes of files that are read to say something of them: some seconds."""
_SHORTEST = 64
"""Tokens below which a shorter row is no longer suggested."""
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first NVIDIA cards that multiply in bf16 (Ampere)."""


def plan(
    recipe: Recipe, device: DeviceProfile, artifacts: Path = Path("artifacts"), progress: Progress = SILENT
) -> Plan:
    """The predicted peak of training ``recipe`` on ``device`` against the memory that it leaves, and how long it takes.

    Args:
        artifacts: the folder of runs, where a teacher is looked for; without it the student alone is planned.

    Raises:
        InputError: the profile says nothing about memory, or the recipe's precision does not train there.
    """
    precision = planned_precision(recipe.training.precision, device)
    budget, source = _budget(device)
    recipe, alone = _with_teacher_if_there(recipe, artifacts)
    with TemporaryDirectory() as folder:  # of encoded data, for the process that times steps: plan leaves no file
        cache = Path(folder)
        data = planned_data(recipe, cache, progress)
        memory = _planned_memory(data.recipe, device, precision, budget, progress)
        fits = memory.breakdown.peak_bytes <= budget
        time = planned_time(data, device, precision, cache, fits=fits, progress=progress)
    was_read = data.length is not None and data.length.rows_from == "data"
    peak = memory.breakdown.peak_bytes
    if fits:
        reason = f"fits: at the peak {format_bytes(budget - peak)} of {format_bytes(budget)} are left"
    else:
        reason = f"does not fit: {format_bytes(peak - budget)} more than the {format_bytes(budget)} there are"
        if not any(suggestion.fits for suggestion in memory.suggestions):
            reason += "; no change of batch, checkpointing, precision or length makes it fit"
    reason += alone
    return Plan(
        recipe=recipe.name,
        device=device.name,
        parameters=count_offline(data.recipe),
        precision=precision,
        status="pass" if fits else "fail",
        fits=fits,
        peak_bytes=peak,
        budget_bytes=budget,
        budget_source=source,
        breakdown=memory.breakdown,
        suggestions=memory.suggestions,
        larger_batches=memory.larger_batches,
        time=time,
        reason=reason,
        notes=data.notes if was_read else (*data.notes, *data_notes(recipe)),
    )


@dataclass(frozen=True)
class _PlannedMemory:
    breakdown: MemoryBreakdown
    suggestions: tuple[Suggestion, ...] = ()
    larger_batches: tuple[Suggestion, ...] = ()


_LARGER = (2, 4)
"""Multiples of ``training.batch_size`` that a plan looks at where memory is left."""


def _planned_memory(
    recipe: Recipe, device: DeviceProfile, precision: str, budget: int, progress: Progress
) -> _PlannedMemory:
    """Predict the peak, and what to change: what makes the recipe fit, or how many more rows fit at a time."""
    training = recipe.training
    with bar(progress, "Predicting the peak memory", None, ""):
        factors = [factor for factor in _LARGER if training.accumulation % factor == 0]
        breakdown, *bounds = predict_peaks(recipe, (1, *factors), device_kind=device.kind, precision=precision)
    if breakdown.peak_bytes > budget:
        with bar(progress, "Looking for what fits", None, ""):
            natural = planned_precision("auto", device)
            return _PlannedMemory(breakdown, _suggestions(recipe, budget, device.kind, precision, natural))
    larger = []
    for factor, bound in zip(factors, bounds, strict=True):
        size, accumulation = training.batch_size * factor, training.accumulation // factor
        change = {"training.batch_size": size, "training.accumulation": accumulation}
        note = f"the same effective batch of {training.effective_batch} rows; the peak is an upper bound"
        larger.append(_suggestion((Change(change, note),), bound.peak_bytes, budget))
    return _PlannedMemory(breakdown, larger_batches=tuple(change for change in larger if change.fits))


def data_notes(recipe: Recipe) -> tuple[str, ...]:
    """What training would say of its data; nothing where that is not on this machine, or too much to be read now."""
    sources = [source for part in recipe.data.parts.values() for source in part]
    files = [Path(source.path) for source in sources if source.kind == "file"]
    there = len(files) == len(sources) and all(path.is_file() for path in files)
    if not there or sum(path.stat().st_size for path in files) > _MOST_LOOKED_AT:
        return ()
    try:
        return tuple(finding.message for finding in task_named(recipe.task).findings(recipe.data))
    except (DataError, MissingDependencyError) as error:
        return (f"training would refuse its data: {error}",)


def _with_teacher_if_there(recipe: Recipe, artifacts: Path) -> tuple[Recipe, str]:
    """What can be planned of a recipe with a teacher, and what to say of it."""
    try:
        return with_teacher(recipe, artifacts), ""
    except RecipeError as error:
        return without_teacher(recipe), f"; of the student alone, its teacher would take its weights on top: {error}"


def planned_precision(requested: str, device: DeviceProfile) -> str:
    """``auto`` as training would resolve it on ``device``. Raises InputError, as training would."""
    if device.kind == "cpu" or requested != "auto":
        return resolve_precision(requested, device.kind)
    fact = device.compute_capability
    capability = tuple(int(part) for part in fact.value.split(".")) if fact is not None else (0, 0)
    return "bf16" if capability >= _FIRST_WITH_BF16 else "fp16"


def _budget(device: DeviceProfile) -> tuple[int, str]:
    facts = {"usable memory": device.usable_memory_bytes, "memory": device.memory_bytes}
    for name, fact in facts.items():
        if fact is not None:
            context, less = context_of(device)
            return fact.value - context, f"{name} of {device.title}{less}: {fact.source}"
    if device.kind == "cpu":
        return free_bytes("cpu")
    raise InputError(
        f"device profile {device.name}: says nothing about memory; add usable_memory_bytes (value, source, verified)"
    )


def context_of(device: DeviceProfile) -> tuple[int, str]:
    """Bytes of usable memory that CUDA's context takes before the first tensor, and how a message says so."""
    if device.kind != "cuda" or device.context_bytes is None:
        return 0, ""
    return device.context_bytes.value, f", less {format_bytes(device.context_bytes.value)} for CUDA's context"


def count_offline(recipe: Recipe) -> int:
    """Exact parameter count of a recipe's model without allocating a weight (meta device)."""
    with torch.device("meta"):
        model, _ = model_spec_of(recipe).adapter.build(recipe, Place(for_export=True))
    return count_parameters(model)


def check_fits(
    recipe: Recipe,
    *,
    device_kind: DeviceKind,
    precision: str,
    free: tuple[int, str],
    processes: int = 1,
    sharded: bool = False,
) -> MemoryBreakdown:
    """Predict the peak, and refuse a recipe that cannot fit.

    Args:
        free: bytes that training may take, and of what they are a part, e.g. "free on … now".
        processes, sharded: see :func:`predict_peak`.

    Raises:
        InputError: with the predicted peak, what there is, and what to change.
    """
    breakdown = predict_peak(recipe, device_kind=device_kind, precision=precision, processes=processes, sharded=sharded)
    budget, what = free
    if breakdown.peak_bytes <= budget:
        return breakdown
    found = _suggestions(recipe, budget, device_kind, precision, resolve_precision("auto", device_kind))
    remedy = "no change of batch, checkpointing, precision or length makes it fit; use a smaller model"
    if fitting := [suggestion for suggestion in found if suggestion.fits]:
        flags = " ".join(f"--set {pair}" for pair in fitting[0].set)
        remedy = f"it would fit ({format_bytes(fitting[0].peak_bytes)}) with {flags} ({fitting[0].note})"
    raise InputError(
        f"{recipe.name}: training would take {format_bytes(breakdown.peak_bytes)} at its peak (predicted), and "
        f"{format_bytes(budget)} are {what}; {remedy}, or train anyway with --ignore-memory"
    )


def _suggestions(
    recipe: Recipe, budget_bytes: int, device_kind: DeviceKind, precision: str, natural: str
) -> tuple[Suggestion, ...]:
    """What to change so that ``recipe`` fits.

    Args:
        precision: what the recipe computes in, resolved.
        natural: what the device would compute in with ``precision: auto``.
    """

    def peak(candidate: Recipe) -> int:
        changed = candidate.training.precision != recipe.training.precision
        format_ = candidate.training.precision if changed else precision
        return predict_peak(candidate, device_kind=device_kind, precision=format_).peak_bytes

    return suggest(recipe, budget_bytes, peak, natural if precision == "fp32" and natural != "fp32" else None)


@dataclass(frozen=True)
class Change:
    """Other values for some keys, and what they cost."""

    values: dict[str, Any]
    note: str

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with these values."""
        for key, value in self.values.items():
            section, name = key.split(".")
            changed = getattr(recipe, section).model_copy(update={name: value})
            recipe = recipe.model_copy(update={section: changed})
        return recipe


def _suggestion(changes: tuple[Change, ...], peak_bytes: int, budget_bytes: int) -> Suggestion:
    pairs = tuple(f"{key}={str(value).lower()}" for change in changes for key, value in change.values.items())
    note = "; ".join(change.note for change in changes)
    return Suggestion(set=pairs, peak_bytes=peak_bytes, fits=peak_bytes <= budget_bytes, note=note)


def suggest(recipe: Recipe, budget_bytes: int, peak: Peak, half_precision: str | None) -> tuple[Suggestion, ...]:
    """First the changes that together make ``recipe`` fit, if any do; then each change by itself.

    Args:
        peak: of any recipe; asked about ten times.
        half_precision: the 16-bit format that the device computes fast in; None: it has none, or the recipe is in it.
    """
    known: dict[str, int] = {}

    def peak_of(candidate: Recipe) -> int:
        key = candidate.fingerprint()
        if key not in known:
            known[key] = peak(candidate)
        return known[key]

    fitting = _search(recipe, budget_bytes, peak_of, half_precision)
    firsts = [changes[0] for changes in _steps(recipe, half_precision) if changes]
    singles = [_suggestion((change,), peak_of(change.applied(recipe)), budget_bytes) for change in firsts]
    return (*fitting, *(single for single in singles if single.set not in {first.set for first in fitting}))


def _search(recipe: Recipe, budget_bytes: int, peak_of: Peak, half_precision: str | None) -> list[Suggestion]:
    """Add one kind of change after the other, from the cheapest on, each as far as needed, until it fits (or never).

    A change that does not lower the peak is not kept.
    """
    kept: tuple[Change, ...] = ()
    lowest = peak_of(recipe)
    for number in range(len(_steps(recipe, half_precision))):
        start, start_recipe = kept, recipe
        points = [(recipe.training.batch_size, lowest)]
        for change in _steps(start_recipe, half_precision)[number]:
            changed = change.applied(start_recipe)
            rows = changed.training.batch_size
            # What is alive at any one moment grows by a fixed amount per row, and the peak is the largest of such
            # lines: a convex function of the rows. Below two known points it lies above the line through them, so what
            # is above the budget there cannot fit (but the peak of a single row is wanted in any case).
            if len(points) > 1 and rows > 1:
                (more, larger), (fewer, smaller) = points[-2:]
                if smaller - (larger - smaller) / (more - fewer) * (fewer - rows) > budget_bytes:
                    continue
            found = peak_of(changed)
            if rows != points[-1][0]:
                points.append((rows, found))
            if found < lowest:
                kept, recipe, lowest = (*start, change), changed, found
            if found <= budget_bytes:
                return [_suggestion(kept, found, budget_bytes)]
    return []


def _steps(recipe: Recipe, half_precision: str | None) -> tuple[list[Change], ...]:
    """Kinds of changes from the cheapest on, each with its values from the mildest on."""
    training, data = recipe.training, recipe.data
    rows, effective = training.batch_size, training.effective_batch
    note = "the same result; the heads' logits are computed a part at a time"
    whole_logits = getattr(training, "chunked_loss", True) is False
    chunked = [Change({"training.chunked_loss": True}, note)] if whole_logits else []
    note = f"the same effective batch of {effective} rows, fewer at a time"
    smaller = [
        Change({"training.batch_size": size, "training.accumulation": effective // size}, note)
        for size in range(rows // 2, 0, -1)
        if rows % size == 0
    ]
    # Every kind that keeps less than the present one, where the task's training knows checkpointing.
    field = type(training).model_fields.get("checkpointing")
    kinds = get_args(field.annotation) if field is not None else ()
    less = kinds[kinds.index(getattr(training, "checkpointing")) + 1 :] if kinds else ()  # noqa: B009
    note = "the same result; the forward pass is computed twice, about a third more work per step"
    recomputed = [Change({"training.checkpointing": kind}, note) for kind in less]
    note = "activations in 16 bits, weights stay in 32; usually faster, not bit for bit the same"
    halved = [Change({"training.precision": half_precision}, note)] if half_precision is not None else []
    lengths = [data.tokens_at_once >> halvings for halvings in range(1, data.tokens_at_once.bit_length())]
    shorter = [
        Change({f"data.{data.length_key}": length}, f"changes the task: the model sees {length} tokens at once")
        for length in lengths
        if length >= _SHORTEST
    ]
    return chunked, smaller, recomputed, halved, shorter
