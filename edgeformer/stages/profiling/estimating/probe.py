"""What this host can do: rates of matrix products, memory and operators, with graphs of its own.

The graphs are written byte by byte, since the base installation has ONNX Runtime, but not onnx: only what is needed of
ONNX's protocol buffers, nodes without attributes, float32 weights, dynamic rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.backends import default_provider
from edgeformer.backends.onnxruntime.node_listing import ProfiledGraph
from edgeformer.backends.session import Array
from edgeformer.formats.base import Frozen
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.profiling.child import Send
from edgeformer.stages.profiling.estimating.listing import time_calls
from edgeformer.stages.profiling.process import End, Job, run_job

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
# Beyond this the child hangs.
_LONGEST_S = 600.0
_FLOAT = 1
_IR_VERSION, _OPSET = 8, 17


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


class HostRates(Frozen):
    """What the host can do."""

    kind: Literal["rates"] = "rates"
    products: tuple[ProductTime, ...] = Field(strict=False)
    bandwidth: float = Field(description="bytes per second, summing tensors that no cache holds")
    operator_us: float = Field(description="from one operator to the next, doing next to nothing")


_MESSAGES: TypeAdapter[HostRates | End] = TypeAdapter(Annotated[HostRates | End, Field(discriminator="kind")])


def run_probe(threads: int) -> HostRates:
    """What this host can do, measured by a process of its own. Raises EdgeformerError when that does not say."""
    found: list[HostRates] = []
    ending = run_job(ProbeSpec(threads=threads), _MESSAGES, _LONGEST_S, found.append)
    if not found:
        raise EdgeformerError(f"this host's rates could not be measured: {ending.reason or 'no answer'}")
    return found[0]


def work(told: bytes, send: Send) -> None:
    """The child's part: time chains of products, sums of large tensors, and of single numbers; about ten seconds. See
    :mod:`..child`."""
    threads = ProbeSpec.model_validate_json(told).threads
    with tempfile.TemporaryDirectory(prefix="edgeformer-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        products = [one for width, weights in _CHAINS for one in _products(file, width, weights, threads)]
        file.write_bytes(add_chain(_LARGE, 2))
        ones = {"x": np.ones(_LARGE, np.float32)}
        (large,) = ProfiledGraph(file, threads, prepacked=True).list_nodes(ones, calls=6)
        short_us, long_us = (_chain_us(file, nodes, threads) for nodes in (_SHORT_CHAIN, _LONG_CHAIN))
    send(
        HostRates(
            products=tuple(products),
            bandwidth=3 * 4 * _LARGE / (min(node.duration_us for node in large) * 1e-6),
            operator_us=max(_LEAST_OPERATOR_US, (long_us - short_us) / (_LONG_CHAIN - _SHORT_CHAIN)),
        )
    )


def _products(file: Path, width: int, weights: int, threads: int) -> list[ProductTime]:
    file.write_bytes(matmul_chain(width, weights))
    draw = np.random.default_rng(0)
    rows = (*_ROWS, _PEAK_ROWS) if weights == 1 else _ROWS
    feeds = [{"x": draw.normal(size=(count, width)).astype(np.float32)} for count in rows]
    listed = ProfiledGraph(file, threads, prepacked=True).list_nodes(*feeds, calls=_CALLS)
    return [
        ProductTime(rows=count, width=width, weights=weights, duration_us=fmean(node.duration_us for node in nodes))
        for count, nodes in zip(rows, listed, strict=True)
    ]


def _chain_us(file: Path, nodes: int, threads: int) -> float:
    """Microseconds of a call of a chain of ``nodes`` sums of two numbers: the fastest tenth of some calls."""
    from edgeformer.backends.onnxruntime.session import OnnxSession

    file.write_bytes(add_chain(1, nodes))
    with contextlib.closing(OnnxSession(file, default_provider("cpu"), threads)) as session:
        times_us = time_calls(partial(session.run, {"x": np.ones(1, np.float32)}), 0.0, _CHAIN_CALLS)
    return float(np.quantile(times_us, 0.1))


def matmul_chain(width: int, weights: int) -> bytes:
    """Different square products, one after the other: x [rows, width] → y [rows, width].

    Args:
        width: each weight is width² · 4 bytes, scaled so that the values neither grow nor vanish.
        weights: how many.
    """
    draw = np.random.default_rng(0)
    names = [f"w{number}" for number in range(weights)]
    stored = {name: draw.normal(size=(width, width)).astype(np.float32) / np.float32(width**0.5) for name in names}
    return _chain("MatMul", names, stored, (None, width))


def add_chain(size: int, nodes: int) -> bytes:
    """Sums of two tensors, one after the other.

    Args:
        size: numbers of each tensor; of one, an operator does next to nothing.
        nodes: how many sums.
    """
    return _chain("Add", ["x"] * nodes, {}, (size,))


def _chain(op: str, operands: Sequence[str], weights: Mapping[str, Array], shape: tuple[int | None, ...]) -> bytes:
    """A model from x to y of ``shape``, one ``op`` after the other, each with one of ``operands``."""
    between = [f"t{number}" for number in range(len(operands) - 1)]
    steps = zip(["x", *between], operands, [*between, "y"], strict=True)
    graph = b"".join(
        _message(1, _text(1, source) + _text(1, operand) + _text(2, target) + _text(3, f"node_{target}") + _text(4, op))
        for source, operand, target in steps
    ) + _text(2, "probe")
    for name, values in weights.items():
        dimensions = b"".join(_number(1, size) for size in values.shape)
        graph += _message(5, dimensions + _number(2, _FLOAT) + _text(8, name) + _message(9, values.tobytes()))
    sizes = b"".join(_message(1, _text(2, "rows") if size is None else _number(1, size)) for size in shape)
    kind = _message(2, _message(1, _number(1, _FLOAT) + _message(2, sizes)))
    graph += _message(11, _text(1, "x") + kind) + _message(12, _text(1, "y") + kind)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _text(1, "") + _number(2, _OPSET))


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
