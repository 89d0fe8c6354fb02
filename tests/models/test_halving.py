"""What an FP32 trace becomes in FP16; that the encoder's is the graph that is traced in FP16, conformance shows."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.layers import RMSNorm, half_for_export
from edgeformer.models.tracing import FLOAT32, GraphSpec, halved

FLOAT, HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
WIDTH = 4


class Part(nn.Module):
    """Three times a product, in a module that keeps float32 or in none; a table in float32 comes in from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, 1e-6)
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 / 3))

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float() * self.norm.weight
        return wide.to(x.dtype) @ self.weight * 3, (x * table)


def spec_of(module: nn.Module) -> GraphSpec:
    """Its type is that of the weight."""
    x = torch.ones(2, WIDTH, dtype=module.weight.dtype)
    return GraphSpec(module, {"x": x, "table": torch.ones(WIDTH)}, {}, ("first", "second"))


def traced(part: Part, *, unknown: bool = False) -> onnx_ir.Model:
    """What torch would make of the part in FP32, node by node."""
    stored = {"norm.weight": part.norm.weight, "weight": part.weight, "three": torch.tensor(3.0)}
    x, table = (onnx_ir.val(name, FLOAT, [None, WIDTH]) for name in ("x", "table"))
    values = {
        name: onnx_ir.val(
            name, FLOAT, list(tensor.shape), const_value=onnx_ir.tensor(tensor.detach().numpy(), name=name)
        )
        for name, tensor in stored.items()
    }
    kept = onnx_ir.node("Mul", [x, values["norm.weight"]], name="kept")
    kept.meta[FLOAT32] = True
    product = onnx_ir.node("MatMul", [kept.outputs[0], values["weight"]])
    first = onnx_ir.node("Mul", [product.outputs[0], values["three"]])
    second = onnx_ir.node("Mul", [x, table])
    nodes = [kept, product, first, second]
    if unknown:
        nodes.append(onnx_ir.node("Sqrt", [values["three"]], name="root"))
    for number, node in enumerate(nodes):
        node.outputs[0].name, node.outputs[0].dtype = f"value_{number}", FLOAT
    first.outputs[0].name, second.outputs[0].name = "first", "second"
    graph = onnx_ir.Graph(
        [x, table], [first.outputs[0], second.outputs[0]], nodes=nodes, initializers=[*values.values()],
        opset_imports={"": 20}, name="main_graph",
    )  # fmt: skip
    return onnx_ir.Model(graph, ir_version=10)


def test_types_follow_from_the_halved_module() -> None:
    part = Part().eval()
    model, half = traced(part), copy.deepcopy(part)
    half_for_export(half)
    made = halved(model, spec_of(half))
    nodes = [(node.op_type, [value.dtype for value in node.inputs], node.outputs[0].dtype) for node in made.graph]
    assert nodes == [
        ("Cast", [HALF], FLOAT),
        ("Mul", [FLOAT, FLOAT], FLOAT),
        ("Cast", [FLOAT], HALF),
        ("MatMul", [HALF, HALF], HALF),
        ("Mul", [HALF, HALF], HALF),
        ("Mul", [FLOAT, FLOAT], FLOAT),  # promoted, by the cast that is there already
    ]
    stored = {name: value.const_value.numpy() for name, value in made.graph.initializers.items()}
    assert {name: array.dtype for name, array in stored.items()} == {
        "norm.weight": np.float32, "weight": np.float16, "three_half": np.float16,
    }  # fmt: skip
    assert np.array_equal(stored["weight"], half.weight.detach().numpy())
    assert [(value.name, value.dtype) for value in made.graph.outputs] == [("first", HALF), ("second", FLOAT)]
    assert {value.dtype for node in model.graph for value in node.outputs} == {FLOAT}, "the FP32 trace is as it was"


def test_a_node_of_stated_numbers_alone_is_refused() -> None:
    part = half_for_export(Part().eval())
    with pytest.raises(EdgeformerError, match="type of Sqrt 'root' cannot be told"):
        halved(traced(Part().eval(), unknown=True), spec_of(part))
