"""How large the numbers inside of a graph get on its golden inputs, by a run in which every value is an output."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    LiftSubgraphInitializersToMainGraphPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
    ShapeInferencePass,
)

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array, Session

_AT_ONCE = 64
"""Values that a run returns; each takes memory until it is looked at."""


def largest_values(
    model: onnx_ir.Model,
    feed: Callable[[Session], Sequence[Mapping[str, Array]]],
    workplace: Path,
) -> dict[str, float]:
    """Value of the outermost graph → largest absolute FP32 number in it; not finite ones are infinite.

    Args:
        model: FP32; it is left unchanged.
        feed: runs a session on the golden inputs, and returns the outputs of each call.
        workplace: folder for a copy of the graph.
    """
    probe = lifted(model)
    own = list(probe.graph.outputs)
    inner = [value for node in probe.graph for value in node.outputs if value.name and value not in own]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix=".reach-", dir=workplace) as folder:
        for start in range(0, len(inner), _AT_ONCE) or (0,):
            probe.graph.outputs[:] = [*own, *inner[start : start + _AT_ONCE]]
            path = Path(folder, f"{start}.onnx")
            onnx_ir.save(probe, path, external_data=f"{start}.data")
            with OnnxSession(path) as session:
                for outputs in feed(session):
                    for name, array in outputs.items():
                        if array.dtype == np.float32 and array.size:
                            reached = float(np.nan_to_num(np.abs(array).max(), nan=np.inf))
                            found[name] = max(found.get(name, 0.0), reached)
    return found


# FP16 of somebody else's graph: products and what lies between them compute in it, everything delicate stays FP32.
#
# What is exported from torch becomes FP16 as its modules say, see ``families/norms.py`` and ``families/halving.py``;
# here
# there is nothing but the graph. So it is decided node by node. An operator computes in FP16 if it is one of those
# that
# are known to be harmless there (products, sums, activations, moves), and if nothing that it reads or writes comes
# near
# FP16's limits: not on the golden inputs, and not by a stored number. Norms, softmax, powers, roots, exponentials,
# sums
# over an axis and what is not known stay FP32, as do inputs and outputs. Every value keeps its name and its FP32
# type;
# its FP16 twin stands beside it, and casts that nobody reads are removed. Weights are stored once.
#
# onnx_ir has no FP16 pass, and onnxruntime.transformers.float16 clips numbers that FP16 cannot hold without an error.


FP16_LARGEST, FP16_SMALLEST = 65_504.0, 6.1e-5
"""Numbers beyond are infinite; below, they lose their precision and then vanish."""

SAFE_ACTIVATION = FP16_LARGEST / 4
"""Golden inputs do not show the largest activations that there are."""

_FLOAT, _HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
_HARMLESS = {
    "MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "Gather", "Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu",
    "PRelu", "Clip", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Erf", "Gelu", "Elu", "Selu", "Softplus", "Concat",
    "Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "MaxPool",
    "AveragePool", "GlobalMaxPool", "Pad", "Where", "Tile", "DepthToSpace", "SpaceToDepth", "Max", "Min", "Neg", "Abs",
}  # fmt: skip
_SAME_TYPE = _HARMLESS | {
    "Sqrt", "Pow", "Exp", "Log", "Reciprocal", "Softmax", "LogSoftmax", "LayerNormalization", "BatchNormalization",
    "InstanceNormalization", "GlobalAveragePool", "Resize", "Upsample", "Sin", "Cos", "Ceil", "Floor", "Round",
    "CumSum", "Softsign", "Mean", "Sum", "Mod", "Sign", "Dropout", "Trilu", "LpNormalization",
}  # fmt: skip
"""Operators whose results have the type of their first operand (of ``Where`` the second)."""
_BOUNDED = {"Softmax", "Sigmoid", "Tanh", "Clip", "HardSigmoid", "Erf", "LayerNormalization", "Softsign"}
"""A mask of −10³⁸ ends there."""
_SMALL = 16
"""Numbers of a constant of which both types may have a copy."""

Largest = Mapping[str, float]
"""Value of the outermost graph → largest absolute number on the golden inputs; one that is missing is not known."""


def lifted(model: onnx_ir.Model) -> onnx_ir.Model:
    """A copy without functions, in which every stored tensor is one of the outermost graph's, and no input."""
    copied = model.clone()
    RemoveInitializersFromInputsPass()(copied)
    InlinePass()(copied)
    LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(copied)
    LiftSubgraphInitializersToMainGraphPass()(copied)
    RemoveUnusedNodesPass()(copied)
    return copied


def halve(model: onnx_ir.Model, largest: Largest) -> onnx_ir.Model:
    """The graph in FP16 as far as that does no harm; ``model`` is left unchanged.

    Args:
        model: FP32.
        largest: what its values reach, see :func:`edgeformer.export.fp16.largest_values`.

    Raises:
        EdgeformerError: nothing of it can be in FP16.
    """
    made = lifted(model)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(made)
    _fill_types(made.graph)
    halving = _Halving(made, largest)
    halving.convert(made.graph)
    if not halving.converted:
        raise EdgeformerError("FP16: nothing in it can compute in FP16: it has no product, sum or move of FP32 numbers")
    RemoveUnusedNodesPass()(made)
    return made


def _fill_types(graph: onnx_ir.Graph) -> None:
    """Types of values that shape inference knows nothing of: inside of subgraphs, behind operators of ONNX Runtime."""
    for node in graph:
        for inner in _subgraphs(node):
            _fill_types(inner)
        if node.domain or not node.outputs or node.outputs[0].dtype is not None:
            continue
        operands = [value for value in node.inputs[node.op_type == "Where" :] if value is not None]
        if (node.op_type in _SAME_TYPE or node.op_type.startswith("Reduce")) and operands:
            for output in node.outputs:
                _set(output, operands[0].dtype)
        elif node.op_type == "Cast":
            node.outputs[0].dtype = onnx_ir.DataType(node.attributes.get_int("to", 1))
        elif node.op_type == "If":
            (then, _) = _subgraphs(node)
            for output, inside in zip(node.outputs, then.outputs, strict=True):
                _set(output, inside.dtype)


def _set(value: onnx_ir.Value, dtype: onnx_ir.DataType | None) -> None:
    if dtype is not None:
        value.dtype = dtype


def _subgraphs(node: onnx_ir.Node) -> list[onnx_ir.Graph]:
    found: list[onnx_ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


@dataclass
class _Halving:
    """One conversion: which values have an FP16 twin, and which hold numbers that FP16 cannot."""

    model: onnx_ir.Model
    largest: Largest
    twins: dict[onnx_ir.Value, onnx_ir.Value] = field(default_factory=dict)
    wide: set[onnx_ir.Value] = field(default_factory=set)
    converted: int = 0

    def convert(self, graph: onnx_ir.Graph) -> None:
        """All nodes of a graph, in the order in which they run, those of its subgraphs with them."""
        if graph is self.model.graph:
            self.wide |= {value for value in graph.initializers.values() if _reaches(value) > FP16_LARGEST}
        for node in list(graph):
            for inner in _subgraphs(node):
                self.convert(inner)
            if node.op_type not in _BOUNDED and any(value in self.wide for value in node.inputs if value is not None):
                self.wide.update(node.outputs)
            if self._harmless(node):
                self._convert(graph, node)

    def _harmless(self, node: onnx_ir.Node) -> bool:
        if node.domain not in ("", "ai.onnx") or node.op_type not in _HARMLESS:
            return False
        operands = [value for value in node.inputs if value is not None and value.dtype == _FLOAT]
        results = [value for value in node.outputs if value.dtype == _FLOAT]
        if not operands or not results or any(value in self.wide for value in (*operands, *results)):
            return False
        if node.op_type == "Div" and not (node.inputs[1] is not None and node.inputs[1].is_initializer()):
            return False
        if any(_vanishes(value) for value in operands):
            return False
        return all(self.largest.get(str(value.name), 0.0) <= SAFE_ACTIVATION for value in (*operands, *results))

    def _convert(self, graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
        """Put a node that computes in FP16 in the place of one that does not; what reads it may go on reading FP32."""
        inputs = [self._twin(value) if value is not None and value.dtype == _FLOAT else value for value in node.inputs]
        made = onnx_ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=node.name,
        )
        casts: list[onnx_ir.Node] = []
        results: list[onnx_ir.Value] = []
        for old, new in zip(node.outputs, made.outputs, strict=True):
            if old.dtype != _FLOAT:
                results.append(new)
                continue
            cast = onnx_ir.node("Cast", [new], {"to": int(_FLOAT)}, name=f"{old.name}_widened")
            casts.append(cast)
            results.append(cast.outputs[0])
        halves = [(old.name, old.shape, old.dtype) for old in node.outputs]
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [made, *casts], node.outputs, results)
        for (name, shape, dtype), new, result in zip(halves, made.outputs, results, strict=True):
            if dtype == _FLOAT:
                new.name, new.shape, new.dtype = f"{name}_half", shape, _HALF
                self.twins[result] = new
        self.converted += 1

    def _twin(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """The same numbers in FP16."""
        if value not in self.twins:
            made = self._stored(value) if value.is_initializer() else self._cast(value)
            self.twins[value] = made
        return self.twins[value]

    def _stored(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """Weights in FP16; where something reads them in FP32 as well, that is a cast of the same."""
        graph, tensor = self.model.graph, value.const_value
        assert tensor is not None
        narrow = onnx_ir.tensor(tensor.numpy().astype(np.float16), name=f"{value.name}_half")
        made = onnx_ir.val(str(narrow.name), const_value=narrow)
        graph.register_initializer(made)
        if tensor.size > _SMALL:
            wide = onnx_ir.node("Cast", [made], {"to": int(_FLOAT)}, name=f"{value.name}_widened")
            name = str(value.name)
            graph.initializers.pop(name)
            onnx_ir.convenience.replace_all_uses_with(value, wide.outputs[0])
            wide.outputs[0].name, wide.outputs[0].dtype, wide.outputs[0].shape = name, _FLOAT, value.shape
            graph.insert_before(graph[0], wide)
            self.twins[wide.outputs[0]] = made
        return made

    def _cast(self, value: onnx_ir.Value) -> onnx_ir.Value:
        producer = value.producer()
        cast = onnx_ir.node("Cast", [value], {"to": int(_HALF)}, name=f"{value.name}_narrowed")
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = f"{value.name}_half", _HALF, value.shape
        if producer is not None and producer.graph is not None:
            producer.graph.insert_after(producer, cast)
        else:
            graph = value.graph if value.graph is not None else self.model.graph
            graph.insert_before(graph[0], cast)
        return cast.outputs[0]


def _reaches(value: onnx_ir.Value) -> float:
    """Largest absolute number of a stored FP32 tensor; 0 of others."""
    return _over(value, lambda numbers: float(np.abs(numbers).max()))


def _vanishes(value: onnx_ir.Value) -> bool:
    """Whether a stored scalar (an ε) is no more than 0 in FP16."""
    tensor = value.const_value
    if tensor is None or tensor.size > _SMALL:
        return False
    return bool(_over(value, lambda numbers: float(((numbers != 0) & (np.abs(numbers) < FP16_SMALLEST)).any())))


def _over(value: onnx_ir.Value, of: Callable[[NDArray[Any]], float]) -> float:
    tensor = value.const_value
    if tensor is None or tensor.dtype != _FLOAT or not tensor.size:
        return 0.0
    return of(tensor.numpy())
