"""What a device's budget and the command line allow, and at which shapes that is judged."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from edgeformer.formats.device import DeviceProfile
from edgeformer.stages.profiling.verdict import Limits
from edgeformer.tasks import Task

if TYPE_CHECKING:
    from edgeformer.formats.data_config import DataSection
    from edgeformer.stages.profiling.request import ProfileOptions

T = TypeVar("T")


def limits_of(
    options: ProfileOptions,
    device: DeviceProfile,
    task: Task,
    longest: int | None,
    data: DataSection | None,
    *,
    elsewhere: bool = False,
) -> Limits:
    """What a device leaves to a model of a task: its budget, and what the options say instead.

    Args:
        options: whose limits win.
        device: whose budget it is.
        task: of the model.
        longest: tokens of its longest call; None: any number.
        data: of the model's bundle; None: it is not at hand.
        elsewhere: what is judged was measured on another machine, whose memory is not this one's.
    """
    budget = device.budgets.for_task(task.name)
    seq = min(budget.seq, longest or budget.seq)
    capped = f"the budget names {budget.batch}×{budget.seq}, but the model takes at most {seq} tokens of a text"
    batch, seq = (budget.batch, seq) if data is None else task.fit_shape(data, budget.batch, seq)
    usable = device.usable_memory_bytes or device.memory_bytes
    of_host = not elsewhere and device.kind == "cpu" and device.match is None
    here = psutil.virtual_memory().total if of_host else None
    known = Limits(
        size_bytes=_first(options.max_size_bytes, budget.size_bytes),
        latency_ms=budget.latency_p50_ms,
        memory_bytes=budget.memory_bytes or (usable.value if usable else here),
        energy_mj=budget.energy_mj,
        batch=batch,
        seq=seq,
        # A budget of what writes text is per decoded token, not per forward pass over the whole text.
        phase=task.phase,
        shape_note=capped if longest is not None and seq < budget.seq else None,
        profile=device.name,
    )
    return _with_asked(known, options, task, data)


def _with_asked(known: Limits, options: ProfileOptions, task: Task, data: DataSection | None) -> Limits:
    """``known`` with the limits of the command line, which are judged at the shapes that it names, if it names any."""
    given: dict[str, Any] = {
        "latency_ms": options.max_latency_ms,
        "memory_bytes": options.max_memory_bytes,
        "energy_mj": options.max_energy_mj,
    }
    given = {name: limit for name, limit in given.items() if limit is not None}
    named = product(options.batches or (known.batch,), options.seqs or (known.seq,))
    shapes = {shape if data is None else task.fit_shape(data, *shape) for shape in named}
    if not given or shapes == {(known.batch, known.seq)}:
        return replace(known, **given)
    nothing: dict[str, Any] = dict.fromkeys(("size_bytes", "latency_ms", "memory_bytes", "energy_mj", "shape_note"))
    asked = (
        replace(known, **{**nothing, **given, "batch": batch, "seq": seq})
        for batch, seq in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    )
    gone: dict[str, Any] = dict.fromkeys(given)
    return replace(known, **gone, asked=tuple(asked))


def shape_notes(limits: Limits) -> list[str]:
    """What a reader must know of the shapes at which limits are judged."""
    notes = [f"budget's shape: {limits.shape_note}"] if limits.shape_note else []
    if limits.asked:
        shapes = ", ".join(f"{at.batch}×{at.seq}" for at in limits.asked)
        own = f"; the budget's own are judged at {limits.batch}×{limits.seq}" if limits.judges_calls else ""
        notes.append(f"the command's limits are judged at {shapes}, which it asked for{own}")
    return notes


def _first(asked: T | None, budget: T | None) -> T | None:
    return asked if asked is not None else budget
