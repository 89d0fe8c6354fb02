"""Energy per call: a counter read around a loop of its own, minus what the idle machine draws meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from edgeformer.backends import on_gpu
from edgeformer.formats.report import Energy
from edgeformer.machine import nvidia
from edgeformer.machine.host import RaplDomain, rapl_domains
from edgeformer.stages.profiling.measure import MeasureRules


class EnergyCounter(Protocol):
    """A counter of millijoules."""

    name: str

    def start(self) -> None:
        """Begin a reading."""
        ...

    def used_mj(self) -> float:
        """Millijoules since :meth:`start`. Raises OSError when the counter went away."""
        ...


class RaplCounter:
    """All processor packages together (Linux)."""

    def __init__(self, domains: list[RaplDomain]) -> None:
        self.name = f"RAPL ({', '.join(domain.name for domain in domains)}: whole processor)"
        self._domains = domains

    def start(self) -> None:
        self._before = [domain.read_uj() for domain in self._domains]

    def used_mj(self) -> float:
        """The packages' sum; a counter that wrapped round once is understood."""
        pairs = zip(self._domains, self._before, strict=True)
        return sum(domain.used_uj(before, domain.read_uj()) for domain, before in pairs) / 1000


class NvmlCounter:
    """The whole card's counter (Volta and later)."""

    name = "NVML (whole card)"

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def start(self) -> None:
        self._before = self._read()

    def used_mj(self) -> float:
        return float(self._read() - self._before)

    def _read(self) -> int:
        state = nvidia.state(self._uuid)
        if state is None or state.energy_mj is None:
            raise OSError("the card has no energy counter")
        return state.energy_mj


def energy_counter(provider: str, gpu_uuid: str | None) -> EnergyCounter | str:
    """The counter of what a provider computes on, or why there is none.

    Args:
        provider: as a session names it.
        gpu_uuid: the card that NVML knows; None: it knows none.
    """
    if on_gpu(provider):
        if gpu_uuid is None:
            return "no card was found through NVML"
        state = nvidia.state(gpu_uuid)
        if state is None or state.energy_mj is None:
            return "this card has no energy counter that NVML can read"
        return NvmlCounter(gpu_uuid)
    domains, reason = rapl_domains()
    return RaplCounter(domains) if reason is None else reason


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
    try:
        counter.start()
        began = clock()
        sleep(rules.idle_s)
        idle_mw = counter.used_mj() / max(clock() - began, 1e-9)
        counter.start()
        began, calls = clock(), 0
        while calls == 0 or clock() - began < rules.energy_s:
            call(calls)
            calls += 1
        used_mj, elapsed_s = counter.used_mj(), clock() - began
    except OSError as error:
        return Energy(status="unavailable", reason=f"{counter.name} could not be read: {error}")
    above_idle_mj = (used_mj - idle_mw * elapsed_s) / calls
    if above_idle_mj <= 0:
        return Energy(status="unavailable", reason=f"{counter.name}: the calls do not stand out from the idle machine")
    return Energy(status="measured", value=above_idle_mj, reason=f"{counter.name}, {calls} calls, idle subtracted")
