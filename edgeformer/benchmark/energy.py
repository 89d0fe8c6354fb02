"""Energy per call: a counter read around a loop of calls, minus the power of the idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from edgeformer.artifacts.report import Energy
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.runtimes import on_gpu
from edgeformer.system import nvidia
from edgeformer.system.host import RaplDomain, rapl_domains


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
    """Return the counter of the hardware that a provider computes on, or the reason why there is none.

    Args:
        provider: of a session.
        gpu_uuid: the card that NVML knows; None: it knows none.
    """
    if on_gpu(provider):
        if gpu_uuid is None:
            return "no card was found through NVML"
        try:
            _read_card(gpu_uuid)
        except OSError:
            return "this card has no energy counter that NVML can read"
        return EnergyCounter("NVML (whole card)", partial(_read_card, gpu_uuid), lambda start, now: now[0] - start[0])
    domains, reason = rapl_domains()
    names = ", ".join(domain.name for domain in domains)
    return reason or EnergyCounter(
        f"RAPL ({names}: whole processor)",
        lambda: [domain.read_uj() for domain in domains],
        lambda start, now: sum(map(RaplDomain.used_uj, domains, start, now)) / 1000,
    )


def _read_card(uuid: str) -> list[int]:
    """Return millijoules (Volta and later)."""
    state = nvidia.state(uuid)
    if state is None or state.energy_mj is None:
        raise OSError("the card has no energy counter")
    return [state.energy_mj]


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
