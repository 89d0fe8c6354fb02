"""The circumstances of a measurement: threads, clocks, heat, power, and what else the machine was doing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from edgeformer.runtimes import on_gpu
from edgeformer.system import nvidia
from edgeformer.system.host import power_source

_CPU = Path("/sys/devices/system/cpu")
# Foreign work on more than this share of one core shows in the percentiles…
FOREIGN_CORES = 0.2
# …and on more than this share of the machine in the median: then the figures cannot be had again.
FOREIGN_SHARE = 0.1
# A thread that computes, beside the busiest one, in cores: ONNX Runtime's workers look out for work in a loop, which
# counts, and on a full machine every thread gets a part of a core only.
_BUSY_SHARE, _BUSY_CORES = 0.3, 0.05
_OWN_TOLERANCE = 0.3
_CLOCK_FALL = 0.1
# With these drivers "powersave" is the ordinary setting, which still goes up to the highest clock.
_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp")


@dataclass(frozen=True)
class CpuReading:
    """Processor seconds so far: of the whole machine, of this process, and stolen by the hypervisor.

    ``thread_s``: of each of this process's threads; ``mhz``: the fastest core's clock; absent where the system does not
    say.
    """

    at_s: float
    busy_s: float
    own_s: float
    stolen_s: float
    throttled: int | None
    thread_s: Mapping[int, float] = field(default_factory=dict)
    mhz: float | None = None


def read_cpu() -> CpuReading:
    """One reading; take one before and one after."""
    times = psutil.cpu_times()
    own = psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts a guest's time in user time as well.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    stolen = getattr(times, "steal", 0.0)
    return CpuReading(
        at_s=time.perf_counter(),
        busy_s=total - idle - stolen,
        own_s=own.user + own.system,
        stolen_s=stolen,
        throttled=_throttle_count(),
        thread_s=_thread_seconds(),
        # Of all cores: those that idle say nothing about the ones that compute.
        mhz=max((core.current for core in _safely(partial(psutil.cpu_freq, percpu=True)) or []), default=None),
    )


@dataclass(frozen=True)
class CpuUse:
    """What happened between two readings, in cores.

    ``busy_threads``: threads of this process that computed, beside the one that calls the artifact. ``strangers``: of
    them, those that cannot be the artifact's, because they were there before it was opened.
    """

    own_cores: float
    foreign_cores: float
    stolen_cores: float
    throttled: bool
    busy_threads: Mapping[int, float] = field(default_factory=dict)
    strangers: frozenset[int] = frozenset()
    clock_fall: float = 0.0

    def warnings(self, threads: int | None = None, pools: int = 1) -> list[str]:
        """What should make a reader doubt the figures. ``threads`` and ``pools``: see :meth:`crowd`."""
        during = "while this was measured"
        said = (
            (self.foreign_cores > FOREIGN_CORES, f"other processes used {self.foreign_cores:.1f} cores {during}"),
            (self.stolen_cores > FOREIGN_CORES, f"the hypervisor took {self.stolen_cores:.1f} cores away {during}"),
            (self.throttled, f"the processor throttled because of heat {during}"),
            (self.clock_fall > _CLOCK_FALL, f"the processor's clock fell by {self.clock_fall:.0%} {during}"),
        )
        return [*(text for holds, text in said if holds), *filter(None, [self.crowd(threads, pools)])]

    def crowd(self, threads: int | None, pools: int = 1) -> str | None:
        """Says so when more than the artifact's ``threads`` computed in this process. Not asked where these are None.

        Cores alone do not tell: on two cores, two threads and a third that spins use two cores together.

        Args:
            threads: of one operator, the calling one among them.
            pools: graphs that run in turns, each with threads of its own beside the calling one.
        """
        if threads is None:
            return None
        others = len(self.busy_threads) > (threads - 1) * pools or self.strangers
        if not others and self.own_cores <= threads + _OWN_TOLERANCE:
            return None
        named = ", ".join(
            f"{_thread_name(number)} {cores:.1f} cores"
            for number, cores in sorted(self.busy_threads.items(), key=lambda item: -item[1])
            if number in (self.strangers or self.busy_threads)
        )
        if self.strangers:
            return f"threads of this process that are not the artifact's computed while this was measured: {named}"
        given = f"{threads} thread{'s' if threads > 1 else ''}"
        beside = f"; beside the calling one: {named}" if named else ""
        return f"this process used {self.own_cores:.1f} cores, where the artifact was given {given}{beside}"

    def disturbed(self, cores: int, threads: int | None, pools: int = 1) -> bool:
        """Whether the same figures could not be had again: on ``cores`` cores too much else was going on."""
        busy = self.foreign_cores + self.stolen_cores > max(FOREIGN_CORES, FOREIGN_SHARE * cores)
        return busy or self.throttled or self.crowd(threads, pools) is not None


def _thread_name(number: int) -> str:
    """``thread 4711 (python)``; Linux alone tells the name."""
    try:
        name = (Path("/proc/self/task") / str(number) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f"thread {number}"
    return f"thread {number} ({name})"


def other_threads() -> frozenset[int]:
    """Threads of this process beside the calling one, as they are now; empty where the system does not say."""
    return frozenset(_thread_seconds()) - {threading.get_native_id()}


def _thread_seconds() -> dict[int, float]:
    """Processor seconds per thread of this process; empty where they have no numbers of the system (macOS)."""
    found = {one.id: one.user_time + one.system_time for one in _safely(psutil.Process().threads) or ()}
    return found if threading.get_native_id() in found else {}


def used_between(before: CpuReading, after: CpuReading, earlier: frozenset[int] = frozenset()) -> CpuUse:
    """Cores used between two readings, told apart by whose they were.

    Args:
        before: taken by the thread that calls the artifact, as is ``after``.
        after: the later reading.
        earlier: :func:`other_threads` before the artifact was opened.
    """
    elapsed_s = max(after.at_s - before.at_s, 1e-9)
    own = (after.own_s - before.own_s) / elapsed_s
    busy = (after.busy_s - before.busy_s) / elapsed_s
    throttled = None not in (before.throttled, after.throttled) and before.throttled != after.throttled
    threads = {
        number: (seconds - before.thread_s.get(number, 0.0)) / elapsed_s for number, seconds in after.thread_s.items()
    }
    enough = max(_BUSY_CORES, _BUSY_SHARE * max(threads.values(), default=0.0))
    threads.pop(threading.get_native_id(), None)
    others = {number: cores for number, cores in threads.items() if cores > enough}
    fall = 1 - after.mhz / before.mhz if before.mhz and after.mhz else 0.0
    return CpuUse(
        own_cores=own,
        foreign_cores=max(0.0, busy - own),
        stolen_cores=max(0.0, (after.stolen_s - before.stolen_s) / elapsed_s),
        throttled=throttled,
        busy_threads=others,
        strangers=earlier & others.keys(),
        clock_fall=max(0.0, fall),
    )


def describe(threads: int, gpu_uuid: str | None) -> dict[str, Any]:
    """The circumstances as they are now; what this system does not tell is absent.

    Args:
        threads: of one operator.
        gpu_uuid: the card that computes, where NVML knows one.
    """
    frequency, heat = _safely(psutil.cpu_freq), _safely(getattr(psutil, "sensors_temperatures", None)) or {}
    conditions: dict[str, Any] = {
        "threads": threads,
        "affinity": _safely(getattr(psutil.Process(), "cpu_affinity", None)),
        "governor": _cpufreq("scaling_governor"),
        "governor_scales": _cpufreq("scaling_driver") in _SCALING_DRIVERS or None,
        "cpu_mhz": round(frequency.current) if frequency else None,
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "power": power_source(),
        "temperature_c": max((entry.current for entry in chain(*heat.values()) if entry.current), default=None),
    }
    state = nvidia.state(gpu_uuid) if gpu_uuid is not None else None
    if state is not None:
        conditions |= {
            "gpu_sm_mhz": state.sm_clock_mhz,
            "gpu_memory_mhz": state.memory_clock_mhz,
            "gpu_temperature_c": state.temperature_c,
            "gpu_power_limit_w": state.power_limit_w,
            "gpu_throttle_reasons": state.throttle_reasons,
            "gpu_slowed_by": list(state.slowed_by) or None,
            "gpu_foreign_processes": [_process(pid) for pid in state.process_ids if pid != os.getpid()] or None,
        }
    return {key: value for key, value in conditions.items() if value is not None}


def doubts(described: Mapping[str, Any], provider: str) -> list[str]:
    """What should make a reader doubt the figures.

    Args:
        described: as :func:`describe` gives it.
        provider: what computes; a card's troubles are none of a processor's.
    """
    noted: list[str] = []
    if str(described.get("power", "")).startswith("battery"):
        noted.append(f"measured on {described['power']}: many laptops are slower than on mains")
    if described.get("governor") == "powersave" and not described.get("governor_scales"):
        noted.append("the processor's frequency governor is powersave, which keeps its lowest clock")
    if on_gpu(provider):
        for what in described.get("gpu_slowed_by", ()):
            noted.append(f"the card's clocks were lowered: {what}")
        others = described.get("gpu_foreign_processes", ())
        if others:
            noted.append(f"other processes had the card open: {', '.join(others)}")
    return noted


def _process(pid: int) -> str:
    """``Xorg (1234)``; the number alone where the process is gone or belongs to somebody else."""
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except (psutil.Error, OSError):
        return f"process {pid}"


def _safely(function: Any) -> Any:
    """psutil raises several kinds of errors where a platform lacks a sensor."""
    try:
        return function() if function is not None else None
    except (OSError, RuntimeError, AttributeError, psutil.Error):
        return None


def _cpufreq(name: str, root: Path = _CPU) -> str | None:
    try:
        return (root / "cpu0/cpufreq" / name).read_text(encoding="ascii").strip()
    except OSError:
        return None


def _throttle_count() -> int | None:
    """Thermal throttling events of all cores since boot (Linux on Intel), None where nobody counts."""
    counts: list[int] = []
    for file in _CPU.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(file.read_text(encoding="ascii")))
    return sum(counts) if counts else None
