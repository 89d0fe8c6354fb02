"""The record: every case estimated by what the other models taught, beside two measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.estimates.models import Model
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.report import Latency
from edgeformer.stages.profiling.estimating.estimate import Case, estimate_listed
from edgeformer.stages.profiling.estimating.held_out import as_taught, left_out, with_left_out
from edgeformer.stages.profiling.estimating.host_facts import host_facts
from edgeformer.stages.profiling.estimating.probe import HostRates
from edgeformer.stages.profiling.estimating.profiled import (
    Timed,
    TimedCall,
    by_process,
    counted,
    speeds_of,
)
from edgeformer.stages.profiling.estimating.reference import two_speeds, typical
from edgeformer.stages.profiling.estimating.sweeps import SWEEPS
from edgeformer.stages.profiling.estimating.teaching import fit

Row = dict[str, Any]
WITHIN, MEDIAN, HELD, WIDEST, TAU = 0.80, 0.07, 0.95, 2.0, 0.9
"""What is wanted: a share within ±15 %, the median error, how often ranges hold, how wide they are, the order."""
_CLOSE = math.log2(1.15)


def rows_of(
    base: DeviceProfile,
    threads: int,
    probed: HostRates,
    timed: Sequence[Timed],
    models: Mapping[str, Model],
    tell: Callable[[str], None],
) -> list[Row]:
    """Every case of one number of threads.

    Args:
        base: the shipped profile of a host.
        threads: of one operator.
        probed: with as many threads.
        timed: in all sweeps of both passes: what is estimated, and taught by the others.
        models: by name.
        tell: what is going on.
    """
    device = host_facts(base, threads, probed, timed)
    calls = counted(timed)
    held = typical(speeds_of(calls))
    rows: list[Row] = []
    for name in dict.fromkeys(call.run for call in calls):
        tell(f"{threads} threads: {name} by the other models")
        others = [call for call in calls if call.run != name]
        taught = fit(device, probed, others, speed=held)
        inner = left_out(device, probed, others, held)
        taught = with_left_out(taught, inner) if inner else taught
        own = [one for one in timed if one.run == name]
        truth, *passes = (_times(taught, part) for part in (counted(own), _part(own, 0), _part(own, 1)))
        for one in own:
            case = Case(one.artifact, one.artifact, taught)
            for item in one.listing.items.values():
                latency = estimate_listed(case, one.listing, item.item).latency_ms
                key = (one.artifact.id, item.item)
                if latency.low is not None:
                    halves = [times.get(key) for times in passes]
                    rows.append(_row(models[name], truth[key], threads, latency, halves))
    return rows


def _part(timed: Sequence[Timed], number: int) -> list[TimedCall]:
    """Calls as one pass alone saw them."""
    processes = range(number * SWEEPS, (number + 1) * SWEEPS)
    found = []
    for call in counted(timed):
        rounds = tuple(seen for seen in call.rounds if seen.process in processes)
        if rounds:
            found.append(replace(call, rounds=rounds))
    return found


def _times(taught: DeviceProfile, calls: Sequence[TimedCall]) -> dict[tuple[Any, ...], TimedCall]:
    """(artifact, item) → the call at the speed that the estimates hold for."""
    return {(call.artifact.id, call.item): call for call in as_taught(taught, calls)}


def _row(model: Model, call: TimedCall, threads: int, latency: Latency, passes: Sequence[TimedCall | None]) -> Row:
    phase, batch, seq = call.item
    row: Row = {
        "model": model.name, "family": model.family, "theirs": model.theirs, "artifact": call.artifact.id,
        "precision": call.artifact.precision, "threads": threads, "phase": phase, "batch": batch, "seq": seq,
        "measured_ms": call.call_us / 1000, "raw_ms": _raw_ms(call), "estimated_ms": latency.p50,
        "low_ms": latency.low, "high_ms": latency.high, "log2": math.log2((latency.p50 or 0.0) * 1000 / call.call_us),
    }  # fmt: skip
    for name, one in zip(("first", "again"), passes, strict=True):
        if one is not None:
            row |= {f"{name}_ms": one.call_us / 1000, f"raw_{name}_ms": _raw_ms(one)}
    return row


def _raw_ms(call: TimedCall) -> float:
    """As it was taken, whatever the machine's speed was."""
    return statistics.median(by_process(call).values()) / 1000


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
        "tau": median_tau(rows), "repeatability": _repeat(rows, "first_ms", "again_ms"),
        "repeatability_raw": _repeat(rows, "raw_first_ms", "raw_again_ms"),
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


def speeds(timed: Sequence[Timed]) -> Row:
    """The machine's speed over all measurements, and whether it has two."""
    seen = speeds_of(counted(timed))
    both, usual = two_speeds(seen), typical(seen)
    logs = sorted(speed.product_us for speed in seen)
    return {
        "probes": len(seen), "product_us": usual.product_us, "copy_us": usual.copy_us,
        "product_us_from_to": [logs[0], logs[-1]], "two_speeds_us": [one.product_us for one in both] if both else None,
    }  # fmt: skip
