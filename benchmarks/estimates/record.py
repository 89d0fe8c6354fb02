"""The record: every case estimated by a fit to the other models, beside the measurement. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.estimates.measuring import TimedArtifact
from benchmarks.estimates.models import Model
from edgeformer.artifacts.device import Calibration, DeviceProfile
from edgeformer.estimate.estimate import Case, estimate_row
from edgeformer.estimate.fit import fit, with_cross_validation
from edgeformer.estimate.probe import HostRates, host_facts
from edgeformer.system.host import cpu_name, now

Row = dict[str, Any]
WITHIN, MEDIAN, HELD, WIDEST, TAU = 0.80, 0.07, 0.95, 2.0, 0.9
"""Targets: the share within ±15%, the median error, how often ranges hold, how wide they are, the order."""
CASES, MODELS, FOREIGN, SHAPES, DISTURBED = 60, 5, 3, 4, 0.1
"""How many cases the record needs, and how quiet the machine must have been."""
_CLOSE = math.log2(1.15)
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def rows_of(
    base: DeviceProfile, threads: int, rates: HostRates, timed: Sequence[TimedArtifact], models: Mapping[str, Model],
    report: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """Return every case of one number of threads, estimated without its model, and without all models of its kind."""
    calls = [call for entry in timed for call in entry.calls]
    works = [(w, us) for call in calls for w, us in zip(call.works, call.durations_us, strict=True)]
    device = host_facts(base, threads, rates, works, None)
    bare = Calibration(
        created=now(), processor=cpu_name(), threads=threads, provider="CPUExecutionProvider", efficiencies={}
    )

    def fitted_on(runs: Collection[str]) -> DeviceProfile:
        selected = [call for call in calls if call.run in runs]
        fitted = fit(device, selected, rates.call_us, bare)
        return with_cross_validation(fitted, selected, rates.call_us, bare)

    runs = list(dict.fromkeys(call.run for call in calls))
    other_kinds = {name: frozenset(run for run in runs if models[run].kind != models[name].kind) for name in runs}
    by_kind = {names: fitted_on(names) for names in dict.fromkeys(other_kinds.values()) if names}
    rows: list[Row] = []
    for name in runs:
        report(f"{threads} threads: {name} by the other models")
        artifacts = [entry for entry in timed if entry.model == name]
        own_rows = _rows(models[name], threads, fitted_on([run for run in runs if run != name]), artifacts)
        if other_kinds[name]:
            others = _rows(models[name], threads, by_kind[other_kinds[name]], artifacts)
            for row, other in zip(own_rows, others, strict=True):
                row["without_kind"] = other
        rows += own_rows
    return rows


def _rows(model: Model, threads: int, device: DeviceProfile, artifacts: Sequence[TimedArtifact]) -> list[Row]:
    rows: list[Row] = []
    for entry in artifacts:
        case = Case(entry.artifact, entry.artifact, device)
        for call in entry.calls:
            phase, batch, seq = call.item
            latency = estimate_row(case, entry.nodes[call.item], call.item).latency_ms
            row = {
                "model": model.name, "family": model.family, "theirs": model.theirs, "artifact": call.artifact.id,
                "precision": call.artifact.precision, "threads": threads, "phase": phase, "batch": batch, "seq": seq,
                "measured_ms": call.call_us / 1000, "process_ms": [us / 1000 for us in call.process_us],
                "estimated_ms": latency.p50, "low_ms": latency.low, "high_ms": latency.high,
                "log2": math.log2(latency.p50 * 1000 / call.call_us) if latency.p50 is not None else None,
                "doubts": list(latency.warnings), "reason": latency.reason,
            }  # fmt: skip
            rows.append(row)
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """Return errors, ranges, order and repeatability of some cases, and which targets they meet.

    A case without an estimate counts: it is not within 15%, and no range holds it.
    """
    estimated = [row for row in rows if row["log2"] is not None]
    off = sorted(abs(row["log2"]) for row in estimated) + [math.inf] * (len(rows) - len(estimated))
    widths = sorted(row["high_ms"] / row["low_ms"] for row in estimated)
    errors = [row["log2"] for row in estimated]
    order, close = order_of(estimated), order_of(estimated, within=2.0)
    figures: Row = {
        "cases": len(rows), "unavailable": len(rows) - len(estimated), "models": len({row["model"] for row in rows}),
        "median_error": _factor(statistics.median(off)), "worst_error": _factor(off[-1]),
        "within_15_percent": sum(value <= _CLOSE for value in off) / len(off), "ranges_held": _held(rows),
        "held_by_model": {
            name: _held([row for row in rows if row["model"] == name])
            for name in dict.fromkeys(row["model"] for row in rows)
        },
        "median_width": statistics.median(widths) if widths else None, "widest": widths[-1] if widths else None,
        "quantiles_log2": np.quantile(errors, _QUANTILES).round(4).tolist() if errors else [],
        "tau": order, "tau_within_twice": close,
        "repeatability": statistics.median(max(row["process_ms"]) / min(row["process_ms"]) - 1 for row in rows),
    }  # fmt: skip
    figures["wanted"] = {
        "within_15_percent": figures["within_15_percent"] >= WITHIN,
        "median_error": figures["median_error"] is not None and figures["median_error"] <= MEDIAN,
        "ranges_held": figures["ranges_held"] >= HELD,
        "widest": figures["widest"] is not None and figures["widest"] <= WIDEST,
        "tau": figures["tau"] is not None and figures["tau"] >= TAU,
    }
    return figures


def enough(rows: Sequence[Row], disturbed: float) -> dict[str, bool]:
    """Return which conditions hold under which the figures mean something; ``disturbed``: share of the processes."""
    return {
        f"{CASES} cases": len(rows) >= CASES,
        f"{MODELS} models": len({row["model"] for row in rows}) >= MODELS,
        f"{FOREIGN} of them not ours": len({row["model"] for row in rows if row["theirs"]}) >= FOREIGN,
        f"{SHAPES} shapes": len({(row["batch"], row["seq"]) for row in rows if row["phase"] == "steady"}) >= SHAPES,
        "1 and 2 threads": {row["threads"] for row in rows} >= {1, 2},
        "FP32 and INT8": {row["precision"] for row in rows} >= {"fp32", "int8"},
        f"at most {DISTURBED:.0%} of the processes disturbed": disturbed <= DISTURBED,
    }


def without_kind(rows: Sequence[Row]) -> list[Row]:
    """Return the same cases estimated by models of other kinds only."""
    return [row["without_kind"] for row in rows if "without_kind" in row]


def _held(rows: Sequence[Row]) -> float:
    """Return the share of cases whose range holds the measurement."""
    estimated = [row for row in rows if row["low_ms"] is not None]
    return sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in estimated) / len(rows)


def _factor(log2: float) -> float | None:
    """Return 0.07 for 7% too much; None where an estimate is absent."""
    return 2**log2 - 1 if math.isfinite(log2) else None


def order_of(rows: Sequence[Row], within: float = math.inf) -> float | None:
    """Return Kendall's τ of estimated and measured times over all pairs of artifacts at one shape, phase and number of
    threads: concordant minus discordant pairs over all pairs; None: there is no pair. ``within``: only pairs whose
    measured times differ by at most this factor, where the order is hard to tell.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["threads"], row["phase"], row["batch"], row["seq"]].append(row)
    signs = [
        np.sign(first["measured_ms"] - second["measured_ms"]) * np.sign(first["estimated_ms"] - second["estimated_ms"])
        for group in groups.values()
        for first, second in combinations(group, 2)
        if max(first["measured_ms"], second["measured_ms"]) <= within * min(first["measured_ms"], second["measured_ms"])
    ]
    return float(sum(signs) / len(signs)) if signs else None
