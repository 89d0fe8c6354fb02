"""Free memory of this host and process, and heap settings for training."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_free_bytes() -> tuple[int, str]:
    """Return free bytes and their description: of this host, or of the process's control groups if they leave less."""
    free = int(psutil.virtual_memory().available)
    lines: list[str] = []
    with contextlib.suppress(OSError):  # not Linux
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    group_free = [free]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        # Every ancestor may have a limit. Inside a container the path may not exist, but its root does.
        for folder in (group, *(parent for parent in group.parents if parent == root or root in parent.parents)):
            # No such group, or "max" for no limit.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names[:2])
                cached = 0  # page cache, which counts as used but is reclaimable
                with contextlib.suppress(OSError):
                    counters = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                    cached = int(dict(row.split() for row in counters).get(names[2], 0))
                group_free.append(limit - used + cached)
    if min(group_free) < free:
        return max(0, min(group_free)), "left in this process's memory limit (cgroup) now"
    return free, "available on this host now"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_NEVER = 2**31 - 1
OWN_PAGES = 32 * 2**20
"""Minimum size in bytes of blocks with their own pages, which are released with them. glibc raises its own threshold
up to this size, and keeps twice as much free at the end of the heap."""

_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Cache sizes of oneDNN and PyTorch primitives (default 1,024). With 16, steps took a tenth longer than with 64."""
_SMALL_BATCH_TOKENS = 4096
"""Up to this batch size creating primitives takes a twelfth of a step; at twice the size, a hundredth."""


@contextmanager
def keep_heap(tokens: int) -> Iterator[None]:
    """Reuse freed heap memory from step to step, and return it to the system at the end.

    By default glibc returns the end of the heap whenever a step's tensors are freed, and the next step starts with new
    pages that the system must clear first. The largest blocks are excluded: kept, they would leave gaps. No effect
    without glibc, and little in other threads than the first, whose heaps end at 64 MiB.

    bfloat16 products use oneDNN, which caches primitives per batch length (7 MiB per step) in gaps that the next
    length's tensors would need: with a hundred lengths a training grew from 3 to 7 GiB. For large batches the caches
    are therefore limited, unless the environment sets their size. This holds from the process's first such product.
    ``tokens``: of the longest batch.
    """
    # 1 if glibc accepts the size of blocks with their own pages, and the size of free memory that is trimmed.
    changed = _call_glibc("mallopt", _MMAP_THRESHOLD, OWN_PAGES) and _call_glibc("mallopt", _TRIM_THRESHOLD, _NEVER)
    limits: dict[str, str] = {}
    if tokens > _SMALL_BATCH_TOKENS:
        limits = {name: size for name, size in _PRIMITIVES.items() if name not in os.environ}
    os.environ.update(limits)
    try:
        yield
    finally:
        for name in limits:
            del os.environ[name]
        if changed:
            _call_glibc("mallopt", _TRIM_THRESHOLD, 2 * OWN_PAGES)
            release_heap()


def release_heap() -> None:
    """Return freed heap memory to the system (glibc only)."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> int:
    """Call a function of glibc; 0 with another C library."""
    if sys.platform != "linux":
        return 0
    try:
        return int(getattr(ctypes.CDLL(None), name)(*arguments))
    except (OSError, AttributeError):
        return 0
