"""Trackers of an artifact's calls: latency, energy, and the memory that it adds to a process.

Latency is summarised as far as the number of calls supports. Energy is a counter's, minus that of the idle machine.
Memory is the peak of resident memory above a baseline. ``ru_maxrss`` is not used for it: on Linux a child process
inherits its parent's peak through fork. GPU memory has several figures, of which each platform provides some.
"""

import gc
import os
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgeformer.artifacts import report
from edgeformer.artifacts.report import Energy, Latency, MeasureRules, Memory
from edgeformer.runtimes import on_gpu
from edgeformer.system import nvidia
from edgeformer.system.host import RaplDomain, rapl_domains


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
    """Warm up, then time single calls of the artifact; ``call``'s argument counts them. ``clock``: nanoseconds."""
    # Not lists: their objects would show in the memory that is measured.
    warmup_ms, samples_ms = array("d"), array("d")

    def time_call(times_ms: "array[float]", index: int, loop_start_ns: int) -> float:
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
        warnings.append(f"warm-up was too short to judge: only {calls} calls in {warmup_s:.1f} s")
    elif not is_settled:
        warnings.append(
            f"did not settle: after {warmup_s:.1f} s of warm-up ({calls} calls), the medians of the last "
            f"{rules.windows} windows of {rules.window_calls} calls differ by more than {rules.window_tolerance:.0%}"
        )
    drift = drifted(samples_ms, rules.window_tolerance)
    if drift is not None:
        warnings.append(drift)
    reason = None
    if len(samples_ms) < rules.min_calls:
        seconds = sum(samples_ms) / 1000
        reason = f"only {len(samples_ms)} of {rules.min_calls} calls in the time limit of {seconds:.0f} s"
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
    if single calls vary by 10%, the medians of ten calls differ by that much without any drift. Samples of fewer than
    fifty calls are cut in halves; fewer than twenty calls cannot drift. ``tolerance``: of the parts' medians.
    """
    if len(samples_ms) < report.DRIFT_FEWEST_CALLS:
        return None
    count = max(2, min(report.DRIFT_PARTS, len(samples_ms) // report.DRIFT_PART_CALLS))
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(samples_ms), count)]
    if max(medians) <= min(medians) * (1 + tolerance):
        return None
    ends = f"median {medians[0]:.3g} ms at first, {medians[-1]:.3g} ms at the end"
    return f"drifted: {ends}, {min(medians):.3g} to {max(medians):.3g} ms over {count} parts of the sample"


def summarise(
    samples_ms: Sequence[float], stable: bool | None, warnings: Sequence[str] = (), reason: str | None = None
) -> Latency:
    """Summarise the times of single calls; a percentile that they cannot support is None, and ``reason`` names it.

    ``stable``: warm-up settled and the sample did not drift; None for a single call.
    """
    values = np.asarray(samples_ms, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a latency needs at least one sample")
    n, mean = int(values.size), float(values.mean())
    # ddof=1: the calls are a sample.
    cv = float(values.std(ddof=1)) / mean if n > 1 and mean > 0 else None
    percentiles: dict[str, Any] = {
        f"p{p}": float(np.percentile(values, p)) for p, needed in report.PERCENTILE_NEEDS.items() if n >= needed
    }
    needs = ", ".join(f"p{p} needs {needed}" for p, needed in report.PERCENTILE_NEEDS.items() if n < needed)
    missing = f"{n} {'call' if n == 1 else 'calls'}: {needs}" if needs else None
    if cv is not None and cv > report.NOISY_CV:
        noise = f"noisy: the calls have a coefficient of variation of {cv:.1%}, above {report.NOISY_CV:.1%}"
        warnings = (*warnings, noise)
    # Rounded to the clock's nanoseconds. One call has no distribution.
    quantiles = np.quantile(values, np.linspace(0, 1, report.QUANTILES)).round(6).tolist() if n > 1 else ()
    return Latency(
        status="measured", p50=float(np.median(values)), **percentiles, mean=mean, min=float(values.min()), cv=cv, n=n,
        stable=stable, reason="; ".join(filter(None, (reason, missing))) or None, warnings=tuple(warnings),
        quantiles_ms=tuple(quantiles),
    )  # fmt: skip


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of energy."""

    name: str  # with the part of the machine that it covers
    read: Callable[[], Sequence[int]]  # raises OSError if the counter is gone
    used_mj: Callable[[Sequence[int], Sequence[int]], float]  # millijoules between two readings


def energy_counter(provider: str, gpu_uuid: str | None) -> EnergyCounter | str:
    """Return the counter of the hardware that a provider computes on, or the reason why there is none."""
    if not on_gpu(provider):
        domains, reason = rapl_domains()
        names = ", ".join(domain.name for domain in domains)
        return reason or EnergyCounter(
            f"RAPL ({names}: whole processor)",
            lambda: [domain.read_uj() for domain in domains],
            lambda start, now: sum(map(RaplDomain.used_uj, domains, start, now)) / 1000,
        )
    if gpu_uuid is None:
        return "NVML reports no card"

    def read_card() -> list[int]:  # millijoules (Volta and later)
        state = nvidia.state(gpu_uuid)
        if state is None or state.energy_mj is None:
            raise OSError("the card has no energy counter")
        return [state.energy_mj]

    try:
        read_card()
    except OSError:
        return "NVML reads no energy counter on this card"
    return EnergyCounter("NVML (whole card)", read_card, lambda start, now: now[0] - start[0])


def measure_energy(
    call: Callable[[int], object],
    counter: EnergyCounter | str,
    rules: MeasureRules,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Energy:
    """Measure millijoules per call above idle.

    The idle power must settle first: a GPU keeps its clocks up for seconds after its last kernel, and cools down for
    longer. ``counter`` may be the reason why there is none.
    """
    if isinstance(counter, str) or rules.energy_s == 0:
        reason = counter if isinstance(counter, str) else "the rules of this measurement leave energy out"
        return Energy(status="unavailable", reason=reason)
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
        return Energy(
            status="unavailable", reason=f"{counter.name}: the calls use no more energy than the idle machine"
        )
    return Energy(
        status="measured", value=above_idle_mj, reason=f"{counter.name}, {calls} calls, idle energy subtracted"
    )


_POLL_S = 0.010


class PeakMeter:
    """Peak resident memory of this process: kept by Linux, else read every 10 ms, so that shorter ones are missed.

    ``proc``: of this process.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc, self._polled_bytes, self._stopped = proc, 0, threading.Event()
        try:
            self.is_polled = "VmHWM:" not in (proc / "status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            self.is_polled = True
        self.method = "peak resident memory kept by the kernel (VmHWM)"
        if self.is_polled:
            self.method = "highest resident memory, read every 10 ms"
            threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self.peak_bytes()

    def reset(self) -> bool:
        """Start over. False: this system cannot, as in some containers; the peak remains that of the whole process."""
        self._polled_bytes = 0
        try:
            if not self.is_polled:
                (self._proc / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """Return the highest resident memory."""
        if not self.is_polled:
            status = (self._proc / "status").read_text(encoding="utf-8", errors="replace")
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        self._polled_bytes = max(self._polled_bytes, resident_bytes())
        return self._polled_bytes

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def memory_above(meter: PeakMeter, baseline_bytes: int, since_reset: bool) -> Memory:
    """Return the peak above the baseline."""
    method = meter.method + ("" if since_reset else ", over all shapes so far, because this system cannot reset it")
    peak = max(0, meter.peak_bytes() - baseline_bytes)
    return Memory(status="measured", peak=peak, baseline=baseline_bytes, method=method)


PROCESS, CARD, SYSTEM = "process (NVML)", "card (NVML)", "system"
_METHODS = {  # the most exact one first
    PROCESS: "GPU memory of the process (NVML), CUDA's context included, at the end",
    CARD: "memory of the whole card (NVML), at the end minus before; other programs' changes count too",
    SYSTEM: "memory of the whole system, at the end minus before: GPU and processor share it, and NVML has no figure; "
    "other programs' changes count too",
}


def gpu_memory_in_use(uuid: str | None) -> dict[str, int]:
    """Return what all programs use on the card, by the name of the figure; ``uuid`` of the card, if NVML knows one."""
    if nvidia.shares_system_memory():
        memory = psutil.virtual_memory()
        return {SYSTEM: int(memory.total - memory.available)}
    used_bytes = nvidia.card_used_bytes(uuid) if uuid is not None else None
    return {CARD: used_bytes} if used_bytes is not None else {}


def gpu_memory(uuid: str | None, initial: Mapping[str, int]) -> tuple[Memory, dict[str, int]]:
    """Return the best figure of what this process holds on the card, `unavailable` if there is none, and all by name.

    ``initial``: of :func:`gpu_memory_in_use`, before anything was opened; empty: the process's own figure alone.
    """
    growth = {name: max(0, used - initial[name]) for name, used in gpu_memory_in_use(uuid).items() if name in initial}
    figures = {PROCESS: nvidia.process_memory_bytes(os.getpid()), **growth}
    by_name = {name: value for name, value in figures.items() if value}
    is_hidden = uuid is not None and PROCESS not in by_name and nvidia.uses_wddm(uuid)
    note = "Windows' WDDM driver model hides the memory of single processes"
    for name, method in _METHODS.items():
        if name in by_name:
            method = f"{method} ({note})" if is_hidden else method
            return Memory(status="measured", peak=by_name[name], baseline=initial.get(name, 0), method=method), by_name
    reason = (
        "neither NVML nor the system reports the GPU memory of this process: NVML is missing, or a container hides the "
        "process from the driver"
    )
    if is_hidden:
        reason = f"{note}, and NVML has no figure for the card"
    return Memory(status="unavailable", reason=reason), by_name
