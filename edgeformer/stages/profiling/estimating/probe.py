"""What this host can do: rates of matrix products, memory and operators, with graphs of its own."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode, Feed, ProfiledGraph
from edgeformer.backends.onnxruntime.providers import CPU
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Array
from edgeformer.stages.profiling.estimating.messages import Probed, ProductTime
from edgeformer.stages.profiling.estimating.probe_graphs import add_chain, matmul_chain

# (width, different weights): 0.25 MiB to 96 MiB of weights, from what every cache holds to what few do.
_CHAINS = ((256, 4), (384, 8), (512, 8), (1024, 1), (1024, 4), (1024, 24))
_ROWS = (1, 4, 16, 64, 256)
_PEAK_ROWS = 512
_CALLS = 12
# 3 × 64 MiB are read and written: more than the last-level cache of any device that profiles know.
_LARGE = 1 << 24
# The difference of two chains is operators alone, without what a call costs, and without the profiler.
_SHORT_CHAIN, _LONG_CHAIN, _CHAIN_CALLS = 32, 288, 200
_LEAST_OPERATOR_US = 0.05


def probe(threads: int) -> Probed:
    """Time chains of products, sums of large tensors, and sums of single numbers; about ten seconds."""
    with tempfile.TemporaryDirectory(prefix="edgeformer-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        products = [one for width, weights in _CHAINS for one in _products(file, width, weights, threads)]
        file.write_bytes(add_chain(_LARGE, 2))
        large = _run(file, threads, np.ones(_LARGE, np.float32), 6)
        short_us, long_us = (_chain_us(file, nodes, threads) for nodes in (_SHORT_CHAIN, _LONG_CHAIN))
    return Probed(
        products=tuple(products),
        bandwidth=3 * 4 * _LARGE / (min(node.duration_us for node in large) * 1e-6),
        operator_us=max(_LEAST_OPERATOR_US, (long_us - short_us) / (_LONG_CHAIN - _SHORT_CHAIN)),
    )


def _products(file: Path, width: int, weights: int, threads: int) -> list[ProductTime]:
    file.write_bytes(matmul_chain(width, weights))
    draw = np.random.default_rng(0)
    rows = (*_ROWS, _PEAK_ROWS) if weights == 1 else _ROWS
    feeds = [Feed({"x": draw.normal(size=(count, width)).astype(np.float32)}, _CALLS) for count in rows]
    listed = ProfiledGraph(file, threads, prepacked=True).list_nodes(feeds)
    return [
        ProductTime(rows=count, width=width, weights=weights, duration_us=_mean_us(nodes))
        for count, nodes in zip(rows, listed, strict=True)
    ]


def _mean_us(nodes: tuple[ExecutedNode, ...]) -> float:
    return float(np.mean([node.duration_us for node in nodes]))


def _run(file: Path, threads: int, x: Array, calls: int) -> tuple[ExecutedNode, ...]:
    return ProfiledGraph(file, threads, prepacked=True).list_nodes([Feed({"x": x}, calls)])[0]


def _chain_us(file: Path, nodes: int, threads: int) -> float:
    """Microseconds of a call of a chain of ``nodes`` sums of two numbers: the fastest tenth of some calls."""
    file.write_bytes(add_chain(1, nodes))
    x = {"x": np.ones(1, np.float32)}
    times: list[int] = []
    with contextlib.closing(OnnxSession(file, CPU, threads)) as session:
        for _ in range(_CHAIN_CALLS):
            began = time.perf_counter_ns()
            session.run(x)
            times.append(time.perf_counter_ns() - began)
    return float(np.quantile(times, 0.1)) / 1000
