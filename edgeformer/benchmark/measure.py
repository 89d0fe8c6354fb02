"""The measuring loop: warm up until it settles, then take enough calls; and what their times can honestly say.

Knows no runtime.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgeformer.artifacts.report import (
    DRIFT_FEWEST_CALLS,
    DRIFT_PART_CALLS,
    DRIFT_PARTS,
    NOISY_CV,
    PERCENTILE_NEEDS,
    QUANTILES,
    Latency,
    MeasureRules,
)

__all__ = ["MeasureRules", "Sample", "drifted", "measure", "summarise", "windows_agree"]

Clock = Callable[[], int]
"""Nanoseconds from a clock that never goes back."""


@dataclass(frozen=True)
class Sample:
    """What the loop took: one time per call in milliseconds, in order."""

    samples_ms: Sequence[float]
    stable: bool
    warmup_calls: int
    warmup_s: float
    reason: str | None = None
    warnings: tuple[str, ...] = field(default=())


def measure(call: Callable[[int], object], rules: MeasureRules, clock: Clock = time.perf_counter_ns) -> Sample:
    """Warm up, then time single calls.

    Args:
        call: runs the artifact once, blocking; its argument counts calls from 0, to rotate input buffers.
        rules: when to stop.
        clock: nanoseconds; injected so that the rules can be tested without waiting.
    """
    collected = gc.isenabled()
    gc.disable()  # a collection in the middle of a call is Python's time, not the artifact's
    try:
        warmup_ms, settled = _warm_up(call, rules, clock)
        samples_ms = _take(call, rules, clock, first=len(warmup_ms))
    finally:
        if collected:
            gc.enable()
    unsettled = None if settled else _unsettled(warmup_ms, rules)
    drift = drifted(samples_ms, rules.window_tolerance)
    cut = None
    if len(samples_ms) < rules.min_calls:
        seconds = sum(samples_ms) / 1000
        cut = f"stopped after {seconds:.0f} s with {len(samples_ms)} of {rules.min_calls} calls"
    return Sample(
        samples_ms=samples_ms,
        stable=settled and drift is None,
        warmup_calls=len(warmup_ms),
        warmup_s=sum(warmup_ms) / 1000,
        reason=cut,
        warnings=tuple(filter(None, (unsettled, drift))),
    )


def windows_agree(times_ms: Sequence[float], rules: MeasureRules) -> bool:
    """Whether the medians of the last windows lie within the tolerance of the smallest.

    Args:
        times_ms: one time per call, in order.
        rules: how many windows, of how many calls, and the tolerance.
    """
    size, count = rules.window_calls, rules.windows
    if len(times_ms) < size * count:
        return False
    recent = times_ms[-size * count :]
    medians = [statistics.median(recent[start : start + size]) for start in range(0, size * count, size)]
    return max(medians) <= min(medians) * (1 + rules.window_tolerance)


def drifted(samples_ms: Sequence[float], tolerance: float) -> str | None:
    """Says so when parts of the sample disagree: a clock that throttles, or other work that comes and goes.

    The sample is cut into up to ten parts, in the order of the calls, of at least as many calls as a warm-up window:
    where single calls vary by 10 %, the medians of ten of them differ by that much without any drift. Samples of fewer
    than fifty calls are cut in halves; fewer than twenty calls cannot drift.

    Args:
        samples_ms: one time per call, in order.
        tolerance: by which share the parts' medians may differ.
    """
    if len(samples_ms) < DRIFT_FEWEST_CALLS:
        return None
    count = max(2, min(DRIFT_PARTS, len(samples_ms) // DRIFT_PART_CALLS))
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(samples_ms), count)]
    if max(medians) <= min(medians) * (1 + tolerance):
        return None
    ends = f"median {medians[0]:.3g} ms at first, {medians[-1]:.3g} ms at the end"
    return f"drifted while it was measured: {ends}, {min(medians):.3g} to {max(medians):.3g} ms over {count} parts"


def summarise(
    samples_ms: Sequence[float], stable: bool | None, warnings: Sequence[str] = (), reason: str | None = None
) -> Latency:
    """Summarise the times of single calls, in milliseconds.

    Args:
        samples_ms: one time per call, in the order they were taken; at least one.
        stable: whether warm-up settled and the sample did not drift; None for a single call.
        warnings: what the measuring loop noticed.
        reason: why the sample is smaller than the rules ask for, if it is.

    Returns:
        ``status: measured``; a percentile that the sample cannot carry is None and ``reason`` says so.
    """
    values = np.asarray(samples_ms, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a latency needs at least one sample")
    n, mean = int(values.size), float(values.mean())
    # ddof=1: the spread of the calls that were not taken is estimated from those that were.
    cv = float(values.std(ddof=1)) / mean if n > 1 and mean > 0 else None
    percentiles = {p: float(np.percentile(values, p)) for p, needed in PERCENTILE_NEEDS.items() if n >= needed}
    needs = ", ".join(f"p{p} needs {needed}" for p, needed in PERCENTILE_NEEDS.items() if n < needed)
    missing = f"{n} {'call' if n == 1 else 'calls'}: {needs}" if needs else None
    noted = list(warnings)
    if cv is not None and cv > NOISY_CV:
        noted.append(f"the calls vary by {cv:.1%} (coefficient of variation; above {NOISY_CV:.1%} is noisy)")
    return Latency(
        status="measured",
        p50=float(np.median(values)),
        p90=percentiles.get(90),
        p95=percentiles.get(95),
        p99=percentiles.get(99),
        mean=mean,
        min=float(values.min()),
        cv=cv,
        n=n,
        stable=stable,
        reason="; ".join(filter(None, (reason, missing))) or None,
        warnings=tuple(noted),
        # To the nanosecond, which is what the clock gives. One call has no distribution.
        quantiles_ms=tuple(np.quantile(values, np.linspace(0, 1, QUANTILES)).round(6).tolist()) if n > 1 else (),
    )


def _unsettled(warmup_ms: Sequence[float], rules: MeasureRules) -> str:
    calls, seconds = len(warmup_ms), sum(warmup_ms) / 1000
    if calls < rules.windows * rules.window_calls:
        return f"too slow to see whether it has settled: {calls} warm-up calls in {seconds:.1f} s"
    return (
        f"did not settle: after {calls} warm-up calls in {seconds:.1f} s the last {rules.windows} windows of "
        f"{rules.window_calls} calls do not agree within {rules.window_tolerance:.0%}"
    )


def _warm_up(call: Callable[[int], object], rules: MeasureRules, clock: Clock) -> tuple[Sequence[float], bool]:
    times_ms = array("d")  # not a list: its objects would show in the memory that is measured
    began = clock()
    while True:
        times_ms.append(_time_one(call, len(times_ms), clock))
        elapsed_s = (clock() - began) / 1e9
        enough = elapsed_s >= rules.warmup_min_s and len(times_ms) >= rules.warmup_min_calls
        # Compared once per window, not once per call: the medians cost time between the calls.
        if enough and len(times_ms) % rules.window_calls == 0 and windows_agree(times_ms, rules):
            return times_ms, True
        if elapsed_s >= rules.warmup_max_s:
            return times_ms, False


def _take(call: Callable[[int], object], rules: MeasureRules, clock: Clock, first: int) -> Sequence[float]:
    times_ms = array("d")
    began = clock()
    while True:
        times_ms.append(_time_one(call, first + len(times_ms), clock))
        elapsed_s = (clock() - began) / 1e9
        if elapsed_s >= rules.min_s and len(times_ms) >= rules.min_calls:
            return times_ms
        if elapsed_s >= rules.max_s:
            return times_ms


def _time_one(call: Callable[[int], object], index: int, clock: Clock) -> float:
    began = clock()
    call(index)
    return (clock() - began) / 1e6
