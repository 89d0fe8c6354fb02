"""Speed probe: a product and a copy of fixed size, timed beside every measurement.

Processors change their speed within minutes: clocks, heat, a neighbour on the same hardware, a virtual machine that was
moved. The probe's graphs are written byte by byte, because the base installation has ONNX Runtime, but not onnx. They
use only a part of ONNX's protocol buffers: nodes without attributes, float32 weights, dynamic rows.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    """The product and the copy, opened once; one thread computes, so that a speed means the same everywhere."""

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
        calls = partial(self._session.run, self._inputs), partial(np.copyto, self._target, self._source)
        product_us, copy_us = (max(0.001, median(time_calls(call, _PROBE_S, _FEWEST_CALLS))) for call in calls)
        return Speed(product_us=product_us, copy_us=copy_us)

    def close(self) -> None:
        """Free the memory."""
        self._session.close()


def time_calls(call: Callable[[], object], seconds: float, minimum: int) -> list[float]:
    """Return the microseconds of single calls: as many as ``seconds`` allow, and at least ``minimum``."""
    times_us: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_us) < minimum:
        start = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start) / 1000)
    return times_us


def matmul_chain(width: int, weights: int) -> bytes:
    """Return an ONNX model of so many square products in sequence, x [rows, width] → y, whose values do not grow."""
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
        _message(1, b"".join(map(_message, (1, 1, 2, 3, 4), (source, operand, target, f"node_{target}", op))))
        for source, operand, target in zip(names, operands, names[1:], strict=False)
    ) + _message(2, "probe")
    for name, values in weights.items():
        dimensions = b"".join(_number(1, size) for size in values.shape)
        graph += _message(5, dimensions + _number(2, _FLOAT) + _message(8, name) + _message(9, values.tobytes()))
    sizes = b"".join(_message(1, _message(2, "rows") if size is None else _number(1, size)) for size in shape)
    kind = _message(2, _message(1, _number(1, _FLOAT) + _message(2, sizes)))
    graph += _message(11, _message(1, "x") + kind) + _message(12, _message(1, "y") + kind)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _message(1, "") + _number(2, _OPSET))


def _message(field: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
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
