"""Child of floors.py: what torch reaches at this moment, with pinned threads: THREADS ROWS WIDTH.

A request is answered by operations per second of one large product in ``fp32`` and ``bf16``, and by ``bandwidth``:
bytes per second of a copy, or of reading a matrix once for a product with a vector, whichever is more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.ways import serve

_LARGE = 1 << 13
"""Rows and columns of a matrix that no cache holds: 256 MiB."""


def rate(amount: float, call: Callable[[], object]) -> float:
    """So much per second, by the fastest of three calls after one that warms up."""
    call()
    results = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        results.append(time.perf_counter() - began)
    return amount / min(results)


def answering(threads: int, rows: int, width: int) -> Callable[[object], dict[str, float]]:
    """What answers requests."""
    torch.set_num_threads(threads)
    remaining, right = torch.randn(rows, width), torch.randn(width, width)
    half = remaining.bfloat16(), right.bfloat16()
    source, target, vector = torch.ones(_LARGE, _LARGE), torch.empty(_LARGE, _LARGE), torch.ones(_LARGE)
    size, operations = source.nbytes, 2 * rows * width * width

    def answer(_: object) -> dict[str, float]:
        moved = rate(2 * size, partial(target.copy_, source)), rate(size, partial(torch.mv, source, vector))
        products = {"fp32": partial(torch.mm, remaining, right), "bf16": partial(torch.mm, *half)}
        return {**{name: rate(operations, call) for name, call in products.items()}, "bandwidth": max(moved)}

    return answer


if __name__ == "__main__":
    serve("torch", lambda: answering(*map(int, sys.argv[1:])))
