"""Dynamic sizes in composed graphs: asked of the graph's inputs, so that what follows from them is computed once."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir


def ask_inputs(model: onnx_ir.Model, between: Collection[str]) -> None:
    """Ask inputs for the sizes of what is handed from piece to piece.

    Every loop asks its own state and its own cache how many tokens there are, and makes a mask of the answer. Asked of
    one value, these are equal nodes, which :func:`~edgeformer.families.tracing.tidy` merges: one mask for all loops.

    Args:
        model: a graph whose pieces are in place.
        between: names of inputs, and of what pieces gave; of these alone a dynamic size's name means the same
            everywhere. What a piece has inside may have been traced with other sizes than it is called with.
    """
    places: dict[str, tuple[onnx_ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis in range(len(value.shape or ())):
            if (name := _size(value, axis)) is not None:
                places.setdefault(name, (value, axis))
    for node in model.graph:
        (asked, *_), axis = node.inputs or (None,), node.attributes.get_int("start", 0)
        if node.op_type != "Shape" or asked is None or asked.name not in between:
            continue
        one = node.attributes.get_int("end", -1) == axis + 1
        place = places.get(_size(asked, axis) or "") if one else None
        if place is not None:
            node.replace_input_with(0, place[0])
            node.attributes["start"] = onnx_ir.AttrInt64("start", place[1])
            node.attributes["end"] = onnx_ir.AttrInt64("end", place[1] + 1)


def _size(value: onnx_ir.Value, axis: int) -> str | None:
    """Name of a dynamic size; None where it is a number, or has none."""
    size = value.shape[axis] if value.shape is not None else None
    return size.value if isinstance(size, onnx_ir.SymbolicDim) else None
