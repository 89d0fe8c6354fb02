"""Keep freed memory in the process during CPU training: a setting of the whole process, so its owner asks for it."""

from __future__ import annotations

import ctypes
import sys

# malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Ask glibc to reuse large blocks instead of returning them to the system; False where there is no glibc.

    By default every tensor above 32 MiB (the embedding table's gradient, each step) is mapped and unmapped anew,
    and each of its pages faults. benchmarks/cpu_training_allocator.py measures what this is worth.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
