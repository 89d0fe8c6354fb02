"""Measuring loops, independent of any runtime: the times of enough settled calls, and the energy of a call.

The times are summarised as far as their number supports. The energy is a counter's, minus that of the idle machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeformer.artifacts.report import (
    DRIFT_FEWEST_CALLS,
    DRIFT_PART_CALLS,
    DRIFT_PARTS,
    NOISY_CV,
    PERCENTILE_NEEDS,
    QUANTILES,
    Energy,
    Latency,
    MeasureRules,
)
from edgeformer.runtimes import on_gpu
from edgeformer.system import nvidia
from edgeformer.system.host import RaplDomain, rapl_domains

__all__ = ["MeasureRules", "energy_counter", "measure", "measure_energy", "summarise"]


@dataclass(frozen=True)
class Sample:
    """Result of the loop: one time per call, in order; ``reason`` why there are fewer calls than the rules demand."""

    samples_ms: Sequence[float]
    stable: bool
    warmup_calls: int
    warmup_s: float
    reason: str | None = None
    warnings: tuple[str, ...] = ()


def measure(
    call: Callable[[int], object], rules: MeasureRules, clock: Callable[[], int] = time.perf_counter_ns
) -> Sample:
    """Warm up, then time single calls.

    Args:
        call: runs the artifact once, blocking; its argument counts calls from 0, to rotate input buffers.
        rules: when to stop.
        clock: nanoseconds; injected so that tests of the rules need not wait.
    """
    # Not lists: their objects would show in the memory that is measured.
    warmup_ms, samples_ms = array("d"), array("d")

    def time_call(times_ms: array[float], index: int, loop_start_ns: int) -> float:
        """Append the time of a call; return the seconds since the loop's start."""
        start_ns = clock()
        call(index)
        times_ms.append((clock() - start_ns) / 1e6)
        return (clock() - loop_start_ns) / 1e9

    gc_was_enabled = gc.isenabled()
    gc.disable()  # a collection within a call is Python's time, not the artifact's
    try:
        loop_start_ns, is_settled, elapsed_s = clock(), False, 0.0
        while not is_settled and (not warmup_ms or elapsed_s < rules.warmup_max_s):
            elapsed_s = time_call(warmup_ms, len(warmup_ms), loop_start_ns)
            is_enough = elapsed_s >= rules.warmup_min_s and len(warmup_ms) >= rules.warmup_min_calls
            # Compared once per window, not once per call: the medians cost time between the calls.
            is_settled = is_enough and len(warmup_ms) % rules.window_calls == 0 and windows_agree(warmup_ms, rules)
        loop_start_ns, elapsed_s = clock(), 0.0
        while not samples_ms or (
            (elapsed_s < rules.min_s or len(samples_ms) < rules.min_calls) and elapsed_s < rules.max_s
        ):
            elapsed_s = time_call(samples_ms, len(warmup_ms) + len(samples_ms), loop_start_ns)
    finally:
        if gc_was_enabled:
            gc.enable()

    warnings: list[str] = []
    calls, warmup_s = len(warmup_ms), sum(warmup_ms) / 1000
    if not is_settled and calls < rules.windows * rules.window_calls:
        warnings.append(f"too slow to see whether it has settled: {calls} warm-up calls in {warmup_s:.1f} s")
    elif not is_settled:
        warnings.append(
            f"did not settle: after {calls} warm-up calls in {warmup_s:.1f} s the last {rules.windows} windows of "
            f"{rules.window_calls} calls do not agree within {rules.window_tolerance:.0%}"
        )
    drift = drifted(samples_ms, rules.window_tolerance)
    if drift is not None:
        warnings.append(drift)
    reason = None
    if len(samples_ms) < rules.min_calls:
        seconds = sum(samples_ms) / 1000
        reason = f"stopped after {seconds:.0f} s with {len(samples_ms)} of {rules.min_calls} calls"
    return Sample(samples_ms, is_settled and drift is None, calls, warmup_s, reason, tuple(warnings))


def windows_agree(times_ms: Sequence[float], rules: MeasureRules) -> bool:
    """Whether the medians of the last windows of calls lie within the tolerance of the smallest."""
    size, count = rules.window_calls, rules.windows
    if len(times_ms) < size * count:
        return False
    recent = times_ms[-size * count :]
    medians = [statistics.median(recent[start : start + size]) for start in range(0, size * count, size)]
    return max(medians) <= min(medians) * (1 + rules.window_tolerance)


def drifted(samples_ms: Sequence[float], tolerance: float) -> str | None:
    """Return a warning if parts of the sample disagree: a clock that throttles, or other work on the machine.

    The sample is cut into up to ten parts, in the order of the calls, of at least as many calls as a warm-up window:
    if single calls vary by 10 %, the medians of ten calls differ by that much without any drift. Samples of fewer than
    fifty calls are cut in halves; fewer than twenty calls cannot drift.

    Args:
        samples_ms: one time per call, in order.
        tolerance: relative difference of the parts' medians that is allowed.
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
    """Summarise the times of single calls.

    Args:
        samples_ms: one time per call, in order; at least one.
        stable: whether warm-up settled and the sample did not drift; None for a single call.
        warnings: of the measuring loop.
        reason: why the sample is smaller than the rules demand, if it is.

    Returns:
        ``status: measured``; a percentile that the sample cannot support is None, and ``reason`` names it.
    """
    values = np.asarray(samples_ms, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a latency needs at least one sample")
    n, mean = int(values.size), float(values.mean())
    # ddof=1: the calls are a sample.
    cv = float(values.std(ddof=1)) / mean if n > 1 and mean > 0 else None
    percentiles: dict[str, Any] = {
        f"p{p}": float(np.percentile(values, p)) for p, needed in PERCENTILE_NEEDS.items() if n >= needed
    }
    needs = ", ".join(f"p{p} needs {needed}" for p, needed in PERCENTILE_NEEDS.items() if n < needed)
    missing = f"{n} {'call' if n == 1 else 'calls'}: {needs}" if needs else None
    noise: tuple[str, ...] = ()
    if cv is not None and cv > NOISY_CV:
        noise = (f"the calls vary by {cv:.1%} (coefficient of variation; above {NOISY_CV:.1%} is noisy)",)
    return Latency(
        status="measured",
        p50=float(np.median(values)),
        **percentiles,
        mean=mean,
        min=float(values.min()),
        cv=cv,
        n=n,
        stable=stable,
        reason="; ".join(filter(None, (reason, missing))) or None,
        warnings=(*warnings, *noise),
        # Rounded to the clock's nanoseconds. One call has no distribution.
        quantiles_ms=tuple(np.quantile(values, np.linspace(0, 1, QUANTILES)).round(6).tolist()) if n > 1 else (),
    )


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of energy.

    Attributes:
        name: with the part of the machine that it covers.
        read: its present readings. Raises OSError if the counter is gone.
        used_mj: millijoules between two readings.
    """

    name: str
    read: Callable[[], Sequence[int]]
    used_mj: Callable[[Sequence[int], Sequence[int]], float]


def energy_counter(provider: str, gpu_uuid: str | None) -> EnergyCounter | str:
    """Return the counter of the hardware that a provider computes on, or the reason why there is none."""
    if on_gpu(provider):
        if gpu_uuid is None:
            return "no card was found through NVML"

        def read_card() -> list[int]:  # millijoules (Volta and later)
            state = nvidia.state(gpu_uuid)
            if state is None or state.energy_mj is None:
                raise OSError("the card has no energy counter")
            return [state.energy_mj]

        try:
            read_card()
        except OSError:
            return "this card has no energy counter that NVML can read"
        return EnergyCounter("NVML (whole card)", read_card, lambda start, now: now[0] - start[0])
    domains, reason = rapl_domains()
    names = ", ".join(domain.name for domain in domains)
    return reason or EnergyCounter(
        f"RAPL ({names}: whole processor)",
        lambda: [domain.read_uj() for domain in domains],
        lambda start, now: sum(map(RaplDomain.used_uj, domains, start, now)) / 1000,
    )


def measure_energy(
    call: Callable[[int], object],
    counter: EnergyCounter | str,
    rules: MeasureRules,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Energy:
    """Measure millijoules per call above idle.

    The idle power must settle first: a GPU keeps its clocks up for seconds after its last kernel, and cools down for
    longer.

    Args:
        call: runs the artifact once, blocking; its argument counts calls from 0.
        counter: to read, or the reason why there is none.
        rules: how long to idle and to call.
        clock: seconds.
        sleep: idles for some seconds; injected like the clock, so that tests need not wait.
    """
    if isinstance(counter, str):
        return Energy(status="unavailable", reason=counter)
    if rules.energy_s == 0:
        return Energy(status="unavailable", reason="these rules measure no energy")
    try:
        idle_powers_mw: list[float] = []
        idle_start_s = clock()
        for _ in range(rules.idle_windows):
            start, start_s = counter.read(), clock()
            sleep(rules.idle_s)
            idle_powers_mw.append(counter.used_mj(start, counter.read()) / max(clock() - start_s, 1e-9))
            recent_mw = idle_powers_mw[-rules.windows :]
            if len(recent_mw) == rules.windows and max(recent_mw) <= min(recent_mw) * (1 + rules.window_tolerance):
                break
        else:
            recent_mw = idle_powers_mw[-rules.windows :]
            reason = (
                f"{counter.name}: the idle power did not settle within {clock() - idle_start_s:.0f} s "
                f"({min(recent_mw) / 1000:.1f} to {max(recent_mw) / 1000:.1f} W in the last {rules.windows} windows of "
                f"{rules.idle_s:g} s)"
            )
            return Energy(status="unavailable", reason=reason)
        start, start_s, calls = counter.read(), clock(), 0
        while calls == 0 or clock() - start_s < rules.energy_s:
            call(calls)
            calls += 1
        used_mj, elapsed_s = counter.used_mj(start, counter.read()), clock() - start_s
    except OSError as error:
        return Energy(status="unavailable", reason=f"{counter.name} could not be read: {error}")
    above_idle_mj = (used_mj - sum(recent_mw) / len(recent_mw) * elapsed_s) / calls
    if above_idle_mj <= 0:
        return Energy(status="unavailable", reason=f"{counter.name}: the calls do not stand out from the idle machine")
    return Energy(status="measured", value=above_idle_mj, reason=f"{counter.name}, {calls} calls, idle subtracted")
