"""Memory that was freed stays with the process while it is asked to, and goes back afterwards."""

from __future__ import annotations

import platform

import psutil
import pytest

from edgeformer.machine.heap import give_back, kept

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its C library is not glibc")
_BYTES, _TIMES = 64 * 2**20, 8
_PAGES = _BYTES // 4096


def new_pages() -> int:
    """Pages that the system made while a large block was made and freed, again and again."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_TIMES):
        len(b"x" * _BYTES)
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_large_blocks_are_made_of_the_same_pages_again() -> None:
    give_back()
    assert new_pages() > 0.9 * _TIMES * _PAGES
    with kept():
        assert new_pages() < 1.5 * _PAGES
        before = psutil.Process().memory_info().rss
    assert before - psutil.Process().memory_info().rss > 0.9 * _BYTES
    assert new_pages() > 0.9 * _TIMES * _PAGES


def test_what_fails_inside_changes_nothing_for_later() -> None:
    with pytest.raises(ZeroDivisionError), kept():
        raise ZeroDivisionError
    assert new_pages() > 0.9 * _TIMES * _PAGES
