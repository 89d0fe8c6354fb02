"""Memory of the machine that trains: what is free, the peak so far, and whether it ran out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
            # No such group, or "max" for no limit.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names[:2])
                yield limit, used - _reclaimable(folder, names[2])


def _reclaimable(folder: Path, key: str) -> int:
    """Cached files that the kernel counts as used, and gives up for a process that asks."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return int(dict(line.split() for line in lines).get(key, 0))


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
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
