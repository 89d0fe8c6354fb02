"""What an artifact adds to a process: its peak resident memory minus that with nothing opened, and GPU memory, which
has several names, of which each platform tells others.

``ru_maxrss`` is not used: on Linux a child process inherits its parent's peak through fork.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import psutil

from edgeformer.artifacts.report import Memory
from edgeformer.system import nvidia
from edgeformer.system.memory import give_back

_POLL_S = 0.010

PROCESS, CARD, SYSTEM = "process (NVML)", "card (NVML)", "system"
_METHODS = {
    PROCESS: "GPU memory of the process (NVML), CUDA's context included, at the end",
    CARD: "memory of the whole card (NVML), at the end minus before; other programs' changes count too",
    SYSTEM: "memory of the whole system, at the end minus before: GPU and processor share it, and NVML has no figure; "
    "other programs' changes count too",
}
_NOBODY_SAYS = (
    "neither NVML nor the system tells the memory on the GPU (without NVML nothing does, and inside a container the "
    "driver may know this process by another number)"
)


class PeakMeter(ABC):
    """Peak memory of this process since :meth:`reset`."""

    method: str

    def reset(self) -> bool:
        """Start over. False: this system cannot, the peak stays that of the whole process."""
        return False

    @abstractmethod
    def peak_bytes(self) -> int:
        """The highest resident memory seen."""

    def close(self) -> None:  # noqa: B027 - most have nothing to stop
        """Stop watching."""


class KernelPeak(PeakMeter):
    """Linux: the kernel keeps the peak (VmHWM) and lets a process reset its own, but in some containers."""

    method = "peak resident memory kept by the kernel (VmHWM)"

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """VmHWM. Raises OSError where the kernel does not say."""
        for line in (self._proc / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._proc}/status has no VmHWM")


class WindowsPeak(PeakMeter):
    """Windows keeps the peak working set of a process since it began; it cannot be reset."""

    method = "peak working set kept by Windows"

    def peak_bytes(self) -> int:
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))


class PolledPeak(PeakMeter):
    """Elsewhere: resident memory asked for every 10 ms by a thread; shorter peaks are missed."""

    method = "highest resident memory seen, asked every 10 ms"

    def __init__(self) -> None:
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reset(self) -> bool:
        self._peak = 0
        return True

    def peak_bytes(self) -> int:
        self._peak = max(self._peak, resident_bytes())
        return self._peak

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self.peak_bytes()


def peak_meter() -> PeakMeter:
    """The best meter that this system has."""
    if sys.platform == "win32":
        return WindowsPeak()
    kernel = KernelPeak()
    try:
        kernel.peak_bytes()
    except OSError:
        return PolledPeak()
    return kernel


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def added(meter: PeakMeter, baseline_bytes: int, since_reset: bool) -> Memory:
    """The peak above the baseline.

    Args:
        meter: what watched.
        baseline_bytes: resident memory with the runtime imported and nothing opened.
        since_reset: False where earlier shapes of the same process are part of the peak.
    """
    method = meter.method + ("" if since_reset else ", over all shapes so far: this system cannot reset it")
    peak = max(0, meter.peak_bytes() - baseline_bytes)
    return Memory(status="measured", peak=peak, baseline=baseline_bytes, method=method)


def release_unused() -> None:
    """Give freed memory back to the system, so that one shape's memory is not counted with the next one's."""
    gc.collect()
    give_back()


def gpu_memory_in_use(uuid: str | None) -> dict[str, int]:
    """What all programs use on the card, by the name of what tells it; ``uuid``: of the card, where NVML knows one."""
    if nvidia.shares_system_memory():
        memory = psutil.virtual_memory()
        return {SYSTEM: int(memory.total - memory.available)}
    used = nvidia.card_used_bytes(uuid) if uuid is not None else None
    return {CARD: used} if used is not None else {}


def gpu_memory_by_name(uuid: str | None, before: Mapping[str, int]) -> dict[str, int]:
    """What has been added since ``before``, by the name of what tells it; the most exact one first.

    Args:
        uuid: of the card, where NVML knows one.
        before: :func:`gpu_memory_in_use` before the first artifact was opened.
    """
    added = {name: max(0, used - before[name]) for name, used in gpu_memory_in_use(uuid).items() if name in before}
    found = {PROCESS: nvidia.process_memory_bytes(os.getpid()), **added}
    return {name: value for name, value in found.items() if value}


def gpu_memory_of_process(uuid: str | None) -> Memory:
    """What this process alone holds on the card, where another one is measured at the same time, whose memory would be
    part of every other figure; `unavailable` where NVML tells no single process's.

    Args:
        uuid: of the card, where NVML knows one.
    """
    found = gpu_memory_by_name(uuid, {})
    if found:
        return gpu_memory(uuid, {}, found)
    why = "another process is measured at the same time, and NVML does not tell the two apart here"
    return Memory(status="unavailable", reason=why)


def gpu_memory(uuid: str | None, before: Mapping[str, int], found: Mapping[str, int]) -> Memory:
    """The best figure as a measurement; `unavailable` where nothing tells one.

    Args:
        uuid: of the card, where NVML knows one.
        before: :func:`gpu_memory_in_use` before anything was opened.
        found: as :func:`gpu_memory_by_name` gives it.
    """
    hidden = uuid is not None and PROCESS not in found and nvidia.uses_wddm(uuid)
    note = "Windows' WDDM driver model hides the memory of single processes"
    for name, method in _METHODS.items():
        if name in found:
            said = f"{method} ({note})" if hidden else method
            return Memory(status="measured", peak=found[name], baseline=before.get(name, 0), method=said)
    why = f"{note}, and NVML has no figure for the card" if hidden else _NOBODY_SAYS
    return Memory(status="unavailable", reason=why)
