"""Memory of the machine that trains: what is free, the peak so far, and going on after it ran out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def free_bytes(device_kind: str) -> tuple[int, str]:
    """Bytes, and of what: the current CUDA card, or this host (less, where its control group is limited)."""
    if device_kind == "cuda":
        name = torch.cuda.get_device_name()
        return int(torch.cuda.mem_get_info()[0]), f"free on {name} now"
    free, what = int(psutil.virtual_memory().available), "available on this host now"
    limited = group_free_bytes(_GROUPS, _MEMBERSHIP)
    if limited is not None and limited < free:
        return limited, "left in this process's memory limit (cgroup) now"
    return free, what


def group_free_bytes(groups: Path, membership: Path) -> int | None:
    """What the limits of a process's control groups leave, version 1 or 2; None without a limit.

    Args:
        groups: where the kernel mounts the groups.
        membership: the process's ``/proc/…/cgroup``.
    """
    left = [limit - used for limit, used in _limits(groups, membership)]
    return max(0, min(left)) if left else None


def _limits(groups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        # Every group on the way up may have a limit; inside a container the path may lead nowhere, its root does not.
        for folder in (group, *(parent for parent in group.parents if parent == root or root in parent.parents)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _reclaimable(folder, names[2])


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _reclaimable(folder: Path, key: str) -> int:
    """Cached files that the kernel counts as used, and gives up for a process that asks."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [int(value) for name, value in (line.split() for line in lines) if name == key]
    return found[0] if found else 0


def reset_peak(device_type: str) -> None:
    """Begin a new peak where the system can (CUDA's allocator); a process's resident peak only ever grows."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def measured_peak(device_type: str) -> tuple[int | None, str]:
    """Bytes, and what they are."""
    if device_type == "cuda":
        return int(torch.cuda.max_memory_allocated()), "peak of torch's CUDA allocator, without context and cache"
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset), "peak working set of the whole process"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, "peak resident set of the whole process, libraries and data included"


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the one of torch's CPU allocator, which is a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


@dataclass(frozen=True)
class RandomState:
    """torch's random generators at the start of a step, so that its repetition draws the same numbers."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """The current state."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Put it back, and give cached memory back to the device."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
            torch.cuda.empty_cache()
