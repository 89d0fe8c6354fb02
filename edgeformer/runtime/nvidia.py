"""NVIDIA cards and their state, asked through NVML, without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One card as NVML reports it. ``memory_bytes`` is None where it shares the system's memory (Jetson)."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: str | None


@dataclass(frozen=True)
class GpuState:
    """One card at one moment. What a platform does not report is None."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_limit_w: float | None
    throttle_reasons: str | None
    energy_mj: int | None
    process_ids: tuple[int, ...]


def gpus() -> list[Gpu]:
    """The cards that NVML lists; empty without cards or driver. :func:`nvml_problem` says why."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [_gpu(nvml, index) for index in range(int(_ask(nvml, "nvmlDeviceGetCount") or 0))]


def nvml_problem() -> str | None:
    """Why NVML cannot be used here; None when it can."""
    with _nvml() as nvml:
        return None if nvml is not None else "the NVIDIA management library (NVML) is not installed or does not start"


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without NVML."""
    with _nvml() as nvml:
        version = _ask(nvml, "nvmlSystemGetDriverVersion") if nvml is not None else None
        return str(version) if version is not None else None


def process_memory_bytes(pid: int) -> int | None:
    """GPU memory that a process holds on all cards.

    None where NVML is absent or does not say: Windows' WDDM driver hides it, Jetsons have no such figure, and
    inside a container the driver may know the process by another number.
    """
    with _nvml() as nvml:
        if nvml is None:
            return None
        total: int | None = None
        for handle in _handles(nvml):
            for process in _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []:
                if process.pid == pid and process.usedGpuMemory is not None:
                    total = (total or 0) + int(process.usedGpuMemory)
        return total


def state(uuid: str) -> GpuState | None:
    """Clocks, temperature, limits, energy counter and other processes of one card; None without NVML."""
    with _nvml() as nvml:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) if nvml is not None else None
        if nvml is None or handle is None:
            return None
        limit_mw = _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []
        return GpuState(
            sm_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            temperature_c=_ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            throttle_reasons=hex(reasons) if reasons is not None else None,
            energy_mj=_ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle),
            process_ids=tuple(sorted(int(process.pid) for process in processes)),
        )


@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml, initialised; None where the driver's library is absent."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """One NVML call; None where this card, platform or driver does not support it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _handles(nvml: Any) -> list[Any]:
    count = int(_ask(nvml, "nvmlDeviceGetCount") or 0)
    found = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    return [handle for handle in found if handle is not None]


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    return Gpu(
        index=index,
        name=str(_ask(nvml, "nvmlDeviceGetName", handle) or "unknown NVIDIA card"),
        uuid=str(_ask(nvml, "nvmlDeviceGetUUID", handle) or ""),
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_capability=".".join(map(str, capability)) if capability is not None else None,
    )
