"""One graph out of pieces that were traced once each: a block that is looped is traced once, however deep the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir.passes.common import InlinePass, RemoveUnusedOpsetsPass

from edgeformer.families.tracing import OPSET, tidy

_DOMAIN = "edgeformer"
_IR_VERSION = 10

Values = Mapping[str, onnx_ir.Value]


class Composer:
    """Collects calls of pieces; :meth:`finish` puts their nodes in the calls' place."""

    def __init__(self) -> None:
        self._functions: dict[str, onnx_ir.Function] = {}
        self._weights: dict[str, list[onnx_ir.Value]] = {}
        self._outputs: dict[str, list[onnx_ir.Value]] = {}
        self._constants: list[onnx_ir.Value] = []
        self._nodes: list[onnx_ir.Node] = []

    def add(self, name: str, piece: onnx_ir.Model) -> None:
        """Make a traced graph callable as ``name``. It is left as it was; its weights are shared, not copied."""
        body = piece.clone().graph
        stored, self._weights[name] = list(body.initializers.values()), []
        body.initializers.clear()
        for value in stored:  # a function has no weights of its own: they become arguments
            assert value.const_value is not None
            weight = onnx_ir.tensor(np.asarray(value.const_value.numpy()), name=f"{name}.{value.name}")
            self._weights[name].append(onnx_ir.val(weight.name, const_value=weight))
            value.const_value = None
            body.inputs.append(value)
        self._outputs[name] = list(piece.graph.outputs)
        self._functions[name] = onnx_ir.Function(_DOMAIN, name, graph=body, attributes=[])

    def call(self, name: str, inputs: Values) -> dict[str, onnx_ir.Value]:
        """Use a piece: its inputs by name → its outputs by name."""
        body, number = self._functions[name], len(self._nodes)
        weights = self._weights[name]
        own = body.inputs[: len(body.inputs) - len(weights)]
        node = onnx_ir.node(
            name,
            [*(inputs[str(value.name)] for value in own), *weights],
            domain=_DOMAIN,
            num_outputs=len(self._outputs[name]),
            name=f"{name}_{number}",
        )
        self._nodes.append(node)
        for value, described in zip(node.outputs, self._outputs[name], strict=True):
            value.name, value.type, value.shape = f"{name}_{number}_{described.name}", described.type, described.shape
        return {str(d.name): value for d, value in zip(self._outputs[name], node.outputs, strict=True)}

    def node(self, operator: str, inputs: Sequence[onnx_ir.Value], **attributes: int) -> onnx_ir.Value:
        """An operator between pieces."""
        node = onnx_ir.node(operator, list(inputs), attributes, name=f"{operator}_{len(self._nodes)}")
        node.outputs[0].name = f"{operator}_{len(self._nodes)}_result"
        self._nodes.append(node)
        return node.outputs[0]

    def constant(self, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
        """A stored number or vector."""
        value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
        self._constants.append(value)
        return value

    def finish(self, inputs: Sequence[onnx_ir.Value], outputs: Values) -> onnx_ir.Model:
        """The graph from ``inputs`` to ``outputs``, each weight stored once; outputs get the names they have here."""
        for name, value in outputs.items():
            value.name = name
        weights = [value for values in self._weights.values() for value in values if value.uses()]
        graph = onnx_ir.Graph(
            list(inputs),
            list(outputs.values()),
            nodes=self._nodes,
            initializers=[*weights, *self._constants],
            opset_imports={"": OPSET, _DOMAIN: 1},
            name="main_graph",
        )
        model = onnx_ir.Model(graph, ir_version=_IR_VERSION, functions=list(self._functions.values()))
        InlinePass()(model)
        RemoveUnusedOpsetsPass()(model)
        tidy(model)
        return model


def like(value: onnx_ir.Value, name: str) -> onnx_ir.Value:
    """A graph input with the type and shape of a piece's input."""
    return onnx_ir.Value(name=name, shape=value.shape, type=value.type)
