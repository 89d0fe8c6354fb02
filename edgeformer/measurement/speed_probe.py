"""Speed probe: a product and a copy of fixed size, timed beside every measurement.

Processors change their speed within minutes: clocks, heat, a neighbour on the same hardware, a virtual machine that was
moved. The probe's graphs are written byte by byte, because the base installation has ONNX Runtime, but not onnx. They
use only a part of ONNX's protocol buffers: nodes without attributes, float32 weights, dynamic rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from edgeformer.artifacts.device import Speed
from edgeformer.runtimes import default_provider
from edgeformer.runtimes.session import Array

_FLOAT = 1
_IR_VERSION, _OPSET = 8, 17
# 67 million operations and 4 MiB read and written: half a millisecond each on one core of 2020's desktops.
_ROWS, _WIDTH, _COPIED = 128, 512, 1 << 20
# Each of the two, for so long: a few calls say more of themselves than of the machine.
_PROBE_S, _FEWEST_CALLS = 0.01, 3


class SpeedProbe:
    """The product and the copy, opened once; :meth:`speed` takes twenty milliseconds.

    One thread computes, however many the measured artifact has: so a speed means the same everywhere, and threads of
    another session, which look out for work for a while after a call, are not in its way.
    """

    def __init__(self) -> None:
        from edgeformer.runtimes.onnxruntime.session import OnnxSession

        with tempfile.TemporaryDirectory(prefix="edgeformer-speed-") as folder:
            file = Path(folder) / "product.onnx"
            file.write_bytes(matmul_chain(_WIDTH, 1))
            self._session = OnnxSession(file, default_provider("cpu"), 1)
        self._inputs = {"x": np.random.default_rng(0).normal(size=(_ROWS, _WIDTH)).astype(np.float32)}
        self._source, self._target = np.ones(_COPIED, np.float32), np.zeros(_COPIED, np.float32)
        self.speed()

    def speed(self) -> Speed:
        """Return the median duration of some calls of each, in microseconds."""
        product_us = self._median_us(lambda: self._session.run(self._inputs))
        return Speed(product_us=product_us, copy_us=self._median_us(lambda: np.copyto(self._target, self._source)))

    def close(self) -> None:
        """Free the memory."""
        self._session.close()

    def _median_us(self, call: Callable[[], object]) -> float:
        times: list[int] = []
        end = time.perf_counter() + _PROBE_S
        while time.perf_counter() < end or len(times) < _FEWEST_CALLS:
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        return max(1.0, median(times)) / 1000


def typical(speeds: Sequence[Speed]) -> Speed:
    """Return the median of each part. Raises ValueError if there is none."""
    if not speeds:
        raise ValueError("no speed was measured")
    return Speed(
        product_us=median(speed.product_us for speed in speeds), copy_us=median(speed.copy_us for speed in speeds)
    )


def matmul_chain(width: int, weights: int) -> bytes:
    """Return an ONNX model of different square products in sequence: x [rows, width] → y [rows, width].

    Args:
        width: each weight has width² · 4 bytes, scaled so that the values neither grow nor vanish.
        weights: number of products.
    """
    generator = np.random.default_rng(0)
    names = [f"w{number}" for number in range(weights)]
    arrays = {n: generator.normal(size=(width, width)).astype(np.float32) / np.float32(width**0.5) for n in names}
    return _chain("MatMul", names, arrays, (None, width))


def add_chain(size: int, nodes: int) -> bytes:
    """Return an ONNX model of ``nodes`` sums in sequence of two tensors of ``size`` numbers."""
    return _chain("Add", ["x"] * nodes, {}, (size,))


def _chain(op: str, operands: Sequence[str], weights: Mapping[str, Array], shape: tuple[int | None, ...]) -> bytes:
    """Return a model from x to y of ``shape``, one ``op`` after the other, each with one of ``operands``."""
    names = ["x", *(f"t{number}" for number in range(len(operands) - 1)), "y"]
    graph = b"".join(
        _message(1, _text(1, source) + _text(1, operand) + _text(2, target) + _text(3, f"node_{target}") + _text(4, op))
        for source, operand, target in zip(names, operands, names[1:], strict=False)
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
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
