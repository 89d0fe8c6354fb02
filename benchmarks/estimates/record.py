"""The record: every case estimated by what the other models taught, beside two measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.estimates.models import Model
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.report import Latency
from edgeformer.estimate.calibrate import as_taught, fit, left_out, with_left_out
from edgeformer.estimate.estimate import Case, estimate_listed
from edgeformer.estimate.host_facts import host_facts
from edgeformer.estimate.listing import SWEEPS
from edgeformer.estimate.probe import HostRates
from edgeformer.estimate.profiled import Timed, TimedCall, by_process, counted, speeds_of
from edgeformer.estimate.speed_probe import two_speeds, typical

Row = dict[str, Any]
WITHIN, MEDIAN, HELD, WIDEST, TAU = 0.80, 0.07, 0.95, 2.0, 0.9
"""What is wanted: a share within ±15 %, the median error, how often ranges hold, how wide they are, the order."""
CASES, MODELS, THEIRS, SHAPES, DISTURBED = 60, 5, 3, 4, 0.1
"""How much must have been looked at, and how quiet the machine must have been."""
_CLOSE = math.log2(1.15)


def rows_of(
    base: DeviceProfile,
    threads: int,
    probed: HostRates,
    timed: Sequence[Timed],
    models: Mapping[str, Model],
    tell: Callable[[str], None],
) -> list[Row]:
    """Every case of one number of threads, estimated without its model, and without all models of its kind.

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

    def taught_by(runs: Collection[str]) -> DeviceProfile:
        others = [call for call in calls if call.run in runs]
        taught, inner = fit(device, probed, others, speed=held), left_out(device, probed, others, held)
        return with_left_out(taught, inner) if inner else taught

    runs = list(dict.fromkeys(call.run for call in calls))
    kinds = {name: frozenset(run for run in runs if models[run].kind != models[name].kind) for name in runs}
    by_kind = {others: taught_by(others) for others in dict.fromkeys(kinds.values()) if others}
    rows: list[Row] = []
    for name in runs:
        tell(f"{threads} threads: {name} by the other models")
        own = [one for one in timed if one.run == name]
        found = _rows(models[name], threads, taught_by([run for run in runs if run != name]), own)
        if kinds[name]:
            others = _rows(models[name], threads, by_kind[kinds[name]], own)
            for row, other in zip(found, others, strict=True):
                row["without_kind"] = other
        rows += found
    return rows


def _rows(model: Model, threads: int, taught: DeviceProfile, own: Sequence[Timed]) -> list[Row]:
    """A model's cases by what others taught."""
    truth, *passes = (_times(taught, part) for part in (counted(own), _part(own, 0), _part(own, 1)))
    rows = []
    for one in own:
        case = Case(one.artifact, one.artifact, taught)
        for item in one.listing.items:
            key = (one.artifact.id, item)
            latency = estimate_listed(case, one.listing, item).latency_ms
            rows.append(_row(model, truth[key], threads, latency, [times.get(key) for times in passes]))
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
    off = math.log2(latency.p50 * 1000 / call.call_us) if latency.p50 is not None else None
    row: Row = {
        "model": model.name, "family": model.family, "theirs": model.theirs, "artifact": call.artifact.id,
        "precision": call.artifact.precision, "threads": threads, "phase": phase, "batch": batch, "seq": seq,
        "measured_ms": call.call_us / 1000, "raw_ms": _raw_ms(call), "estimated_ms": latency.p50,
        "low_ms": latency.low, "high_ms": latency.high, "log2": off, "doubts": list(latency.warnings),
        "reason": latency.reason,
    }  # fmt: skip
    for name, one in zip(("first", "again"), passes, strict=True):
        if one is not None:
            row |= {f"{name}_ms": one.call_us / 1000, f"raw_{name}_ms": _raw_ms(one)}
    return row


def _raw_ms(call: TimedCall) -> float:
    """As it was taken, whatever the machine's speed was."""
    return statistics.median(by_process(call).values()) / 1000


def summary(rows: Sequence[Row]) -> Row:
    """Errors, ranges, order and repeatability of some cases; and which of what is wanted they meet.

    A case without an estimate is a case: it is not within 15 %, and no range holds it.
    """
    known = [row for row in rows if row["log2"] is not None]
    off = sorted(abs(row["log2"]) for row in known) + [math.inf] * (len(rows) - len(known))
    widths = sorted(row["high_ms"] / row["low_ms"] for row in known)
    order, close = order_of(known), order_of(known, within=2.0)
    found: Row = {
        "cases": len(rows), "unavailable": len(rows) - len(known), "models": len({row["model"] for row in rows}),
        "median_error": _factor(statistics.median(off)), "worst_error": _factor(off[-1]),
        "within_15_percent": sum(value <= _CLOSE for value in off) / len(off), "ranges_held": _held(rows),
        "held_by_model": {name: _held(own) for name, own in _by_model(rows).items()},
        "median_width": statistics.median(widths) if widths else None, "widest": widths[-1] if widths else None,
        "quantiles_log2": [round(value, 4) for value in _quantiles(sorted(row["log2"] for row in known))],
        "tau": order, "tau_within_twice": close, "repeatability": _repeat(rows, "first_ms", "again_ms"),
        "repeatability_raw": _repeat(rows, "raw_first_ms", "raw_again_ms"),
    }  # fmt: skip
    worst_median = max(MEDIAN, 1.5 * (found["repeatability"] or 0.0))
    found["wanted"] = {
        "within_15_percent": found["within_15_percent"] >= WITHIN,
        "median_error": found["median_error"] is not None and found["median_error"] <= worst_median,
        "ranges_held": found["ranges_held"] >= HELD,
        "widest": found["widest"] is not None and found["widest"] <= WIDEST,
        "tau": found["tau"] is not None and found["tau"] >= TAU,
    }
    return found


def enough(rows: Sequence[Row], passes: int, disturbed: float) -> dict[str, bool]:
    """Whether so many different cases were looked at that the figures mean something.

    Args:
        rows: all cases.
        passes: that were made.
        disturbed: share of the measuring processes beside which something else used the machine.
    """
    return {
        f"{CASES} cases": len(rows) >= CASES,
        f"{MODELS} models": len({row["model"] for row in rows}) >= MODELS,
        f"{THEIRS} of them not ours": len({row["model"] for row in rows if row["theirs"]}) >= THEIRS,
        f"{SHAPES} shapes": len({(row["batch"], row["seq"]) for row in rows if row["phase"] == "steady"}) >= SHAPES,
        "1 and 2 threads": {row["threads"] for row in rows} >= {1, 2},
        "FP32 and INT8": {row["precision"] for row in rows} >= {"fp32", "int8"},
        "two passes": passes == 2 and all("again_ms" in row for row in rows),
        f"at most {DISTURBED:.0%} of the processes disturbed": disturbed <= DISTURBED,
    }


def without_kind(rows: Sequence[Row]) -> list[Row]:
    """The same cases by models of other kinds alone; those of which there is no other kind are left out."""
    return [row["without_kind"] for row in rows if "without_kind" in row]


def _held(rows: Sequence[Row]) -> float:
    """The share of cases whose range holds the measurement."""
    known = [row for row in rows if row["low_ms"] is not None]
    return sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in known) / len(rows)


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["model"]].append(row)
    return found


def _factor(log2: float) -> float | None:
    """0.07 for 7 % too much; None where an estimate is absent."""
    return 2**log2 - 1 if math.isfinite(log2) else None


def _quantiles(ordered: Sequence[float]) -> list[float]:
    if not ordered:
        return []
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)]


def _repeat(rows: Sequence[Row], one: str, other: str) -> float | None:
    """The median by which the same case differs between the two passes; None: there was one."""
    both = [abs(math.log2(row[other] / row[one])) for row in rows if other in row]
    return 2 ** statistics.median(both) - 1 if both else None


def order_of(rows: Sequence[Row], within: float = math.inf) -> float | None:
    """Kendall's τ over all pairs of artifacts at one shape, phase and number of threads: is the estimated order the
    measured one? Concordant less discordant pairs over all pairs; a tie is neither. None: there is no pair.

    Args:
        rows: with estimates.
        within: only pairs whose measured times differ by at most this factor, where the order is hard to tell.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["threads"], row["phase"], row["batch"], row["seq"]].append(row)
    signs = [
        _sign(one["measured_ms"] - two["measured_ms"]) * _sign(one["estimated_ms"] - two["estimated_ms"])
        for group in groups.values()
        for one, two in combinations(group, 2)
        if max(one["measured_ms"], two["measured_ms"]) <= within * min(one["measured_ms"], two["measured_ms"])
    ]
    return sum(signs) / len(signs) if signs else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def speeds(timed: Sequence[Timed]) -> Row:
    """The machine's speed over all measurements, and whether it has two."""
    seen = speeds_of(counted(timed))
    both, usual = two_speeds(seen), typical(seen)
    logs = sorted(speed.product_us for speed in seen)
    return {
        "probes": len(seen), "product_us": usual.product_us, "copy_us": usual.copy_us,
        "product_us_from_to": [logs[0], logs[-1]], "two_speeds_us": [one.product_us for one in both] if both else None,
    }  # fmt: skip
