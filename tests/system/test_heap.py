"""What a process keeps while it is asked to: memory that was freed goes back afterwards, and primitives stay few."""

import json
import platform
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its C library is not glibc")
_BYTES, _TIMES = 96 * 2**20, 8
_PAGES = _BYTES // 4096

PROGRAM = f"""
import json, resource
import psutil
from edgeformer.system.memory import keep_heap, release_heap

def new_pages():
    previous = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({_TIMES}):
        len([b"x" * ({_BYTES} // 4) for _ in range(4)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - previous

def resident():
    return psutil.Process().memory_info().rss

release_heap()
result = {{"before": new_pages()}}
with keep_heap(1):
    result["kept"], resident_kept = new_pages(), resident()
result["given back"], result["after"] = resident_kept - resident(), new_pages()
try:
    with keep_heap(1):
        raise ZeroDivisionError
except ZeroDivisionError:
    result["after a failure"] = new_pages()
print(json.dumps(result))
"""
"""In a process of its own: in another thread than the first, where workers run tests, glibc has small heaps."""
PRODUCTS = """
import ctypes, json, os, sys
import torch
from edgeformer.system.memory import keep_heap

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h hblkhd u f uordblks fordblks keepcost".split()]

count = ctypes.CDLL(None).mallinfo2
count.restype = Heap
layer = torch.nn.Linear(64, 64)

def in_use():
    return count().uordblks

def train(rows):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(torch.ones(rows, 64, requires_grad=True))
    outputs.float().sum().backward()
    layer.zero_grad()

environment = dict(os.environ)
with keep_heap(int(sys.argv[1])):
    inside = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    for rows in range(64, 104):
        train(rows)
    first = in_use()
    for rows in range(104, 144):
        train(rows)
    grew = in_use() - first
print(json.dumps({"grew": grew, "inside": inside, "restored": dict(os.environ) == environment}))
"""


def test_large_blocks_are_made_of_the_same_pages_again() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    result = json.loads(ended.stdout)
    assert result["kept"] < 1.5 * _PAGES
    assert result["given back"] > 0.9 * _BYTES
    for when in ("before", "after", "after a failure"):
        assert result[when] > _TIMES / 2 * _PAGES, when


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN does not multiply in bfloat16 on this processor"
)
def test_what_onednn_keeps_of_every_length_does_not_pile_up() -> None:
    """Forty lengths of one layer are 70 MiB of primitives; of long batches those of the last few are kept."""
    grown = []
    for tokens, is_limited in ((4096, False), (8192, True)):
        command = [sys.executable, "-c", PRODUCTS, str(tokens)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert result["restored"] and (result["inside"] is not None) is is_limited
        grown.append(result["grew"])
    assert grown[0] > 20 * 2**20 > 5 * 2**20 > grown[1]
