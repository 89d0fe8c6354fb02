"""plan: will training a recipe fit a device, before a step is run, and if not, what would make it fit."""

from __future__ import annotations

import torch

from edgeformer.families import family_of
from edgeformer.families.network import Place
from edgeformer.families.weights import count_parameters
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import InputError
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.report import MemoryBreakdown, Plan, Suggestion
from edgeformer.formats.units import format_bytes
from edgeformer.stages.training.memory import DeviceKind, predict_peak
from edgeformer.stages.training.memory_here import free_bytes
from edgeformer.stages.training.optimization import resolve_precision
from edgeformer.stages.training.suggestions import in_words, suggest

_FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first NVIDIA cards that multiply in bf16 (Ampere)."""


def plan(recipe: Recipe, device: DeviceProfile) -> Plan:
    """The predicted peak of training ``recipe`` on ``device`` against the memory that it leaves to a process.

    Raises:
        InputError: the profile says nothing about memory, or the recipe's precision does not train there.
    """
    precision = planned_precision(recipe.training.precision, device)
    budget, source = _budget(device)
    breakdown = predict_peak(recipe, device_kind=device.kind, precision=precision)
    peak = breakdown.peak_bytes
    found: tuple[Suggestion, ...] = ()
    if peak > budget:
        natural = planned_precision("auto", device)
        found = suggestions(recipe, budget, device_kind=device.kind, precision=precision, natural=natural)
    return Plan(
        recipe=recipe.name,
        device=device.name,
        parameters=count_offline(recipe),
        precision=precision,
        status="pass" if peak <= budget else "fail",
        fits=peak <= budget,
        peak_bytes=peak,
        budget_bytes=budget,
        budget_source=source,
        breakdown=breakdown,
        suggestions=found,
        reason=_reason(peak, budget, found),
    )


def _reason(peak: int, budget: int, found: tuple[Suggestion, ...]) -> str:
    if peak <= budget:
        return f"fits: at the peak {format_bytes(budget - peak)} of {format_bytes(budget)} are left"
    missing = f"does not fit: {format_bytes(peak - budget)} more than the {format_bytes(budget)} there are"
    if any(suggestion.fits for suggestion in found):
        return missing
    return f"{missing}; no change of batch, checkpointing, precision or length makes it fit"


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
        model, _ = family_of(recipe).network.build(recipe, Place(for_export=True))
    return count_parameters(model)


def check_fits(
    recipe: Recipe, *, device_kind: DeviceKind, precision: str, free_bytes: int, what: str
) -> MemoryBreakdown:
    """Predict the peak, and refuse a recipe that cannot fit.

    Args:
        free_bytes, what: memory that training may take, and of what it is a part, e.g. "free on … now".

    Raises:
        InputError: with the predicted peak, what there is, and what to change.
    """
    breakdown = predict_peak(recipe, device_kind=device_kind, precision=precision)
    if breakdown.peak_bytes <= free_bytes:
        return breakdown
    natural = resolve_precision("auto", device_kind)
    found = suggestions(recipe, free_bytes, device_kind=device_kind, precision=precision, natural=natural)
    raise InputError(
        f"{recipe.name}: training would take {format_bytes(breakdown.peak_bytes)} at its peak (predicted), and "
        f"{format_bytes(free_bytes)} are {what}; {in_words(found)}, or train anyway with --ignore-memory"
    )


def suggestions(
    recipe: Recipe, budget_bytes: int, *, device_kind: DeviceKind, precision: str, natural: str
) -> tuple[Suggestion, ...]:
    """What to change so that ``recipe`` fits into ``budget_bytes``.

    Args:
        precision: what the recipe computes in, resolved.
        natural: what the device would compute in with ``precision: auto``.
    """

    def peak(candidate: Recipe) -> int:
        changed = candidate.training.precision != recipe.training.precision
        format_ = candidate.training.precision if changed else precision
        return predict_peak(candidate, device_kind=device_kind, precision=format_).peak_bytes

    half = natural if precision == "fp32" and natural != "fp32" else None
    return suggest(recipe, budget_bytes, peak, half)
