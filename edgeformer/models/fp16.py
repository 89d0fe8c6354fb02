"""The FP16 graph of a model from its FP32 trace, with the casts that a trace of the halved model has.

Tracing takes seconds and what it finds is the same in either precision, but for types. These follow from the halved
model by torch's own rules: its tensors say what is stored in which type, operands of two types are promoted, numbers
that the code states take the type beside them, and modules that say ``keeps_float32`` take FP16, compute in float32 and
give FP16. ``tests/families/test_halving.py`` compares the two graphs node for node. onnxruntime.transformers.float16
decides by operator instead of by module, and cannot reproduce that graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir
import torch
from torch import Tensor

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.tracing import FLOAT32, GraphSpec, softmax_in_float32, tidy

_FLOAT, _HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
_TYPES = {torch.float32: _FLOAT, torch.float16: _HALF}
_MOVES = {"Slice", "Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "Expand", "Identity"}
"""Operators that take nothing but a place of a number: torch widens at the first one that computes."""


def halved(piece: onnx_ir.Model, spec: GraphSpec) -> onnx_ir.Model:
    """The piece as it would be traced of a halved model.

    Args:
        piece: what :func:`~edgeformer.models.tracing.export_graph` made of the FP32 model; it is left as it was.
        spec: of the same piece of the model after :func:`~edgeformer.models.norms.half_for_export`.

    Raises:
        EdgeformerError: a node whose type in FP16 cannot be told.
    """
    made = piece.clone()
    _Halving(made.graph).convert(spec)
    softmax_in_float32(made)
    tidy(made)
    return made


@dataclass
class _Halving:
    """One conversion.

    Attributes:
        narrowed: float32 results of modules that keep float32: what stands behind these modules reads them in FP16.
        casts: value in another type, by value and type.
        stated: FP32 numbers that the code states, which no tensor of the model holds.
    """

    graph: onnx_ir.Graph
    narrowed: set[onnx_ir.Value] = field(default_factory=set)
    casts: dict[tuple[onnx_ir.Value, onnx_ir.DataType], onnx_ir.Value] = field(default_factory=dict)
    stated: set[onnx_ir.Value] = field(default_factory=set)

    def convert(self, spec: GraphSpec) -> None:
        """All nodes, in the order in which they run."""
        for value in self.graph.inputs:
            if value.dtype == _FLOAT:
                _set_type(value, _TYPES[spec.inputs[str(value.name)].dtype])
        self._store(dict(spec.module.state_dict(keep_vars=True)) | dict(spec.module.named_buffers()))
        for node in list(self.graph):
            self._convert(node)
        with torch.inference_mode():
            results = spec.module(*spec.inputs.values())
        results = results if isinstance(results, tuple) else (results,)
        for place, result in enumerate(results):
            self._give(place, _TYPES[result.dtype])

    def _store(self, tensors: dict[str, Tensor]) -> None:
        """The model's tensors in the types that they have now."""
        for name, value in self.graph.initializers.items():
            if value.dtype != _FLOAT:
                continue
            if name not in tensors:
                self.stated.add(value)
                continue
            value.const_value = onnx_ir.tensor(tensors[name].detach().numpy(), name=name)
            _set_type(value, value.const_value.dtype)

    def _convert(self, node: onnx_ir.Node) -> None:
        """Give the node operands of one type; its float results have that type, too."""
        results = [value for value in node.outputs if value.dtype == _FLOAT]
        operands = [value for value in node.inputs if value is not None and value.dtype in (_FLOAT, _HALF)]
        wide = bool(node.meta.get(FLOAT32))
        known = [value for value in operands if value not in self.stated]
        types = {_HALF if not wide and value in self.narrowed else value.dtype for value in known}
        if not operands and not results:
            return
        if node.op_type == "Cast" and not operands:
            kind = _FLOAT if wide else _HALF
            node.attributes["to"] = onnx_ir.AttrInt64("to", int(kind))
        elif not known:
            raise EdgeformerError(f"FP16: the type of {node.op_type} {node.name!r} cannot be told from its operands")
        else:
            moves = node.op_type in _MOVES and types == {_HALF}
            kind = _FLOAT if _FLOAT in types or (wide and not moves and results) else _HALF
        for place, value in enumerate(node.inputs):
            if value is not None and value in operands:
                node.replace_input_with(place, self._as(value, kind, node))
        for value in results:
            _set_type(value, kind)
            if wide and kind == _FLOAT:
                self.narrowed.add(value)

    def _as(self, value: onnx_ir.Value, kind: onnx_ir.DataType, before: onnx_ir.Node | None) -> onnx_ir.Value:
        """The value in a type, by a cast in front of the node that reads it first; None: at the graph's end."""
        if value.dtype == kind:
            return value
        if (value, kind) not in self.casts:
            self.casts[value, kind] = self._number(value) if value in self.stated else self._cast(value, kind, before)
        return self.casts[value, kind]

    def _number(self, value: onnx_ir.Value) -> onnx_ir.Value:
        assert value.const_value is not None
        with np.errstate(over="ignore"):  # infinity, as torch makes of it; parity shows what comes of that
            narrow = value.const_value.numpy().astype(np.float16)
        made = onnx_ir.val(f"{value.name}_half", const_value=onnx_ir.tensor(narrow, name=f"{value.name}_half"))
        self.graph.register_initializer(made)
        return made

    def _cast(self, value: onnx_ir.Value, kind: onnx_ir.DataType, before: onnx_ir.Node | None) -> onnx_ir.Value:
        name = f"{value.name}_{'wide' if kind == _FLOAT else 'half'}"
        node = onnx_ir.node("Cast", [value], {"to": int(kind)}, name=name)
        made = node.outputs[0]
        made.name, made.type, made.shape = name, onnx_ir.TensorType(kind), value.shape
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)
        return made

    def _give(self, place: int, kind: onnx_ir.DataType) -> None:
        """An output in the type that the halved module gives it in, under its name."""
        value = self.graph.outputs[place]
        made = self._as(value, kind, None)
        if made is not value:
            name = str(value.name)
            value.name, made.name = f"{name}_before", name
            self.graph.outputs[place] = made


def _set_type(value: onnx_ir.Value, kind: onnx_ir.DataType) -> None:
    value.type = onnx_ir.TensorType(kind)  # not its dtype: clones share the object that this is an attribute of
