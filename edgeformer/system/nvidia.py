"""NVIDIA cards and their state, read through NVML without CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.system.host import board_names

_WDDM = 0  # NVML_DRIVER_WDDM
_CLOCK_SM, _CLOCK_MEM, _TEMPERATURE_GPU = 1, 2, 0
# nvml.h, nvmlClocksEventReasons: only reasons for throttling, not idle and application clocks.
_SLOWED = {
    0x04: "power limit", 0x08: "hardware slowdown (heat or power)", 0x20: "heat (software)", 0x40: "heat (hardware)",
    0x80: "external power brake",
}  # fmt: skip


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
    """State of one card at one moment. Values that the platform does not report are None.

    ``slowed_by``: reasons for throttled clocks. ``process_ids``: compute and graphics processes.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_limit_w: float | None
    throttle_reasons: str | None
    energy_mj: int | None
    process_ids: tuple[int, ...]
    slowed_by: tuple[str, ...] = ()


Ask = Callable[..., Any]
"""One NVML function by name with its arguments; None where this card, platform or driver does not support it."""


def gpus() -> list[Gpu]:
    """Return the cards that NVML lists; empty without cards, or where NVML is not installed or does not start."""
    cards = []
    with _nvml() as ask:
        for index in range(int(ask("nvmlDeviceGetCount") or 0)):
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
            name, uuid = ask("nvmlDeviceGetName", handle) or "unknown NVIDIA card", ask("nvmlDeviceGetUUID", handle)
            memory_bytes = int(memory.total) if memory is not None else None
            version = ".".join(map(str, capability)) if capability is not None else None
            cards.append(Gpu(index, str(name), str(uuid or ""), memory_bytes, version))
    return cards


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; None without NVML."""
    with _nvml() as ask:
        version = ask("nvmlSystemGetDriverVersion")
        return str(version) if version is not None else None


def process_memory_bytes(pid: int) -> int | None:
    """Return the GPU memory of a process on all cards.

    None if NVML does not report it: with Windows' WDDM driver, on Jetsons, and in containers where the driver sees
    another process id.
    """
    with _nvml() as ask:
        handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(int(ask("nvmlDeviceGetCount") or 0))]
        lists = [ask("nvmlDeviceGetComputeRunningProcesses", card) or [] for card in handles if card is not None]
    readings = [process.usedGpuMemory for processes in lists for process in processes if process.pid == pid]
    sizes = [int(used) for used in readings if used is not None]
    return sum(sizes) if sizes else None


def card_used_bytes(uuid: str) -> int | None:
    """Return the memory in use on one card by all processes; None without NVML or with shared system memory."""
    with _nvml(uuid) as ask:
        memory = ask("nvmlDeviceGetMemoryInfo")
        return int(memory.used) if memory is not None else None


def uses_wddm(uuid: str) -> bool:
    """Return whether Windows' WDDM driver model manages the card's memory.

    WDDM hides the memory of processes, and moves what does not fit to system memory.
    """
    with _nvml(uuid) as ask:
        model = ask("nvmlDeviceGetCurrentDriverModel")
        if model is None:  # a driver without the function's version 2
            model, _ = ask("nvmlDeviceGetDriverModel_v1") or (None, None)
        return bool(model == _WDDM)


def shares_system_memory(root: Path = Path("/")) -> bool:
    """Return whether this is a Jetson, whose GPU shares the system memory and whose NVML reports none."""
    return any(name.startswith("nvidia,tegra") for name in board_names(root))


def state(uuid: str) -> GpuState | None:
    """Return clocks, temperature, limits, energy counter and processes of one card; None without NVML."""
    with _nvml(uuid) as ask:
        if ask("nvmlDeviceGetUUID") is None:
            return None
        limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit")
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        return GpuState(
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            memory_clock_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_MEM),
            temperature_c=ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            throttle_reasons=hex(reasons) if reasons is not None else None,
            energy_mj=ask("nvmlDeviceGetTotalEnergyConsumption"),
            process_ids=tuple(sorted({int(process.pid) for kind in kinds for process in ask(kind) or []})),
            slowed_by=tuple(text for bit, text in _SLOWED.items() if reasons is not None and reasons & bit),
        )


@contextmanager
def _nvml(uuid: str | None = None) -> Iterator[Ask]:
    """Initialise NVML; with ``uuid`` for the functions of one card. All answers are None without NVML or that card."""
    import pynvml

    handles: list[Any] | None = []

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(*handles, *arguments) if handles is not None else None
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError):
            return None

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        handles = None
        yield ask
        return
    try:
        if uuid is not None:
            handle = ask("nvmlDeviceGetHandleByUUID", uuid)
            handles = [handle] if handle is not None else None
        yield ask
    finally:
        pynvml.nvmlShutdown()
