"""Composed graphs share sizes. Conformance compares graphs converted to FP16 with those traced in FP16."""

from __future__ import annotations

import onnx_ir

from edgeformer.models.blocks.tracing import read_sizes_from_inputs


def test_only_sizes_between_pieces_are_read_from_inputs() -> None:
    """Inside a piece a size's name may have another meaning: heads of decode graphs are traced with several tokens."""
    model = onnx_ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]> g (float[batch, sequence] x) => (int64[1] inner, int64[1] outer) {
            y = Neg(x)
            inner = Shape<start = 1, end = 2>(y)
            outer = Shape<start = 1, end = 2>(x)
        }"""
    )
    for value in (model.graph.inputs[0], model.graph.node(0).outputs[0]):
        value.shape = onnx_ir.Shape(["batch", "sequence"])
    ids = onnx_ir.Value(name="ids", shape=onnx_ir.Shape(["batch", "sequence"]), type=model.graph.inputs[0].type)
    model.graph.inputs.insert(0, ids)
    read_sizes_from_inputs(model, {"x"})
    assert [node.inputs[0].name for node in model.graph if node.op_type == "Shape"] == ["y", "ids"]
