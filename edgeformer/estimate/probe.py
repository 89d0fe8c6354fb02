"""What this host can do: rates of matrix products, memory and operators, with graphs of its own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Speed
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.benchmark.conditions import read_cpu
from edgeformer.benchmark.process import End, Job, Send, run_job
from edgeformer.estimate.speed_probe import Reference, add_chain, between, matmul_chain
from edgeformer.estimate.timing import beside, time_calls
from edgeformer.runtimes import default_provider
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph
from edgeformer.system.memory import host_free_bytes

# (width, different weights): 1 MiB to 192 MiB of weights, from what every cache holds to what few do, and closest where
# most caches end.
_CHAINS = (
    (256, 4), (384, 8), (512, 8), (1024, 1), (1024, 3), (1024, 4), (1024, 5), (1024, 7), (1024, 10), (1024, 24),
    (1024, 48),
)  # fmt: skip
# Of a chain's weights in memory, while it is built, read and packed: 4.1 at the peak of the longest one.
_COPIES = 5
_ROWS = (1, 4, 16, 64, 256)
_PEAK_ROWS = 512
_CALLS = 12
# 3 × 64 MiB are read and written: more than the last-level cache of any device that profiles know.
_LARGE = 1 << 24
# The difference of two chains is operators alone, without what a call costs, and without the profiler.
_SHORT_CHAIN, _LONG_CHAIN, _CHAIN_CALLS = 32, 288, 200
_LEAST_OPERATOR_US = 0.05
# Beyond this the child hangs.
_LONGEST_S = 600.0
_TRIES = 2


class ProbeSpec(Job):
    """Measure what this host can do."""

    name, answers = "probing", "rates"
    kind: Literal["probe"] = "probe"


class ProductTime(Frozen):
    """[rows, width] × [width, width], one of several different weights used in turn."""

    rows: int
    width: int
    weights: int
    duration_us: float
    speed: Speed | None = Field(None, description="of the machine around it; None: not measured")


class HostRates(Frozen):
    """What the host can do."""

    kind: Literal["rates"] = "rates"
    products: tuple[ProductTime, ...] = Field(strict=False)
    bandwidth: float = Field(description="bytes per second, summing tensors that no cache holds")
    operator_us: float = Field(description="from one operator to the next, doing next to nothing")
    call_us: float = Field(0.0, description="of a call, beside its operators")
    disturbed: str | None = Field(None, description="what else used the machine meanwhile, where that was too much")


_MESSAGES: TypeAdapter[HostRates | End] = TypeAdapter(Annotated[HostRates | End, Field(discriminator="kind")])


def run_probe(threads: int) -> HostRates:
    """What this host can do, measured by a process of its own; by a second one where something else used the machine
    during the first. Raises EdgeformerError when that does not say."""
    results: list[HostRates] = []
    while not results or (results[-1].disturbed is not None and len(results) < _TRIES):
        count = len(results)
        ending = run_job(ProbeSpec(threads=threads), _MESSAGES, _LONGEST_S, results.append)
        if len(results) == count:
            raise EdgeformerError(f"this host's rates could not be measured: {ending.reason or 'no answer'}")
    return results[-1]


def work(message: bytes, send: Send) -> None:
    """Time chains of products, and sums of large tensors and of single numbers, in a worker; takes 15 s.

    A chain that does not fit into memory is left out. See :mod:`edgeformer.benchmark.process`.
    """
    threads, start = ProbeSpec.model_validate_json(message).threads, read_cpu()
    with (
        contextlib.closing(Reference()) as reference,
        tempfile.TemporaryDirectory(prefix="edgeformer-probe-") as folder,
    ):
        file = Path(folder) / "probe.onnx"
        products: list[ProductTime] = []
        for width, weights in _that_fit(_CHAINS):
            earlier = reference.speed()
            timed = _products(file, width, weights, threads)
            speed = between(earlier, reference.speed())
            products += [product.model_copy(update={"speed": speed}) for product in timed]
        file.write_bytes(add_chain(_LARGE, 2))
        inputs = {"x": np.ones(_LARGE, np.float32)}
        (large,) = ProfiledGraph(file, threads, prepacked=True).list_nodes(inputs, calls=6)
        short_us, long_us = (_chain_us(file, nodes, threads) for nodes in (_SHORT_CHAIN, _LONG_CHAIN))
    operator_us = max(_LEAST_OPERATOR_US, (long_us - short_us) / (_LONG_CHAIN - _SHORT_CHAIN))
    disturbance = beside(start)
    send(
        HostRates(
            products=tuple(products),
            bandwidth=3 * 4 * _LARGE / (min(node.duration_us for node in large) * 1e-6),
            operator_us=operator_us,
            call_us=max(0.0, short_us - _SHORT_CHAIN * operator_us),
            disturbed=disturbance.doubts if disturbance.disturbed else None,
        )
    )


def _that_fit(chains: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that fit into the memory that is free now."""
    free, _ = host_free_bytes()
    return [(width, weights) for width, weights in chains if _COPIES * 4 * width**2 * weights < free]


def _products(file: Path, width: int, weights: int, threads: int) -> list[ProductTime]:
    file.write_bytes(matmul_chain(width, weights))
    draw = np.random.default_rng(0)
    rows = (*_ROWS, _PEAK_ROWS) if weights == 1 else _ROWS
    feeds = [{"x": draw.normal(size=(count, width)).astype(np.float32)} for count in rows]
    listed = ProfiledGraph(file, threads, prepacked=True).list_nodes(*feeds, calls=_CALLS)
    return [
        ProductTime(rows=count, width=width, weights=weights, duration_us=median(node.duration_us for node in nodes))
        for count, nodes in zip(rows, listed, strict=True)
    ]


def _chain_us(file: Path, nodes: int, threads: int) -> float:
    """Microseconds of a call of a chain of ``nodes`` sums of two numbers: the fastest tenth of some calls."""
    from edgeformer.runtimes.onnxruntime.session import OnnxSession

    file.write_bytes(add_chain(1, nodes))
    with contextlib.closing(OnnxSession(file, default_provider("cpu"), threads)) as session:
        times_us = time_calls(partial(session.run, {"x": np.ones(1, np.float32)}), 0.0, _CHAIN_CALLS)
    return float(np.quantile(times_us, 0.1))
