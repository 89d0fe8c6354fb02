"""What an artifact adds to a process: its peak resident memory minus that with nothing opened.

``ru_maxrss`` is not used: on Linux a child process inherits its parent's peak through fork.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import Protocol

import psutil

from edgeformer.formats.report import Memory

_POLL_S = 0.010


class PeakMeter(Protocol):
    """Peak memory of this process since :meth:`reset`."""

    method: str

    def reset(self) -> bool:
        """Start over. False: this system cannot, the peak stays that of the whole process."""
        ...

    def peak_bytes(self) -> int:
        """The highest resident memory seen."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class KernelPeak:
    """Linux: the kernel keeps the peak (VmHWM) and lets a process reset its own."""

    method = "peak resident memory kept by the kernel (VmHWM)"

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> bool:
        """Ask the kernel to forget the peak; refused in some containers."""
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

    def close(self) -> None:
        """Nothing to stop."""


class WindowsPeak:
    """Windows keeps the peak working set of a process; it cannot be reset."""

    method = "peak working set kept by Windows"

    def reset(self) -> bool:
        """Not possible."""
        return False

    def peak_bytes(self) -> int:
        """The peak working set since the process began."""
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))

    def close(self) -> None:
        """Nothing to stop."""


class PolledPeak:
    """Elsewhere: resident memory asked for every 10 ms by a thread; shorter peaks are missed."""

    method = "highest resident memory seen, asked every 10 ms"

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reset(self) -> bool:
        """Forget the peak."""
        self._peak = 0
        return True

    def peak_bytes(self) -> int:
        """The highest value seen, the present one included."""
        self._peak = max(self._peak, self._process.memory_info().rss)
        return self._peak

    def close(self) -> None:
        """Stop the thread."""
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
    method = meter.method
    if not since_reset:
        method += ", over all shapes so far: this system cannot reset it"
    return Memory(
        status="measured",
        peak=max(0, meter.peak_bytes() - baseline_bytes),
        baseline=baseline_bytes,
        method=method,
    )


def release_unused() -> None:
    """Give freed memory back to the system, so that one shape's memory is not counted with the next one's."""
    gc.collect()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # not glibc
            return
