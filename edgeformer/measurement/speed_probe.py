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
        _field(1, b"".join(map(_field, (1, 1, 2, 3, 4), (source, operand, target, f"node_{target}", op))))
        for source, operand, target in zip(names, operands, names[1:], strict=False)
    ) + _field(2, "probe")
    for name, values in weights.items():
        dimensions = b"".join(_field(1, size) for size in values.shape)
        graph += _field(5, dimensions + _field(2, _FLOAT) + _field(8, name) + _field(9, values.tobytes()))
    sizes = b"".join(_field(1, _field(2, "rows") if size is None else _field(1, size)) for size in shape)
    kind = _field(2, _field(1, _field(1, _FLOAT) + _field(2, sizes)))
    graph += _field(11, _field(1, "x") + kind) + _field(12, _field(1, "y") + kind)
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(1, "") + _field(2, _OPSET))


def _field(number: int, content: bytes | str | int) -> bytes:
    """Encode a field of a protocol buffer: an integer, or bytes behind their length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    content = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
