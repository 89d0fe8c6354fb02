"""plan: the memory that training a recipe takes, before a step is run."""

from __future__ import annotations

import psutil

from edgeformer.models.build import count_offline
from edgeformer.schema.device import DeviceProfile
from edgeformer.schema.planning import MemoryBreakdown, Plan
from edgeformer.schema.recipe import Recipe
from edgeformer.schema.units import format_bytes

_FLOAT32 = 4
_ADAMW_STATES = 2  # first and second moment


def plan(recipe: Recipe, device: DeviceProfile) -> Plan:
    """Exact bytes of weights, gradients and AdamW state (float32, also under autocast) against the device's memory."""
    parameters = count_offline(recipe.model, recipe.classes)
    weights = parameters * _FLOAT32
    breakdown = MemoryBreakdown(weights=weights, gradients=weights, optimizer=_ADAMW_STATES * weights)
    known = breakdown.weights + breakdown.gradients + breakdown.optimizer
    budget = _budget(device)
    too_big = known > budget
    if too_big:
        reason = f"weights, gradients and optimizer alone take {format_bytes(known)} of {format_bytes(budget)}"
    else:
        reason = "activations are not counted yet, so this is a lower bound"
    return Plan(
        recipe=recipe.name,
        device=device.name,
        parameters=parameters,
        status="fail" if too_big else "unknown",
        fits=False if too_big else None,
        peak_bytes=None,
        at_least_bytes=known,
        budget_bytes=budget,
        breakdown=breakdown,
        reason=reason,
    )


def _budget(device: DeviceProfile) -> int:
    for fact in (device.usable_memory_bytes, device.memory_bytes):
        if fact is not None:
            return fact.value
    return int(psutil.virtual_memory().total)
