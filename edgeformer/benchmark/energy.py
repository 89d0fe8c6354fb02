"""Energy per call: a counter read around a loop of its own, minus what the settled idle machine draws meanwhile."""

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
        name: and what it counts the energy of.
        read: its readings as they are now. Raises OSError when the counter went away.
        used_mj: millijoules between two of these.
    """

    name: str
    read: Callable[[], Sequence[int]]
    used_mj: Callable[[Sequence[int], Sequence[int]], float]


def energy_counter(provider: str, gpu_uuid: str | None) -> EnergyCounter | str:
    """The counter of what a provider computes on, or why there is none.

    Args:
        provider: as a session names it.
        gpu_uuid: the card that NVML knows; None: it knows none.
    """
    if on_gpu(provider):
        if gpu_uuid is None:
            return "no card was found through NVML"
        try:
            _read_card(gpu_uuid)
        except OSError:
            return "this card has no energy counter that NVML can read"
        return EnergyCounter("NVML (whole card)", partial(_read_card, gpu_uuid), lambda before, now: now[0] - before[0])
    domains, reason = rapl_domains()
    names = ", ".join(domain.name for domain in domains)
    return reason or EnergyCounter(
        f"RAPL ({names}: whole processor)",
        lambda: [domain.read_uj() for domain in domains],
        lambda before, now: sum(map(RaplDomain.used_uj, domains, before, now)) / 1000,
    )


def _read_card(uuid: str) -> list[int]:
    """Millijoules (Volta and later)."""
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
    """Millijoules per call above idle.

    Args:
        call: runs the artifact once, blocking; its argument counts calls from 0.
        counter: what is read, or why nothing is.
        rules: how long to idle and to call.
        clock: seconds.
        sleep: idles for so many seconds; injected, as the clock is, so that tests need not wait.
    """
    if isinstance(counter, str):
        return Energy(status="unavailable", reason=counter)
    if rules.energy_s == 0:
        return Energy(status="unavailable", reason="these rules measure no energy")
    try:
        idle_mw = _settled_idle_mw(counter, rules, clock, sleep)
        if isinstance(idle_mw, str):
            return Energy(status="unavailable", reason=f"{counter.name}: {idle_mw}")
        before, began, calls = counter.read(), clock(), 0
        while calls == 0 or clock() - began < rules.energy_s:
            call(calls)
            calls += 1
        used_mj, elapsed_s = counter.used_mj(before, counter.read()), clock() - began
    except OSError as error:
        return Energy(status="unavailable", reason=f"{counter.name} could not be read: {error}")
    above_idle_mj = (used_mj - idle_mw * elapsed_s) / calls
    if above_idle_mj <= 0:
        return Energy(status="unavailable", reason=f"{counter.name}: the calls do not stand out from the idle machine")
    return Energy(status="measured", value=above_idle_mj, reason=f"{counter.name}, {calls} calls, idle subtracted")


def _settled_idle_mw(
    counter: EnergyCounter, rules: MeasureRules, clock: Callable[[], float], sleep: Callable[[float], None]
) -> float | str:
    """Return what the idle machine draws in milliwatts, or why that is not known.

    A GPU keeps its clocks up for seconds after its last kernel, and cools down for longer.
    """
    powers_mw: list[float] = []
    began = clock()
    for _ in range(rules.idle_windows):
        before, window_began = counter.read(), clock()
        sleep(rules.idle_s)
        powers_mw.append(counter.used_mj(before, counter.read()) / max(clock() - window_began, 1e-9))
        recent = powers_mw[-rules.windows :]
        if len(recent) == rules.windows and max(recent) <= min(recent) * (1 + rules.window_tolerance):
            return sum(recent) / len(recent)
    low, high = (value(powers_mw[-rules.windows :]) / 1000 for value in (min, max))
    return (
        f"the idle power did not settle within {clock() - began:.0f} s ({low:.1f} to {high:.1f} W in the last "
        f"{rules.windows} windows of {rules.idle_s:g} s)"
    )
