"""Small ONNX graphs for probes, written byte by byte: the base installation has ONNX Runtime, but not onnx.

Only what is needed of ONNX's protocol buffers: nodes without attributes, float32 weights, dynamic rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgeformer.backends.session import Array

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
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
