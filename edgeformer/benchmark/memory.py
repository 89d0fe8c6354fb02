"""Memory that an artifact adds to a process: peak resident memory above a baseline, and GPU memory.

GPU memory has several figures, of which each platform provides some. ``ru_maxrss`` is not used: on Linux a child
process inherits its parent's peak through fork.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from edgeformer.artifacts.report import Memory
from edgeformer.system import nvidia
from edgeformer.system.memory import release_heap

_POLL_S = 0.010

PROCESS, CARD, SYSTEM = "process (NVML)", "card (NVML)", "system"
_METHODS = {  # the most exact one first
    PROCESS: "GPU memory of the process (NVML), CUDA's context included, at the end",
    CARD: "memory of the whole card (NVML), at the end minus before; other programs' changes count too",
    SYSTEM: "memory of the whole system, at the end minus before: GPU and processor share it, and NVML has no figure; "
    "other programs' changes count too",
}


class PolledPeak:
    """Peak memory of this process since :meth:`reset`: a thread reads it every 10 ms; shorter peaks are missed."""

    method = "highest resident memory seen, asked every 10 ms"

    def __init__(self) -> None:
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reset(self) -> bool:
        """Start over. False: this system cannot, and the peak remains that of the whole process."""
        self._peak = 0
        return True

    def peak_bytes(self) -> int:
        """Return the highest resident memory."""
        self._peak = max(self._peak, resident_bytes())
        return self._peak

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self.peak_bytes()


class SystemPeak:
    """The peak that the system keeps: Linux, where a process may reset it (except in some containers), and Windows."""

    def __init__(self, proc: Path | None = Path("/proc/self")) -> None:
        """``proc``: of this process; None: on Windows."""
        self._proc = proc
        self.method = "peak resident memory kept by the kernel (VmHWM)" if proc else "peak working set kept by Windows"

    def reset(self) -> bool:
        """Start over; see :meth:`PolledPeak.reset`."""
        if self._proc is None:
            return False
        try:
            (self._proc / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """Return the highest resident memory. Raises OSError if the kernel does not report it."""
        if self._proc is None:
            return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
        for line in (self._proc / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._proc}/status has no VmHWM")

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


PeakMeter = PolledPeak | SystemPeak


def peak_meter() -> PeakMeter:
    """Return the best meter of this system."""
    meter = SystemPeak(None) if sys.platform == "win32" else SystemPeak()
    try:
        meter.peak_bytes()
    except OSError:
        return PolledPeak()
    return meter


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def memory_above(meter: PeakMeter, baseline_bytes: int, since_reset: bool) -> Memory:
    """Return the peak above the baseline."""
    method = meter.method + ("" if since_reset else ", over all shapes so far: this system cannot reset it")
    peak = max(0, meter.peak_bytes() - baseline_bytes)
    return Memory(status="measured", peak=peak, baseline=baseline_bytes, method=method)


def release_unused() -> None:
    """Return freed memory to the system, so that one shape's memory is not counted with the next one's."""
    gc.collect()
    release_heap()


def gpu_memory_in_use(uuid: str | None) -> dict[str, int]:
    """Return what all programs use on the card, by the name of the figure; ``uuid`` of the card, if NVML knows one."""
    if nvidia.shares_system_memory():
        memory = psutil.virtual_memory()
        return {SYSTEM: int(memory.total - memory.available)}
    used_bytes = nvidia.card_used_bytes(uuid) if uuid is not None else None
    return {CARD: used_bytes} if used_bytes is not None else {}


def gpu_memory_by_name(uuid: str | None, initial: Mapping[str, int]) -> dict[str, int]:
    """Return the memory added since ``initial`` (of :func:`gpu_memory_in_use`), by name; the most exact one first."""
    growth = {name: max(0, used - initial[name]) for name, used in gpu_memory_in_use(uuid).items() if name in initial}
    by_name = {PROCESS: nvidia.process_memory_bytes(os.getpid()), **growth}
    return {name: value for name, value in by_name.items() if value}


def gpu_memory_of_process(uuid: str | None) -> Memory:
    """Return what this process alone holds on the card while another process is measured as well.

    `unavailable` if NVML does not report memory per process.
    """
    by_name = gpu_memory_by_name(uuid, {})
    if by_name:
        return gpu_memory(uuid, {}, by_name)
    reason = "another process is measured at the same time, and NVML does not tell the two apart here"
    return Memory(status="unavailable", reason=reason)


def gpu_memory(uuid: str | None, initial: Mapping[str, int], by_name: Mapping[str, int]) -> Memory:
    """Return the best figure as a measurement; `unavailable` if there is none.

    Args:
        uuid: of the card, if NVML knows one.
        initial: of :func:`gpu_memory_in_use`, before anything was opened.
        by_name: of :func:`gpu_memory_by_name`.
    """
    is_hidden = uuid is not None and PROCESS not in by_name and nvidia.uses_wddm(uuid)
    note = "Windows' WDDM driver model hides the memory of single processes"
    for name, method in _METHODS.items():
        if name in by_name:
            method = f"{method} ({note})" if is_hidden else method
            return Memory(status="measured", peak=by_name[name], baseline=initial.get(name, 0), method=method)
    reason = (
        "neither NVML nor the system reports the memory on the GPU (without NVML nothing does; inside a container "
        "the driver may know this process by another number)"
    )
    if is_hidden:
        reason = f"{note}, and NVML has no figure for the card"
    return Memory(status="unavailable", reason=reason)
