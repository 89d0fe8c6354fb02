"""Limits as a flat list of records, the figures of a row, and the comparison of a figure with a limit.

The gate also asks whether a change may be chance: ``gate_scores`` and ``paired_run`` say undecided where it may.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from edgeformer.artifacts.report import QUANTILES, CheckStatus, Figure, Row
from edgeformer.measurement.artifact import Shape
from edgeformer.report.sentences import note

Quantity = Literal["size", "latency", "memory", "energy", "score"]
UNITS: dict[str, str] = {"size": "bytes", "latency": "ms", "memory": "bytes", "energy": "mJ"}
PER_CALL = ("latency", "energy")  # quantities of one call, or of one decoded token


@dataclass(frozen=True)
class Limit:
    """A limit of one quantity, in bytes, milliseconds, millijoules, or the unit of the task's metric.

    ``shape`` is (batch, seq) of the call; None: a file or a score. ``origin``: the device profile or the command. Of a
    gate, a limit is the largest change for the worse, as a share.
    """

    quantity: Quantity
    limit: float
    shape: Shape | None = None
    origin: Literal["profile", "command"] = "command"


@dataclass(frozen=True)
class Requirements:
    """All limits of an artifact, and how it is judged by them.

    The limits at the shape of the budget are first, then those of the command at its own shapes, from small to large.
    """

    limits: tuple[Limit, ...]
    shape: Shape  # of the device's budget
    phase: Literal["steady", "decode"] = "steady"  # of latency and energy: a whole call, or one decoded token
    shape_note: str | None = None  # why `shape` is not the budget's
    profile: str | None = None  # name of the device profile

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape at which something is judged; without limits, the budget's."""
        return tuple(dict.fromkeys(limit.shape for limit in self.limits if limit.shape is not None)) or (self.shape,)

    @property
    def command_shapes(self) -> tuple[Shape, ...]:
        """Shapes at which limits of the command are judged."""
        shapes = (limit.shape for limit in self.limits if limit.shape is not None and limit.origin == "command")
        return tuple(dict.fromkeys(shapes))


def limit_of(limits: Iterable[Limit], quantity: Quantity) -> float | None:
    """Return the first limit of a quantity; None: it has no limit."""
    return next((limit.limit for limit in limits if limit.quantity == quantity), None)


def compare(figure: Figure, limit: float, *, at_least: bool = False) -> CheckStatus:
    """Compare a figure with a limit, which it may not exceed, or with ``at_least`` not fall below.

    A range passes if it lies wholly within the limit, and fails if it lies wholly beyond it; an estimate without a
    range, like an absent value, is unknown.
    """
    if figure.value is None:
        return "unknown"
    low, high = figure.low, figure.high
    if low is None or high is None:
        if figure.basis != "measured":
            return "unknown"
        low = high = figure.value
    if at_least:
        low, high, limit = -high, -low, -limit
    return "pass" if high <= limit else "fail" if low > limit else "unknown"


def figures_of(row: Row) -> dict[str, Figure]:
    """Return size, latency, memory and energy of a row.

    The value of an estimated range is its geometric middle. The range of a measured time holds the second process's
    median, and of an unstable sample both quartiles: the median of every half of its calls lies between them.
    """
    latency, memory, energy = row.latency_ms, row.memory_bytes, row.energy_mj
    figures = {"size": Figure(row.size_bytes)}
    for name, source, value, low, high in (
        ("latency", latency, latency.p50, latency.low, latency.high),
        ("memory", memory, memory.peak, memory.low, memory.high),
        ("energy", energy, energy.value, None, None),
    ):
        if source.status == "measured" and value is not None:
            figures[name] = Figure(value)
        elif source.status == "estimated" and name != "energy":  # energy is never estimated
            value = sqrt(low * high) if value is None and low is not None and high is not None else value
            figures[name] = Figure(value, "estimated", low, high)
        else:
            figures[name] = Figure(None, "unavailable", reason=source.reason or "not measured")
    if figures["latency"].basis == "measured":
        values = [latency.p50 or 0.0]
        if row.conditions.repeated_p50_ms is not None:
            values.append(row.conditions.repeated_p50_ms)
        if latency.stable is False and len(latency.quantiles_ms) == QUANTILES:
            values += (latency.quantiles_ms[QUANTILES // 4], latency.quantiles_ms[-1 - QUANTILES // 4])
        low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
        reason = None if latency.stable else note("unstable")
        figures["latency"] = Figure(latency.p50, "measured", low, high, reason)
    return figures
