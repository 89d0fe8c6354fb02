"""Conditions of a measurement: threads, clocks, temperature, power, and other work on the machine."""

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

from edgeformer.artifacts.report import Conditions
from edgeformer.artifacts.units import format_threads
from edgeformer.runtimes import on_gpu
from edgeformer.system import nvidia
from edgeformer.system.host import core_kinds, power_source, slowdowns

_CPU = Path("/sys/devices/system/cpu")
# Foreign work on more than this share of one core shows in the percentiles…
FOREIGN_CORES = 0.2
# …and on more than this share of the machine in the median: then the figures cannot be reproduced.
FOREIGN_SHARE = 0.1
# A thread that computes, in cores: ONNX Runtime's workers spin while they wait for work, which counts, and on a full
# machine every thread gets a part of a core only. The share is that of the busiest thread.
_BUSY_SHARE, _BUSY_CORES = 0.3, 0.05
_CORES_TOLERANCE = 0.3
_CLOCK_FALL = 0.1
# With these drivers "powersave" is the ordinary setting, which still reaches the highest clock.
_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp")


@dataclass(frozen=True)
class CpuReading:
    """Processor seconds so far: of the whole machine, of this process, and taken by the hypervisor."""

    at_s: float
    busy_s: float | None  # None: the system does not say (Android)
    own_s: float
    stolen_s: float
    throttled: int | None  # thermal throttling events since boot; None: not counted
    thread_s: Mapping[int, float] = field(default_factory=dict)  # of this process; empty: not reported
    mhz: float | None = None  # clock of the fastest core; None: not reported


def read_cpu() -> CpuReading:
    """Take a reading; one before and one after a measurement."""
    times, process = _safely(psutil.cpu_times), psutil.Process()
    process_times, busy, stolen = process.cpu_times(), None, 0.0
    if times is not None:
        idle, stolen = times.idle + getattr(times, "iowait", 0.0), getattr(times, "steal", 0.0)
        # Linux counts a guest's time in user time as well.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - idle - stolen
    throttle_counts: list[int] = []
    for file in _CPU.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):  # Linux on Intel
        with contextlib.suppress(OSError, ValueError):
            throttle_counts.append(int(file.read_text(encoding="ascii")))
    thread_s = {thread.id: thread.user_time + thread.system_time for thread in _safely(process.threads) or ()}
    return CpuReading(
        at_s=time.perf_counter(),
        busy_s=busy,
        own_s=process_times.user + process_times.system,
        stolen_s=stolen,
        throttled=sum(throttle_counts) if throttle_counts else None,
        thread_s=thread_s if threading.get_native_id() in thread_s else {},  # macOS: threads have no system ids
        # The maximum, because idle cores may be slower than those that compute.
        mhz=max((core.current for core in _safely(partial(psutil.cpu_freq, percpu=True)) or []), default=None),
    )


@dataclass(frozen=True)
class CpuUse:
    """Use of the processor between two readings, in cores."""

    own_cores: float
    foreign_cores: float | None  # None: not known
    stolen_cores: float
    throttled: bool
    busy_threads: Mapping[int, float] = field(default_factory=dict)  # that computed beside the calling one
    clock_fall: float = 0.0  # relative

    def warnings(self, threads: int | None = None, pools: int = 1) -> list[str]:
        """Return reasons to doubt the figures. ``threads`` and ``pools``: see :meth:`crowd`."""
        texts = {
            f"other processes used {self.foreign_cores or 0.0:.1f} cores": (self.foreign_cores or 0.0) > FOREIGN_CORES,
            "this system does not say whether other processes computed": self.foreign_cores is None,
            f"the hypervisor took {self.stolen_cores:.1f} cores away": self.stolen_cores > FOREIGN_CORES,
            "the processor throttled because of heat": self.throttled,
            f"the processor's clock fell by {self.clock_fall:.0%}": self.clock_fall > _CLOCK_FALL,
        }
        warnings = [f"{text} while this was measured" for text, is_true in texts.items() if is_true]
        crowd = self.crowd(threads, pools)
        return [*warnings, crowd] if crowd is not None else warnings

    def crowd(self, threads: int | None, pools: int = 1) -> str | None:
        """Return a warning if more than the artifact's ``threads`` computed in this process; None: not checked.

        ``pools`` are graphs that run in turns, each with its threads in addition to the calling one.
        """
        if threads is None:
            return None
        if len(self.busy_threads) <= (threads - 1) * pools and self.own_cores <= threads + _CORES_TOLERANCE:
            return None
        used = f"{self.own_cores:.1f} cores with {1 + len(self.busy_threads)} threads"
        return f"the measuring process used {used}, but the artifact was given {format_threads(threads)}"

    def disturbed(self, cores: int, threads: int | None, pools: int = 1) -> bool:
        """Whether too much other work ran on ``cores`` cores to reproduce the figures."""
        busy = (self.foreign_cores or 0.0) + self.stolen_cores > max(FOREIGN_CORES, FOREIGN_SHARE * cores)
        return busy or self.throttled or self.crowd(threads, pools) is not None


def used_between(first: CpuReading, second: CpuReading) -> CpuUse:
    """Return the use of the processor between two readings, taken by the thread that calls the artifact."""
    elapsed_s = max(second.at_s - first.at_s, 1e-9)
    own_cores = (second.own_s - first.own_s) / elapsed_s
    threads = {
        number: (seconds - first.thread_s.get(number, 0.0)) / elapsed_s for number, seconds in second.thread_s.items()
    }
    foreign_cores = None
    if first.busy_s is not None and second.busy_s is not None:
        foreign_cores = max(0.0, (second.busy_s - first.busy_s) / elapsed_s - own_cores)
    busy_cores = max(_BUSY_CORES, _BUSY_SHARE * max(threads.values(), default=0.0))
    threads.pop(threading.get_native_id(), None)
    return CpuUse(
        own_cores=own_cores, foreign_cores=foreign_cores,
        stolen_cores=max(0.0, (second.stolen_s - first.stolen_s) / elapsed_s),
        throttled=None not in (first.throttled, second.throttled) and first.throttled != second.throttled,
        busy_threads={number: cores for number, cores in threads.items() if cores > busy_cores},
        clock_fall=max(0.0, 1 - second.mhz / first.mhz) if first.mhz and second.mhz else 0.0,
    )  # fmt: skip


def describe(threads: int, gpu_uuid: str | None) -> dict[str, Any]:
    """Return the present conditions, without those that this system does not report."""
    files = [_CPU / "cpu0/cpufreq" / name for name in ("scaling_governor", "scaling_driver")]
    governor, driver = (_safely(partial(file.read_text, encoding="ascii")) or "" for file in files)
    frequency = _safely(psutil.cpu_freq)
    temperatures = _safely(getattr(psutil, "sensors_temperatures", None)) or {}
    load_average = _safely(getattr(os, "getloadavg", None))  # Android does not allow it
    kinds = core_kinds()
    conditions: dict[str, Any] = {
        "threads": threads,
        "affinity": _safely(getattr(psutil.Process(), "cpu_affinity", None)),
        "governor": governor.strip() or None,
        "governor_scales": driver.strip() in _SCALING_DRIVERS or None,
        "cpu_mhz": round(frequency.current) if frequency else None,
        "core_kinds": kinds if len(kinds) > 1 else None,
        "load_average_1min": round(load_average[0], 2) if load_average is not None else None,
        "power": power_source(),
        "slowed_by": tuple(slowdowns()) or None,
        "temperature_c": max((entry.current for entry in chain(*temperatures.values()) if entry.current), default=None),
    }
    state = nvidia.state(gpu_uuid) if gpu_uuid is not None else None
    if state is not None:
        foreign_processes = []
        for pid in state.process_ids:
            if pid != os.getpid():
                name = _safely(lambda pid=pid: psutil.Process(pid).name())  # None: gone, or of another user
                foreign_processes.append(f"{name} ({pid})" if name is not None else f"process {pid}")
        conditions |= {
            "gpu_sm_mhz": state.sm_clock_mhz,
            "gpu_memory_mhz": state.memory_clock_mhz,
            "gpu_temperature_c": state.temperature_c,
            "gpu_power_limit_w": state.power_limit_w,
            "gpu_throttle_reasons": state.throttle_reasons,
            "gpu_slowed_by": tuple(state.slowed_by) or None,
            "gpu_foreign_processes": tuple(foreign_processes) or None,
        }
    return {key: value for key, value in conditions.items() if value is not None}


def doubts(conditions: Conditions, provider: str) -> list[str]:
    """Return reasons to doubt the figures."""
    warnings: list[str] = []
    if (conditions.power or "").startswith("battery"):
        warnings.append(f"measured on {conditions.power}; many laptops are slower on battery than on mains")
    warnings += [f"the system slows the processor: {reason}" for reason in conditions.slowed_by or ()]
    if conditions.governor == "powersave" and not conditions.governor_scales:
        warnings.append("the frequency governor is powersave, which keeps the processor at its lowest clock")
    if on_gpu(provider):
        warnings += [f"the card lowered its clocks: {reason}" for reason in conditions.gpu_slowed_by or ()]
        if conditions.gpu_foreign_processes:
            warnings.append(f"other processes used the card: {', '.join(conditions.gpu_foreign_processes)}")
    return warnings


def _safely(function: Any) -> Any:
    """Return the result, or None: psutil raises several kinds of errors if a platform lacks a sensor."""
    try:
        return function() if function is not None else None
    except (OSError, RuntimeError, AttributeError, psutil.Error):
        return None
