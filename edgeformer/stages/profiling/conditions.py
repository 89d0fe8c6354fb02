"""The circumstances of a measurement: threads, clocks, heat, power, and what else the machine was doing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgeformer.runtime import nvidia
from edgeformer.runtime.power import power_source

_CPU = Path("/sys/devices/system/cpu")
# Foreign work on more than this share of one core shows in the percentiles.
FOREIGN_CORES = 0.2


@dataclass(frozen=True)
class CpuReading:
    """Processor seconds so far: of the whole machine, of this process, and stolen by the hypervisor."""

    at_s: float
    busy_s: float
    own_s: float
    stolen_s: float
    throttled: int | None


def read_cpu() -> CpuReading:
    """One reading; take one before and one after."""
    times = psutil.cpu_times()
    own = psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts a guest's time in user time as well.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    stolen = getattr(times, "steal", 0.0)
    return CpuReading(time.perf_counter(), total - idle - stolen, own.user + own.system, stolen, _throttle_count())


@dataclass(frozen=True)
class CpuUse:
    """What happened between two readings, in cores."""

    own_cores: float
    foreign_cores: float
    stolen_cores: float
    throttled: bool

    def warnings(self) -> list[str]:
        """What should make a reader doubt the figures."""
        noted: list[str] = []
        if self.foreign_cores > FOREIGN_CORES:
            noted.append(f"other processes used {self.foreign_cores:.1f} cores while this was measured")
        if self.stolen_cores > FOREIGN_CORES:
            noted.append(f"the hypervisor took {self.stolen_cores:.1f} cores away while this was measured")
        if self.throttled:
            noted.append("the processor throttled because of heat while this was measured")
        return noted


def used_between(before: CpuReading, after: CpuReading) -> CpuUse:
    """Cores used between two readings, told apart by whose they were."""
    elapsed_s = max(after.at_s - before.at_s, 1e-9)
    own = (after.own_s - before.own_s) / elapsed_s
    busy = (after.busy_s - before.busy_s) / elapsed_s
    throttled = None not in (before.throttled, after.throttled) and before.throttled != after.throttled
    return CpuUse(own, max(0.0, busy - own), max(0.0, (after.stolen_s - before.stolen_s) / elapsed_s), throttled)


def describe(threads: int, gpu_uuid: str | None) -> dict[str, Any]:
    """The circumstances as they are now; what this system does not tell is absent."""
    frequency = _safely(psutil.cpu_freq)
    conditions: dict[str, Any] = {
        "threads": threads,
        "affinity": _safely(getattr(psutil.Process(), "cpu_affinity", None)),
        "governor": _governor(),
        "cpu_mhz": round(frequency.current) if frequency else None,
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "power": power_source(),
        "temperature_c": _hottest(),
    }
    state = nvidia.state(gpu_uuid) if gpu_uuid is not None else None
    if state is not None:
        conditions |= {
            "gpu_sm_mhz": state.sm_clock_mhz,
            "gpu_memory_mhz": state.memory_clock_mhz,
            "gpu_temperature_c": state.temperature_c,
            "gpu_power_limit_w": state.power_limit_w,
            "gpu_throttle_reasons": state.throttle_reasons,
            "gpu_foreign_processes": [pid for pid in state.process_ids if pid != os.getpid()] or None,
        }
    return {key: value for key, value in conditions.items() if value is not None}


def _safely(function: Any) -> Any:
    """psutil raises several kinds of errors where a platform lacks a sensor."""
    try:
        return function() if function is not None else None
    except (OSError, RuntimeError, AttributeError, NotImplementedError, psutil.Error):
        return None


def _hottest() -> float | None:
    sensors = _safely(getattr(psutil, "sensors_temperatures", None)) or {}
    values = [entry.current for entries in sensors.values() for entry in entries if entry.current]
    return max(values) if values else None


def _governor(root: Path = _CPU) -> str | None:
    try:
        return (root / "cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _throttle_count(root: Path = _CPU) -> int | None:
    """Thermal throttling events of all cores since boot (Linux on Intel), None where nobody counts."""
    counts: list[int] = []
    for file in root.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        try:
            counts.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return sum(counts) if counts else None
