"""Composed graphs share sizes; an FP32 trace converts to FP16 (conformance compares it with tracing in FP16)."""

from __future__ import annotations

import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.layers import RMSNorm, convert_weights_to_fp16
from edgeformer.models.tracing import FLOAT32, GraphSpec, convert_graph_to_fp16, read_sizes_from_inputs

FLOAT, HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
WIDTH = 4


class Products(nn.Module):
    """Products inside a float32 module, with weights, a constant, and a float32 table from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, 1e-6)
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 / 3))

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x.float() * self.norm.weight
        return scaled.to(x.dtype) @ self.weight * 3, (x * table)


def spec_of(module: Products) -> GraphSpec:
    x = torch.ones(2, WIDTH, dtype=module.weight.dtype)
    return GraphSpec(module, {"x": x, "table": torch.ones(WIDTH)}, {}, ("first", "second"))


def fp32_graph(module: Products, *, with_constant_node: bool = False) -> onnx_ir.Model:
    """Build the graph that torch would trace in FP32."""
    stored = {"norm.weight": module.norm.weight, "weight": module.weight, "three": torch.tensor(3.0)}
    x, table = (onnx_ir.val(name, FLOAT, [None, WIDTH]) for name in ("x", "table"))
    arrays = {name: onnx_ir.tensor(tensor.detach().numpy(), name=name) for name, tensor in stored.items()}
    values = {name: onnx_ir.val(name, FLOAT, list(array.shape), const_value=array) for name, array in arrays.items()}
    scaled = onnx_ir.node("Mul", [x, values["norm.weight"]], name="scaled")
    scaled.meta[FLOAT32] = True
    product = onnx_ir.node("MatMul", [scaled.outputs[0], values["weight"]])
    first = onnx_ir.node("Mul", [product.outputs[0], values["three"]])
    second = onnx_ir.node("Mul", [x, table])
    nodes = [scaled, product, first, second]
    if with_constant_node:
        nodes.append(onnx_ir.node("Sqrt", [values["three"]], name="root"))
    for number, node in enumerate(nodes):
        node.outputs[0].name, node.outputs[0].dtype = f"value_{number}", FLOAT
    first.outputs[0].name, second.outputs[0].name = "first", "second"
    graph = onnx_ir.Graph(
        [x, table], [first.outputs[0], second.outputs[0]], nodes=nodes, initializers=[*values.values()],
        opset_imports={"": 20}, name="main_graph",
    )  # fmt: skip
    return onnx_ir.Model(graph, ir_version=10)


def test_fp16_type_of_a_node_on_constants_is_undefined() -> None:
    module = convert_weights_to_fp16(Products().eval())
    with pytest.raises(EdgeformerError, match="type of Sqrt 'root' does not follow from its operands"):
        convert_graph_to_fp16(fp32_graph(Products().eval(), with_constant_node=True), spec_of(module))  # type: ignore[arg-type]


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
