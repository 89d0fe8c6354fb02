"""Rotary position embeddings in the form that OpenVINO fuses.

Our graphs turn the halves of a query or key by four products, a difference and a sum: of the forms that were tried,
ONNX Runtime is quickest with this one. OpenVINO knows a rotation by another one, x · cos + (−second, first) · sin with
tables of four axes, and computes that in a single kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class _Rotation(NamedTuple):
    """What ``turned`` computes of x [B, H, S, D] by tables [S, D / 2]; all are values of an ``openvino.Model``."""

    turned: Any
    x: Any
    cos: Any
    sin: Any


def fuse_rotations(model: Any) -> int:
    """Write every rotation of halves as OpenVINO fuses it; what is computed stays the same.

    Args:
        model: an ``openvino.Model``, which is changed.

    Returns:
        How many there were.
    """
    from openvino import opset13 as ops

    found = [one for node in model.get_ordered_ops() if (one := _rotation(node)) is not None]
    tables: dict[Any, Any] = {}

    def whole(half: Any) -> Any:
        """[S, D / 2] → [1, 1, S, D], made once."""
        if half not in tables:
            tables[half] = ops.unsqueeze(ops.concat([half, half], -1), ops.constant(np.array([0, 1])))
        return tables[half]

    for turned, x, cos, sin in found:
        half = x.get_partial_shape()[3].get_length() // 2
        first, second = ops.variadic_split(x, ops.constant(3), ops.constant(np.array([half, half]))).outputs()
        swapped = ops.concat([ops.multiply(second, ops.constant(-1, x.get_element_type())), first], -1)
        turned.replace(ops.add(ops.multiply(x, whole(cos)), ops.multiply(swapped, whole(sin))).output(0))
    return len(found)


def is_quantised(model: Any) -> bool:
    """Whether a graph (an ``openvino.Model``) has quantised products."""
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def _rotation(node: Any) -> _Rotation | None:
    """What a node is that computes concat(first · cos − second · sin, first · sin + second · cos); else None."""
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return None
    turned = _halves_and_tables(node.input_value(0), "Subtract")
    rest = _halves_and_tables(node.input_value(1), "Add")
    if turned is None or rest is None:
        return None
    (first, cos), (second, sin) = turned
    split = first.get_node()
    x = split.input_value(0)
    told = (first, second) == tuple(split.outputs()) and set(rest) == {(first, sin), (second, cos)}
    fits = _fits(x, cos, first) and _fits(x, sin, second) and _last(node.output(0)) == _last(x)
    return _Rotation(node.output(0), x, cos, sin) if told and fits else None


def _halves_and_tables(value: Any, kind: str) -> list[tuple[Any, Any]] | None:
    """Both (half, table) of a sum or a difference of products of one part of a Split each; None: it is none."""
    if value.get_node().get_type_name() != kind:
        return None
    found = []
    for term in value.get_node().input_values():
        factors = term.get_node().input_values() if term.get_node().get_type_name() == "Multiply" else []
        halves = [one for one in factors if one.get_node().get_type_name() == "Split"]
        if len(halves) != 1:
            return None
        found.append((halves[0], factors[0] if factors[1] == halves[0] else factors[1]))
    return found


def _fits(x: Any, table: Any, half: Any) -> bool:
    """Whether x is [B, H, S, D] with a known D, and its half [B, H, S, D / 2] is multiplied with [S, D / 2]: with as
    many angles as x has positions, for that is how long OpenVINO takes the result to be."""
    sizes, angles = x.get_partial_shape(), table.get_partial_shape()
    if sizes.rank != 4 or angles.rank != 2 or not sizes[3].is_static:
        return False
    known = [size.get_length() if size.is_static else None for size in (sizes[2], angles[0])]
    halved = _last(half) == angles[1] and 2 * _last(half).get_length() == sizes[3].get_length()
    return bool(halved and known[0] == known[1])


def _last(value: Any) -> Any:
    """The size of its last axis."""
    return value.get_partial_shape()[-1]
