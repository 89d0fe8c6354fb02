"""How much memory this process may still take."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_free_bytes() -> tuple[int, str]:
    """Bytes, and of what: this host, or less, where the process's control group is limited."""
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
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return None
    left: list[int] = []
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
                cached = 0  # files that the kernel counts as used, and gives up for a process that asks
                with contextlib.suppress(OSError):
                    counted = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                    cached = int(dict(row.split() for row in counted).get(names[2], 0))
                left.append(limit - used + cached)
    return max(0, min(left)) if left else None


# Memory that a training's process keeps between steps: freed heap, and oneDNN's primitives.


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt(3)."""
_MOST = 2**31 - 1
OWN_PAGES = 32 * 2**20
"""Bytes from which on a block's pages are its own, and go back with it. glibc raises its threshold up to here by
itself, and leaves twice as much free at the end of the heap."""

_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""How many oneDNN keeps, and PyTorch of it; both keep 1,024 by themselves. With 16, which a single step may need, steps
took a tenth longer than with 64."""
_SHORT = 4096
"""Up to so many tokens of a batch, making primitives again is a twelfth of a step; from twice as many, a hundredth."""


@contextmanager
def kept(tokens: int) -> Iterator[None]:
    """Memory is used again from step to step, and the system gets it back at the end.

    Left to itself glibc gives the end of the heap back whenever a step's tensors are freed: the next step's are made of
    new pages, each of which the system fills with zeros first. The largest blocks are left alone: kept as well, they
    leave gaps that nothing fits into. Elsewhere than with glibc nothing is changed, and little in other threads than
    the first: their heaps end at 64 MiB.

    Products in bfloat16 are oneDNN's, which makes primitives for every length of a batch, 7 MiB for a step's, and keeps
    them. What it keeps of one length lies in the gaps where tensors of the next would fit: with a hundred lengths a
    training that began with 3 GiB ended with 7. So few are kept, unless the environment says how many; where batches
    are small, memory is not the question, and all are kept. It holds from the process's first such product on.

    Args:
        tokens: of the longest batch.
    """
    changed = _set(OWN_PAGES, _MOST)
    few = {} if tokens <= _SHORT else {name: most for name, most in _PRIMITIVES.items() if name not in os.environ}
    os.environ.update(few)
    try:
        yield
    finally:
        for name in few:
            del os.environ[name]
        if changed:
            _set(OWN_PAGES, 2 * OWN_PAGES)
            give_back()


def give_back() -> None:
    """Give freed memory back to the system, where glibc has it."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _set(mmap_threshold: int, trim_threshold: int) -> bool:
    """Whether glibc took both: sizes from which a block has pages of its own, and a freed end is given back."""
    mallopt = _glibc("mallopt")
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, mmap_threshold) and mallopt(_TRIM_THRESHOLD, trim_threshold)
    )


def _glibc(name: str) -> Any:
    """A function of this process's C library that only glibc has; None: it is another library."""
    if sys.platform != "linux":
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
