"""Command plan: whether training a recipe fits a device, how long it takes, and changes that make it fit."""

from bisect import bisect_left
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import torch

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError, RecipeError
from edgeformer.artifacts.plan import Plan, Suggestion
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import FittedAdapter, count_parameters
from edgeformer.system.memory import host_free_bytes
from edgeformer.training.loop.optimizer import BF16_CAPABILITY, resolve_precision
from edgeformer.training.loop.teacher import with_teacher, without_teacher
from edgeformer.training.plan.duration import StepWork, planned_data, planned_time
from edgeformer.training.plan.memory import DeviceKind, predict_fit, predict_peak

_SHORTEST = 64
"""Tokens below which shorter rows are not suggested."""
_LARGER_FACTORS = (2, 4)
"""Multiples of ``training.batch_size`` that are predicted if memory is free."""


def plan(
    recipe: Recipe, device: DeviceProfile, artifacts: Path = Path("artifacts"), progress: Progress = SILENT
) -> Plan:
    """Predict peak memory and time of training ``recipe`` on ``device``, and compare the peak with its memory.

    A teacher's name refers to the folder ``artifacts``; if it is not there, the student alone is planned. Raises
    InputError: the profile does not state its memory, or the device does not train in the recipe's precision.
    """
    # 1. Determine the budget
    teacher_note = ""
    try:
        recipe = with_teacher(recipe, artifacts)
    except RecipeError as error:
        recipe = without_teacher(recipe)
        teacher_note = f"; without the teacher: {error}"
    is_fitted = isinstance(model_spec_of(recipe).adapter, FittedAdapter)  # on the CPU of any device
    precision = planned_precision(recipe.training.precision, device)
    context, context_note = context_of(device)
    facts = {"usable memory": device.usable_memory_bytes, "memory": device.memory_bytes}
    stated = [(name, fact) for name, fact in facts.items() if fact is not None]
    if (is_fitted and device.kind == "cuda") or (not stated and device.kind == "cpu"):
        budget, budget_source = host_free_bytes()
    elif stated:
        name, fact = stated[0]
        budget, budget_source = fact.value - context, f"{name} of {device.title}{context_note}: {fact.source}"
    else:
        raise InputError(
            f"device profile {device.name}: has no memory size; add usable_memory_bytes (value, source, verified)"
        )

    # 2. Predict memory and time
    with TemporaryDirectory() as folder:  # for encoded data: plan leaves no files
        cache, work = Path(folder), StepWork()
        data = planned_data(recipe, cache, progress, artifacts / ".cache" / "tokens")
        if is_fitted:
            parameters, breakdown = predict_fit(data.recipe, data.rows, data.tokens * data.rows)
        else:
            with bar(progress, "Predicting the peak memory", None, ""):
                parameters = count_offline(data.recipe)
                breakdown = predict_peak(
                    data.recipe, device_kind=device.kind, precision=precision, work=work, start_bytes=data.start_bytes
                )
        peak = breakdown.peak_bytes
        fits = peak <= budget
        suggestions: tuple[Suggestion, ...] = ()
        larger_batches: list[Suggestion] = []
        if not is_fitted:
            with bar(progress, "Searching for a recipe that fits", None, ""):
                if fits:
                    training = data.recipe.training  # larger batches have the same effective batch
                    for factor in (factor for factor in _LARGER_FACTORS if training.accumulation % factor == 0):
                        change = _batch_change(data.recipe, training.batch_size * factor, "")
                        larger = predict_peak(change.apply(data.recipe), device_kind=device.kind, precision=precision)
                        if larger.peak_bytes <= budget:
                            larger_batches.append(_suggestion((change,), larger.peak_bytes, budget))
                else:
                    suggestions = suggest(
                        data.recipe, budget, device_kind=device.kind, precision=precision,
                        fast_precision=planned_precision("auto", device),
                    )  # fmt: skip
        time = planned_time(data, work, device, precision, cache, fits=fits, progress=progress)

    # 3. Describe the result
    reason = f"fits: {format_bytes(budget - peak)} of {format_bytes(budget)} are free at the peak"
    if not fits:
        reason = f"does not fit: {format_bytes(peak - budget)} more than the available {format_bytes(budget)}"
        if not is_fitted and not any(suggestion.fits for suggestion in suggestions):
            reason += "; no change of batch, checkpointing, precision or length makes it fit"
    fit_note = "the training text decides the number of weights, and this plan takes the most there can be"
    return Plan(
        recipe=recipe.name, device=device.name, parameters=parameters, precision=precision,
        status="pass" if fits else "fail", fits=fits, peak_bytes=peak, budget_bytes=budget,
        budget_source=budget_source, breakdown=breakdown, suggestions=suggestions,
        larger_batches=tuple(larger_batches), time=time, reason=reason + teacher_note,
        notes=((fit_note,) if is_fitted else ()) + data.notes,
    )  # fmt: skip


def planned_precision(requested: str, device: DeviceProfile) -> str:
    """Resolve ``auto`` as training on ``device`` would. Raises InputError as training would."""
    if device.kind == "cpu" or requested != "auto":
        return resolve_precision(requested, device.kind)
    fact = device.compute_capability
    capability = tuple(int(part) for part in fact.value.split(".")) if fact is not None else (0, 0)
    return "bf16" if capability >= BF16_CAPABILITY else "fp16"


def context_of(device: DeviceProfile) -> tuple[int, str]:
    """Return the bytes of usable memory that CUDA's context takes before the first tensor, and a note about it."""
    if device.kind != "cuda" or device.context_bytes is None:
        return 0, ""
    return device.context_bytes.value, f", less {format_bytes(device.context_bytes.value)} for CUDA's context"


def count_offline(recipe: Recipe) -> int:
    """Count the parameters of a recipe's model without allocating them (meta device)."""
    with torch.device("meta"):
        return count_parameters(model_spec_of(recipe).adapter.build(recipe))


class Change(NamedTuple):
    """Other values for some keys of a recipe, and their cost in words."""

    values: dict[str, Any]
    note: str

    def apply(self, recipe: Recipe) -> Recipe:
        for key, value in self.values.items():
            section, name = key.split(".")
            changed = getattr(recipe, section).model_copy(update={name: value})
            recipe = recipe.model_copy(update={section: changed})
        return recipe


def _batch_change(recipe: Recipe, size: int, detail: str) -> Change:
    """Return the change to ``size`` rows at a time, with the same effective batch."""
    values = {"training.batch_size": size, "training.accumulation": recipe.training.micro_batches(size)}
    return Change(values, f"the same effective batch of {recipe.training.effective_batch} rows{detail}")


def _suggestion(changes: tuple[Change, ...], peak_bytes: int, budget_bytes: int) -> Suggestion:
    pairs = tuple(f"{key}={str(value).lower()}" for change in changes for key, value in change.values.items())
    note = "; ".join(change.note for change in changes)
    return Suggestion(set=pairs, peak_bytes=peak_bytes, fits=peak_bytes <= budget_bytes, note=note)


def suggest(
    recipe: Recipe, budget_bytes: int, *, device_kind: DeviceKind, precision: str, fast_precision: str
) -> tuple[Suggestion, ...]:
    """Return first the changes that together make ``recipe`` fit, if any do, then each change alone.

    Kinds of changes are added from the cheapest on, each only as far as necessary, until the recipe fits. A change that
    does not lower the peak is dropped. ``fast_precision`` is what ``auto`` is on the device.
    """
    half_precision = fast_precision if precision == "fp32" and fast_precision != "fp32" else None
    peaks: dict[str, int] = {}

    def peak_of(candidate: Recipe) -> int:
        key = candidate.fingerprint()
        if key not in peaks:
            is_changed = candidate.training.precision != recipe.training.precision
            format_ = candidate.training.precision if is_changed else precision
            peaks[key] = predict_peak(candidate, device_kind=device_kind, precision=format_).peak_bytes
        return peaks[key]

    applied: tuple[Change, ...] = ()
    current = recipe
    kinds = _changes(recipe, half_precision)
    for kind in range(len(kinds)):
        changes = _changes(current, half_precision)[kind]
        if not changes or peak_of(current) <= budget_bytes:
            continue
        candidates = [change.apply(current) for change in changes]
        target = max(budget_bytes, peak_of(candidates[-1]))
        mildest = bisect_left(candidates, True, key=lambda candidate: peak_of(candidate) <= target)
        if peak_of(candidates[mildest]) < peak_of(current):
            applied, current = (*applied, changes[mildest]), candidates[mildest]
    singles = [
        _suggestion((changes[0],), peak_of(changes[0].apply(recipe)), budget_bytes) for changes in kinds if changes
    ]
    if not applied or peak_of(current) > budget_bytes:
        return tuple(singles)
    best = _suggestion(applied, peak_of(current), budget_bytes)
    return (best, *(single for single in singles if single.set != best.set))


def _changes(recipe: Recipe, half_precision: str | None) -> tuple[list[Change], ...]:
    """Return kinds of changes from the cheapest on, each with its values from the mildest on."""
    training, data = recipe.training, recipe.data
    note = "the same result; logits are computed in parts"
    is_chunked = getattr(training, "chunked_loss", True)
    chunked = [] if is_chunked else [Change({"training.chunked_loss": True}, note)]
    smaller = [
        _batch_change(recipe, size, ", in smaller micro-batches")
        for size in range(training.batch_size // 2, 0, -1)
        if training.batch_size % size == 0
    ]
    # All kinds of checkpointing that keep less than the recipe's, if the task's training supports it.
    field = type(training).model_fields.get("checkpointing")
    kinds = get_args(field.annotation) if field is not None else ()
    stronger = kinds[kinds.index(getattr(training, "checkpointing")) + 1 :] if kinds else ()  # noqa: B009
    note = "the same result; the forward pass is computed twice, about a third more work per step"
    recomputed = [Change({"training.checkpointing": kind}, note) for kind in stronger]
    note = "activations in 16 bits, weights in 32; usually faster, results differ slightly"
    halved = [Change({"training.precision": half_precision}, note)] if half_precision is not None else []
    lengths = [data.tokens_at_once >> halvings for halvings in range(1, data.tokens_at_once.bit_length())]
    shorter = [
        Change({f"data.{data.length_key}": length}, f"changes the task: the model sees only {length} tokens at once")
        for length in lengths
        if length >= _SHORTEST
    ]
    return chunked, smaller, recomputed, halved, shorter
