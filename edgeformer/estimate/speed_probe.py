"""Small ONNX graphs for probes, written byte by byte: the base installation has ONNX Runtime, but not onnx.

Only what is needed of ONNX's protocol buffers: nodes without attributes, float32 weights, dynamic rows.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from edgeformer.artifacts.device import Response, Speed
from edgeformer.runtimes import default_provider
from edgeformer.runtimes.session import Array

_FLOAT = 1
_IR_VERSION, _OPSET = 8, 17


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
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# The reference: a product and a copy, timed beside every measurement, which tell the machine's speed at that moment.
#
# Processors change their speed within minutes: clocks, heat, a neighbour on the same hardware, a virtual machine that
# was moved. What is compared over longer than a moment is compared as a multiple of the reference.


# 67 million operations and 4 MiB read and written: half a millisecond each on one core of 2020's desktops.
_ROWS, _WIDTH, _COPIED = 128, 512, 1 << 20
# Each of the two, for so long: a few calls say more of themselves than of the machine.
_PROBE_S, _FEWEST_CALLS = 0.01, 3

UNMOVED = Response()
"""No dependence on the machine's speed: times stay unscaled."""


class Reference:
    """The product and the copy, opened once; :meth:`speed` takes twenty milliseconds.

    One thread computes, however many the measured artifact has: so a speed means the same everywhere, and threads of
    another session, which look out for work for a while after a call, are not in its way.
    """

    def __init__(self) -> None:
        from edgeformer.runtimes.onnxruntime.session import OnnxSession

        with tempfile.TemporaryDirectory(prefix="edgeformer-reference-") as folder:
            file = Path(folder) / "reference.onnx"
            file.write_bytes(matmul_chain(_WIDTH, 1))
            self._session = OnnxSession(file, default_provider("cpu"), 1)
        self._fed = {"x": np.random.default_rng(0).normal(size=(_ROWS, _WIDTH)).astype(np.float32)}
        self._source, self._target = np.ones(_COPIED, np.float32), np.zeros(_COPIED, np.float32)
        self.speed()

    def speed(self) -> Speed:
        """The median of some calls of each, in microseconds."""
        product_us = self._median_us(lambda: self._session.run(self._fed))
        return Speed(product_us=product_us, copy_us=self._median_us(lambda: np.copyto(self._target, self._source)))

    def close(self) -> None:
        """Give the memory back."""
        self._session.close()

    def _median_us(self, call: Callable[[], object]) -> float:
        times: list[int] = []
        ending = time.perf_counter() + _PROBE_S
        while time.perf_counter() < ending or len(times) < _FEWEST_CALLS:
            began = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - began)
        return max(1.0, median(times)) / 1000


def slowness(speed: Speed, reference: Speed, response: Response) -> float:
    """How many times longer a call takes at ``speed`` than at ``reference``.

    Args:
        speed: at some moment.
        reference: at the other speed.
        response: of calls to the two parts of a speed.
    """
    product, copy = speed.product_us / reference.product_us, speed.copy_us / reference.copy_us
    return float(product**response.of_product * copy**response.of_copy)


def typical(speeds: Sequence[Speed]) -> Speed:
    """The median of each part. Raises ValueError where there is none."""
    if not speeds:
        raise ValueError("no speed was measured")
    return Speed(
        product_us=median(speed.product_us for speed in speeds), copy_us=median(speed.copy_us for speed in speeds)
    )


def between(start: Speed, end: Speed) -> Speed:
    """What held while something was measured between the two: their geometric mean."""
    return Speed(
        product_us=math.sqrt(start.product_us * end.product_us), copy_us=math.sqrt(start.copy_us * end.copy_us)
    )


# Of one group the best cut explains at most about 64 % of the variance (normal) or 75 % (uniform).
_EXPLAINED, _LEAST_GAP, _LEAST_SHARE, _FEWEST = 0.85, 1.08, 0.1, 10


def two_speeds(speeds: Sequence[Speed]) -> tuple[Speed, Speed] | None:
    """The fast and the slow one, where a machine has two; None: it has one, or too little was seen.

    The cut with the largest variance between two groups (Otsu 1979) must explain nearly all of it, their medians must
    lie 8 % apart, and each must hold a tenth of the probes.

    Args:
        speeds: of many moments, in any order.
    """
    if len(speeds) < _FEWEST:
        return None
    ordered = sorted(speeds, key=lambda speed: speed.product_us)
    logs = np.log([speed.product_us for speed in ordered])
    total_variance = float(np.square(logs - logs.mean()).sum())
    least = max(2, math.ceil(_LEAST_SHARE * len(ordered)))
    cuts = {
        cut: sum(float(np.square(part - part.mean()).sum()) for part in (logs[:cut], logs[cut:]))
        for cut in range(least, len(ordered) - least + 1)
    }
    if not cuts or total_variance <= 0:
        return None
    cut = min(cuts, key=lambda place: cuts[place])
    fast, slow = typical(ordered[:cut]), typical(ordered[cut:])
    if 1 - cuts[cut] / total_variance < _EXPLAINED or slow.product_us < _LEAST_GAP * fast.product_us:
        return None
    return fast, slow
