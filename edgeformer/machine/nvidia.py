"""NVIDIA cards and their state, asked through NVML, without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE_TREE = Path("/proc/device-tree")
_WDDM = 0  # NVML_DRIVER_WDDM
# nvml.h, nvmlClocksEventReasons; those that say "slower than it could be". Idle and application clocks are not.
_SLOWED = {
    0x04: "power limit",
    0x08: "hardware slowdown (heat or power)",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "external power brake",
}


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
    """One card at one moment. What a platform does not report is None.

    ``slowed_by``: why its clocks are lower than they could be. ``process_ids``: computing and drawing processes.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_limit_w: float | None
    throttle_reasons: str | None
    energy_mj: int | None
    process_ids: tuple[int, ...]
    slowed_by: tuple[str, ...] = ()


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


def card_used_bytes(uuid: str) -> int | None:
    """Memory in use on one card, by everybody; None without NVML, and where the card shares the system's memory."""
    with _nvml() as nvml:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) if nvml is not None else None
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle) if handle is not None else None
        return int(memory.used) if memory is not None else None


def hides_process_memory(uuid: str) -> bool:
    """Windows' WDDM driver model manages the card's memory itself and tells nobody which process holds how much."""
    with _nvml() as nvml:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) if nvml is not None else None
        model = _ask(nvml, "nvmlDeviceGetCurrentDriverModel", handle) if handle is not None else None
        return model is not None and int(model) == _WDDM


def shares_system_memory(root: Path = _DEVICE_TREE) -> bool:
    """Whether this is a Jetson: its GPU has no memory of its own, and NVML (where it is there) no figure of it."""
    try:
        return b"nvidia,tegra" in (root / "compatible").read_bytes()
    except OSError:
        return False


def state(uuid: str) -> GpuState | None:
    """Clocks, temperature, limits, energy counter and other processes of one card; None without NVML."""
    with _nvml() as nvml:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) if nvml is not None else None
        if nvml is None or handle is None:
            return None
        limit_mw = _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        processes = [
            *(_ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []),
            *(_ask(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle) or []),
        ]
        return GpuState(
            sm_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            temperature_c=_ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            throttle_reasons=hex(reasons) if reasons is not None else None,
            energy_mj=_ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle),
            process_ids=tuple(sorted({int(process.pid) for process in processes})),
            slowed_by=tuple(text for bit, text in _SLOWED.items() if reasons is not None and reasons & bit),
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
