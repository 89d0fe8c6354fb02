"""Whether two graphs compute the same: node for node, but for names and the order of independent nodes."""

from __future__ import annotations

import hashlib
from collections import Counter

import onnx_ir


def described(model: onnx_ir.Model) -> tuple[dict[str, str], Counter[str]]:
    """Output → digest of all nodes, types and numbers that lead to it; how many nodes of each operator there are."""
    digests: dict[onnx_ir.Value, str] = {}
    for value in model.graph.inputs:
        digests[value] = _digest("input", value.name, value.dtype)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        stored = value.const_value
        digests[value] = _digest("stored", stored.dtype, stored.shape.numpy(), stored.tobytes())
    for node in model.graph:
        attributes = sorted((name, attribute.value) for name, attribute in node.attributes.items())
        operands = [digests[value] if value is not None else "" for value in node.inputs]
        for place, value in enumerate(node.outputs):
            digests[value] = _digest(node.domain, node.op_type, attributes, operands, place)
    outputs = {str(value.name): _digest(digests[value], value.dtype) for value in model.graph.outputs}
    return outputs, Counter(node.op_type for node in model.graph)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
