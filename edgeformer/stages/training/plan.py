"""plan: will training a recipe fit a device, before a step is run, and if not, what would make it fit."""

from __future__ import annotations

from edgeformer.families.build import count_offline
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import InputError
from edgeformer.formats.planning import Plan, Suggestion
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.units import format_bytes
from edgeformer.stages.training.memory import predict_peak, suggestions
from edgeformer.stages.training.memory_free import free_bytes
from edgeformer.stages.training.precision import resolve_precision

_FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first NVIDIA cards that multiply in bf16 (Ampere)."""


def plan(recipe: AnyRecipe, device: DeviceProfile) -> Plan:
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
            return fact.value, f"{name} of {device.title}: {fact.source}"
    if device.kind == "cpu":
        return free_bytes("cpu")
    raise InputError(
        f"device profile {device.name}: says nothing about memory; add usable_memory_bytes (value, source, verified)"
    )
