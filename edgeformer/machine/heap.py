"""The heap of glibc: whether memory that was freed stays with the process, or goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt(3)."""
_MOST = 2**31 - 1
_USUAL_MMAP = 32 * 2**20
"""Up to here glibc raises its threshold by itself; that of trimming is twice as much."""


@contextmanager
def kept() -> Iterator[None]:
    """What is freed is used again, and the system gets it back at the end.

    Left to itself glibc gives large blocks back at once: the gradient of a table of embeddings is then made of new
    pages in every step, each of which the system fills with zeros first. Elsewhere than with glibc nothing is changed,
    and little in other threads than the first: their heaps end at 64 MiB.
    """
    changed = _set(_MOST, _MOST)
    try:
        yield
    finally:
        if changed:
            _set(_USUAL_MMAP, 2 * _USUAL_MMAP)
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
