"""What stays in float32 in an FP16 graph: nodes of modules that say so, and every softmax."""

from __future__ import annotations

import ast

import onnx_ir
from torch import nn

FLOAT32 = "float32"
"""In a node's ``meta``: whether it belongs to a module that says ``keeps_float32``."""


def mark_float32(model: onnx_ir.Model, module: nn.Module) -> None:
    """Note in the nodes which of them a halved model computes in float32; what torch wrote there is cleared later."""
    keeping = {
        name for name, one in module.named_modules(remove_duplicate=False) if getattr(one, "keeps_float32", False)
    }
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.meta[FLOAT32] = not keeping.isdisjoint(scopes)


def softmax_in_float32(model: onnx_ir.Model) -> None:
    """In an FP16 graph: exponentials of FP16 scores lose what tells close tokens apart, and their sum may overflow."""
    for node in [node for node in model.graph if node.op_type == "Softmax"]:
        scores, weights = node.inputs[0], node.outputs[0]
        if scores is None or scores.dtype != onnx_ir.DataType.FLOAT16:
            continue
        wide = onnx_ir.node("Cast", [scores], {"to": int(onnx_ir.DataType.FLOAT)}, name=f"{node.name}_wide")
        exact = onnx_ir.node("Softmax", [wide.outputs[0]], dict(node.attributes), name=node.name)
        half = int(onnx_ir.DataType.FLOAT16)
        narrow = onnx_ir.node("Cast", [exact.outputs[0]], {"to": half}, name=f"{node.name}_narrow")
        wide.outputs[0].name, exact.outputs[0].name = f"{weights.name}_scores", f"{weights.name}_float32"
        onnx_ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [wide, exact, narrow], [weights], [narrow.outputs[0]]
        )
