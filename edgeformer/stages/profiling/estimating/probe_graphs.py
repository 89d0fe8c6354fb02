"""Small ONNX graphs for calibration, written byte by byte: the base installation has ONNX Runtime, but not onnx.

Only what is needed of ONNX's protocol buffers: nodes without attributes, float32 weights, dynamic rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FLOAT = 1
_IR_VERSION, _OPSET = 8, 17


@dataclass(frozen=True)
class ProbeNode:
    """One node: operator, names of inputs, name of the output."""

    op: str
    inputs: tuple[str, ...]
    output: str


def matmul_chain(width: int, weights: int, seed: int = 0) -> bytes:
    """``weights`` different square products, one after the other: x [rows, width] → y [rows, width].

    Each weight is width² · 4 bytes, scaled so that the values neither grow nor vanish.
    """
    draw = np.random.default_rng(seed)
    names = [f"w{number}" for number in range(weights)]
    stored = {name: draw.normal(size=(width, width)).astype(np.float32) / np.float32(width**0.5) for name in names}
    return _model(_chain("MatMul", names), stored, (None, width))


def add_chain(size: int, nodes: int) -> bytes:
    """``nodes`` sums of two tensors of ``size`` numbers; with one number each, an operator doing next to nothing."""
    steps = _chain("Add", ["x"] * nodes)
    return _model(steps, {}, (size,))


def _chain(op: str, operands: Sequence[str]) -> list[ProbeNode]:
    last = len(operands) - 1
    before = ["x", *(f"t{number}" for number in range(last))]
    after = [*(f"t{number}" for number in range(last)), "y"]
    return [
        ProbeNode(op, (source, operand), target)
        for source, operand, target in zip(before, operands, after, strict=True)
    ]


def _model(
    nodes: Sequence[ProbeNode], weights: dict[str, npt.NDArray[np.float32]], shape: tuple[int | None, ...]
) -> bytes:
    graph = b"".join(_message(1, _node(node)) for node in nodes) + _text(2, "probe")
    graph += b"".join(_message(5, _tensor(name, values)) for name, values in weights.items())
    graph += _message(11, _value("x", shape)) + _message(12, _value("y", shape))
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _text(1, "") + _number(2, _OPSET))


def _node(node: ProbeNode) -> bytes:
    named = b"".join(_text(1, name) for name in node.inputs) + _text(2, node.output)
    return named + _text(3, f"node_{node.output}") + _text(4, node.op)


def _tensor(name: str, values: npt.NDArray[np.float32]) -> bytes:
    dimensions = b"".join(_number(1, size) for size in values.shape)
    return dimensions + _number(2, _FLOAT) + _text(8, name) + _message(9, values.tobytes())


def _value(name: str, shape: tuple[int | None, ...]) -> bytes:
    dimensions = b"".join(_message(1, _text(2, "rows") if size is None else _number(1, size)) for size in shape)
    return _text(1, name) + _message(2, _message(1, _number(1, _FLOAT) + _message(2, dimensions)))


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
