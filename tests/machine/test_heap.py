"""Memory that was freed stays with the process while it is asked to, and goes back afterwards."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

_BYTES, _TIMES = 64 * 2**20, 8
_PAGES = _BYTES // 4096

PROGRAM = f"""
import json, resource
import psutil
from edgeformer.machine.heap import give_back, kept

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({_TIMES}):
        len(b"x" * {_BYTES})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return psutil.Process().memory_info().rss

give_back()
found = {{"before": new_pages()}}
with kept():
    found["kept"], held = new_pages(), resident()
found["given back"], found["after"] = held - resident(), new_pages()
try:
    with kept():
        raise ZeroDivisionError
except ZeroDivisionError:
    found["after a failure"] = new_pages()
print(json.dumps(found))
"""
"""In a process of its own: in another thread than the first, where workers run tests, glibc has small heaps."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its C library is not glibc")
def test_large_blocks_are_made_of_the_same_pages_again() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    found = json.loads(ended.stdout)
    assert found["kept"] < 1.5 * _PAGES
    assert found["given back"] > 0.9 * _BYTES
    for when in ("before", "after", "after a failure"):
        assert found[when] > 0.9 * _TIMES * _PAGES, when
