"""The record: every case estimated by what the other models taught, beside two measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from benchmarks.estimates.measuring import Stored
from benchmarks.estimates.models import Model
from edgeformer.formats.device import DeviceProfile, Speed
from edgeformer.stages.profiling.estimating.estimate import Case, estimate_listed
from edgeformer.stages.profiling.estimating.held_out import left_out, with_left_out
from edgeformer.stages.profiling.estimating.host_facts import host_facts
from edgeformer.stages.profiling.estimating.listing import Listing
from edgeformer.stages.profiling.estimating.probe import HostRates
from edgeformer.stages.profiling.estimating.profiled import TimedCall, at_one_speed, counted, speeds_of
from edgeformer.stages.profiling.estimating.reference import two_speeds, typical
from edgeformer.stages.profiling.estimating.teaching import fit

Row = dict[str, Any]
WITHIN, MEDIAN, HELD, WIDEST, TAU = 0.80, 0.07, 0.95, 2.0, 0.9
"""What is wanted: a share within ±15 %, the median error, how often ranges hold, how wide they are, the order."""
_CLOSE = math.log2(1.15)


def rows_of(
    base: DeviceProfile,
    probed: HostRates,
    passes: tuple[Sequence[Stored], Sequence[Stored]],
    models: Mapping[str, Model],
    tell: Callable[[str], None],
) -> list[Row]:
    """Every case of one number of threads.

    Args:
        base: the shipped profile of a host.
        probed: with as many threads.
        passes: the first is estimated, and taught by the others; the second repeats it later.
        models: by name.
        tell: what is going on.
    """
    first, second = passes
    threads = first[0].threads
    device = host_facts(base, threads, probed, [one.timed for one in first])
    calls, held = at_one_speed(counted([one.timed for one in first]))
    again = _again(second, held)
    rows: list[Row] = []
    for name in dict.fromkeys(one.model for one in first):
        tell(f"{threads} threads: {name} by the other models")
        others = [call for call in calls if call.run != name]
        taught = fit(device, probed, others, speed=held)
        inner = left_out(device, probed, others, held)
        taught = with_left_out(taught, inner) if inner else taught
        measured = {(call.artifact.id, call.item): call for call in calls if call.run == name}
        for one in (one for one in first if one.model == name):
            case = Case(one.artifact, one.artifact, taught)
            for item in one.items:
                latency = estimate_listed(case, Listing({item.item: item}), item.item).latency_ms
                key = (one.model, one.artifact.id, item.item)
                call = measured[one.artifact.id, item.item]
                if latency.low is not None:
                    rows.append(_row(models[name], call, threads, latency, again.get(key)))
    return rows


def _again(second: Sequence[Stored], held: Speed | None) -> dict[tuple[Any, ...], TimedCall]:
    calls, _ = at_one_speed(counted([one.timed for one in second]), held)
    return {(call.run, call.artifact.id, call.item): call for call in calls}


def _row(model: Model, call: TimedCall, threads: int, latency: Any, again: TimedCall | None) -> Row:
    phase, batch, seq = call.item
    raw_ms = statistics.median(one.us for one in call.rounds) / 1000
    row: Row = {
        "model": model.name, "family": model.family, "theirs": model.theirs, "artifact": call.artifact.id,
        "precision": call.artifact.precision, "threads": threads, "phase": phase, "batch": batch, "seq": seq,
        "measured_ms": call.call_us / 1000, "raw_ms": raw_ms, "estimated_ms": latency.p50,
        "low_ms": latency.low, "high_ms": latency.high, "log2": math.log2(latency.p50 * 1000 / call.call_us),
    }  # fmt: skip
    if again is not None:
        row["again_ms"] = again.call_us / 1000
        row["raw_again_ms"] = statistics.median(one.us for one in again.rounds) / 1000
    return row


def summary(rows: Sequence[Row]) -> Row:
    """Errors, ranges, order and repeatability of some cases; and which of what is wanted they meet."""
    off = sorted(abs(row["log2"]) for row in rows)
    held = [row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows]
    widths = sorted(row["high_ms"] / row["low_ms"] for row in rows)
    found: Row = {
        "cases": len(rows), "models": len({row["model"] for row in rows}),
        "median_error": 2 ** statistics.median(off) - 1, "worst_error": 2 ** off[-1] - 1,
        "within_15_percent": sum(value <= _CLOSE for value in off) / len(off), "ranges_held": sum(held) / len(held),
        "median_width": statistics.median(widths), "widest": widths[-1],
        "quantiles_log2": [round(value, 4) for value in _quantiles(sorted(row["log2"] for row in rows))],
        "tau": median_tau(rows), "repeatability": _repeat(rows, "measured_ms", "again_ms"),
        "repeatability_raw": _repeat(rows, "raw_ms", "raw_again_ms"),
    }  # fmt: skip
    worst_median = max(MEDIAN, 1.5 * (found["repeatability"] or 0.0))
    found["wanted"] = {
        "within_15_percent": found["within_15_percent"] >= WITHIN,
        "median_error": found["median_error"] <= worst_median,
        "ranges_held": found["ranges_held"] >= HELD,
        "widest": found["widest"] <= WIDEST,
        "tau": found["tau"] is not None and found["tau"] >= TAU,
    }
    return found


def _quantiles(ordered: Sequence[float]) -> list[float]:
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)]


def _repeat(rows: Sequence[Row], one: str, other: str) -> float | None:
    """The median by which the same case differs between the two passes; None: there was one."""
    both = [abs(math.log2(row[other] / row[one])) for row in rows if other in row]
    return 2 ** statistics.median(both) - 1 if both else None


def median_tau(rows: Sequence[Row]) -> float | None:
    """The median of Kendall's τ over shapes: is the estimated order of artifacts the measured one? None: no shape has
    two artifacts."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["threads"], row["phase"], row["batch"], row["seq"]].append(row)
    found = [tau for group in groups.values() if (tau := kendall(group)) is not None]
    return statistics.median(found) if found else None


def kendall(rows: Sequence[Row]) -> float | None:
    """Concordant less discordant pairs over all pairs; None for fewer than two."""
    signs = [
        math.copysign(1, (one["measured_ms"] - two["measured_ms"]) * (one["estimated_ms"] - two["estimated_ms"]))
        for one, two in combinations(rows, 2)
    ]
    return sum(signs) / len(signs) if signs else None


def speeds(passes: Sequence[Stored]) -> Row:
    """The machine's speed over all measurements, and whether it has two."""
    seen = speeds_of(counted([one.timed for one in passes]))
    both, usual = two_speeds(seen), typical(seen)
    logs = sorted(speed.product_us for speed in seen)
    return {
        "probes": len(seen), "product_us": usual.product_us, "copy_us": usual.copy_us,
        "product_us_from_to": [logs[0], logs[-1]], "two_speeds_us": [one.product_us for one in both] if both else None,
    }  # fmt: skip
