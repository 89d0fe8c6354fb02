"""FP16 conversion of foreign graphs, and the largest values that a model computes on its golden inputs.

A trained run becomes FP16 in ``models/blocks``: its modules state which of them compute in FP32, and the types of all
nodes follow. A foreign graph has no modules, so this conversion must decide by what is computed: a node computes in
FP16 if its operator is safe there and nothing that it reads or writes comes near FP16's limits, on the golden inputs or
in a stored number. Norms, softmax, powers, sums over an axis,
unknown operators, inputs and outputs stay FP32. Every value keeps its name and its FP32 type; its FP16 copy has another
name, and unused casts are removed. onnxruntime.transformers.float16 clips numbers without an error, so it is not used.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from onnx_ir.traversal import RecursiveGraphIterator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.blocks.layers import MASKED
from edgeformer.models.blocks.tracing import cast_node
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks import Run
from edgeformer.tasks.arrays import Arrays

FP16_MAX, FP16_MIN_NORMAL = 65_504.0, 6.1e-5
"""Larger numbers become infinite; smaller ones lose precision and then vanish."""

SAFE_ACTIVATION = FP16_MAX / 4
"""Margin, because golden inputs need not produce the largest activations."""

_VALUES_PER_RUN = 64
"""Values that one run returns; each takes memory until it is inspected."""

_FLOAT, _HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
_SAFE_OPERATORS = {
    "MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "Gather", "Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu",
    "PRelu", "Clip", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Erf", "Gelu", "Elu", "Selu", "Softplus", "Concat",
    "Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "MaxPool",
    "AveragePool", "GlobalMaxPool", "Pad", "Where", "Tile", "DepthToSpace", "SpaceToDepth", "Max", "Min", "Neg", "Abs",
}  # fmt: skip
_TYPE_OF_FIRST_OPERAND = _SAFE_OPERATORS | {
    "Sqrt", "Pow", "Exp", "Log", "Reciprocal", "Softmax", "LogSoftmax", "LayerNormalization", "BatchNormalization",
    "InstanceNormalization", "GlobalAveragePool", "Resize", "Upsample", "Sin", "Cos", "Ceil", "Floor", "Round",
    "CumSum", "Softsign", "Mean", "Sum", "Mod", "Sign", "Dropout", "Trilu", "LpNormalization",
}  # fmt: skip
"""Operators whose results have the type of their first operand (of ``Where`` the second)."""
_BOUNDED_RESULT = {"Softmax", "Sigmoid", "Tanh", "Clip", "HardSigmoid", "Erf", "LayerNormalization", "Softsign"}
"""Operators behind which a mask of −10³⁸ has no effect on the range."""
_SEPARATE_INITIALIZERS = 4
"""Oldest IR version in which a stored tensor need not be an input, too."""
_MAX_LISTED = 6
"""Operators that a message names."""
_SMALL_CONSTANT = 16
"""Elements of a constant that may be stored in both types."""


@torch.inference_mode()
def max_abs_activation(model: nn.Module, *inputs: NDArray[np.int64]) -> float:
    """Largest absolute number that any module of an FP32 model reads or writes on these inputs.

    Attention scores q·kᵀ/√D, and their sum with the mask where that hides no token, are included: torch's attention
    does not return them, but a graph computes them in its own precision. ONNX Runtime's CPU provider computes FP16
    graphs in FP32, so a run there cannot show an overflow.
    """
    max_abs = 0.0

    def update(*tensors: object) -> None:
        nonlocal max_abs
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                # NaN would lose every comparison, so it counts as infinite.
                max_abs = max(max_abs, float(tensor.abs().max().nan_to_num(float("inf"))))

    class AttentionScores(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            options = kwargs or {}
            if func is F.scaled_dot_product_attention:
                (q, k), mask, scale = args[:2], options.get("attn_mask"), options.get("scale")
                scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
                update(scores)
                if mask is not None and mask.is_floating_point():  # it can hold more than 0 for every visible token
                    update((scores + mask).masked_fill(mask <= MASKED / 2, 0))
            return func(*args, **options)

    hooks = [
        module.register_forward_hook(lambda _, inputs, output: update(*inputs, output)) for module in model.modules()
    ]
    try:
        with AttentionScores():
            model(*map(torch.from_numpy, inputs))
    finally:
        for handle in hooks:
            handle.remove()
    return max_abs


def max_abs_values(model: onnx_ir.Model, run_golden: Callable[[Run, None], object], folder: Path) -> dict[str, float]:
    """Value of the outermost graph → largest absolute FP32 number in it; NaN counts as infinite.

    The graph is run with its inner values as outputs. ``run_golden`` makes the golden calls, see
    :meth:`~edgeformer.tasks.Task.golden_outputs`; ``folder`` is for a temporary copy of the graph.
    """
    probe = lifted(model)
    outputs = list(probe.graph.outputs)
    inner = [value for node in probe.graph for value in node.outputs if value.name and value not in outputs]
    max_abs: dict[str, float] = {}

    def run(inputs: Arrays) -> Arrays:
        # A sequence is a list of arrays; its elements are values of other nodes.
        outputs = {name: array for name, array in session.run(inputs).items() if isinstance(array, np.ndarray)}
        for name, array in outputs.items():
            if array.dtype == np.float32 and array.size:
                largest = float(np.nan_to_num(np.abs(array).max(), nan=np.inf))
                max_abs[name] = max(max_abs.get(name, 0.0), largest)
        return outputs

    with tempfile.TemporaryDirectory(prefix=".reach-", dir=folder) as temporary:
        for start in range(0, len(inner), _VALUES_PER_RUN) or (0,):
            probe.graph.outputs[:] = [*outputs, *inner[start : start + _VALUES_PER_RUN]]
            path = Path(temporary, f"{start}.onnx")
            onnx_ir.save(probe, path, external_data=f"{start}.data")
            with OnnxSession(path) as session:
                run_golden(run, None)
    return max_abs


def lifted(model: onnx_ir.Model) -> onnx_ir.Model:
    """Copy a graph without functions; every node has a name, and every stored tensor is an initializer of the outermost
    graph, and no input.

    Raises EdgeformerError: a node reads what onnx_ir does not load.
    """
    for value in (value for node in model.graph for value in node.inputs if value is not None):
        if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
            raise EdgeformerError(
                f"node input {value.name!r} has no source that can be converted; if it is a sparse initializer, export "
                "the model with dense weights"
            )
    copied = model.clone()
    copied.ir_version = max(copied.ir_version, _SEPARATE_INITIALIZERS)
    passes.RemoveInitializersFromInputsPass()(copied)
    passes.InlinePass()(copied)
    passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(copied)
    passes.LiftSubgraphInitializersToMainGraphPass()(copied)
    passes.RemoveUnusedNodesPass()(copied)
    passes.NameFixPass()(copied)
    return copied


def operator_names(model: onnx_ir.Model) -> str:
    """Return the operators of a graph and its subgraphs for a message, the most frequent ones first."""
    counts = Counter(node.op_type for node in RecursiveGraphIterator(model.graph))
    names = [name for name, _ in counts.most_common(_MAX_LISTED)]
    return ", ".join([*names, "…"] if len(counts) > _MAX_LISTED else names) or "it has none"


def convert_to_fp16(model: onnx_ir.Model, max_abs: Mapping[str, float]) -> onnx_ir.Model:
    """Convert an FP32 graph where that is safe, by :func:`max_abs_values`; ``model`` is left unchanged.

    Raises EdgeformerError if no node can compute in FP16.
    """
    converted = lifted(model)
    passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(converted)
    # It leaves types open inside subgraphs, and behind operators of ONNX Runtime.
    for node in RecursiveGraphIterator(converted.graph):
        operands = [value for value in node.inputs[node.op_type == "Where" :] if value is not None]
        if node.domain or not node.outputs or node.outputs[0].dtype is not None or not operands:
            continue
        dtype: onnx_ir.DataType | None = None
        if node.op_type == "Cast":
            dtype = onnx_ir.DataType(node.attributes.get_int("to", 1))
        elif node.op_type.startswith("Reduce") or node.op_type in _TYPE_OF_FIRST_OPERAND:
            dtype = operands[0].dtype
        if dtype is not None:
            for value in node.outputs:
                value.dtype = dtype
    conversion = _Conversion(converted.graph, max_abs)
    for value in converted.graph.initializers.values():
        if np.abs(_float_numbers(value)).max(initial=0) > FP16_MAX:
            conversion.out_of_range.add(value)
    is_converted = [conversion.convert(node) for node in list(RecursiveGraphIterator(converted.graph))]
    if not any(is_converted):
        raise EdgeformerError(
            f"FP16: no operator of the graph can compute in FP16 ({operator_names(converted)}); it stays FP32"
        )
    passes.RemoveUnusedNodesPass()(converted)
    return converted


@dataclass
class _Conversion:
    """State of one conversion: FP32 value → its FP16 copy, and values that hold numbers beyond FP16's range."""

    main: onnx_ir.Graph
    max_abs: Mapping[str, float]
    halves: dict[onnx_ir.Value, onnx_ir.Value] = field(default_factory=dict)
    out_of_range: set[onnx_ir.Value] = field(default_factory=set)

    def convert(self, node: onnx_ir.Node) -> bool:
        """Replace a node by one that computes in FP16, if that is safe; its consumers may go on reading FP32."""
        operands = [value for value in node.inputs if value is not None and value.dtype == _FLOAT]
        results = [value for value in node.outputs if value.dtype == _FLOAT]
        if node.op_type not in _BOUNDED_RESULT and self.out_of_range.intersection(node.inputs):
            self.out_of_range.update(node.outputs)
        is_safe = node.domain in ("", "ai.onnx") and node.op_type in _SAFE_OPERATORS and bool(operands and results)
        if not is_safe or self.out_of_range.intersection((*operands, *results)):
            return False
        if any(self.max_abs.get(str(value.name), 0.0) > SAFE_ACTIVATION for value in (*operands, *results)):
            return False
        if node.op_type == "Div" and not (node.inputs[1] is not None and node.inputs[1].is_initializer()):
            return False
        for value in operands:  # an ε that FP16 rounds to 0
            numbers = _float_numbers(value)
            if numbers.size <= _SMALL_CONSTANT and ((numbers != 0) & (np.abs(numbers) < FP16_MIN_NORMAL)).any():
                return False
        inputs = [self._half(value) if value is not None and value.dtype == _FLOAT else value for value in node.inputs]
        half_node = onnx_ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs),
            name=node.name,
        )  # fmt: skip
        casts: list[onnx_ir.Node] = []
        new_results: list[onnx_ir.Value] = []
        for old, half in zip(node.outputs, half_node.outputs, strict=True):
            result = half
            if old.dtype == _FLOAT:
                casts.append(onnx_ir.node("Cast", [half], {"to": int(_FLOAT)}, name=f"{old.name}_widened"))
                result = casts[-1].outputs[0]
                half.name, half.shape, half.dtype = f"{old.name}_half", old.shape, _HALF
                self.halves[result] = half
            new_results.append(result)
        assert node.graph is not None
        new_nodes = [half_node, *casts]
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], new_nodes, node.outputs, new_results)
        return True

    def _half(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """Return the FP16 copy of a value: a stored one of a weight, whose FP32 consumers read a cast of it."""
        if value in self.halves:
            return self.halves[value]
        graph, name, tensor = self.main, str(value.name), value.const_value
        if value.is_initializer():
            assert tensor is not None
            half_tensor = onnx_ir.tensor(tensor.numpy().astype(np.float16), name=f"{name}_half")
            half = onnx_ir.val(f"{name}_half", const_value=half_tensor)
            graph.register_initializer(half)
            if tensor.size > _SMALL_CONSTANT:
                cast = cast_node(half, _FLOAT, f"{name}_widened", name)
                widened = cast.outputs[0]
                graph.initializers.pop(name)
                onnx_ir.convenience.replace_all_uses_with(value, widened)
                graph.insert_before(graph[0], cast)
                self.halves[widened] = half
        else:
            producer = value.producer()
            source = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else None
            if source is not None and source.dtype == _HALF:
                # ONNX Runtime removes both of two casts that cancel, although a subgraph reads the result.
                self.halves[value] = source
                return source
            cast = cast_node(value, _HALF, f"{name}_narrowed", f"{name}_half")
            half = cast.outputs[0]
            if producer is not None and producer.graph is not None:
                producer.graph.insert_after(producer, cast)
            else:
                graph = value.graph if value.graph is not None else graph
                graph.insert_before(graph[0], cast)
        self.halves[value] = half
        return half


def _float_numbers(value: onnx_ir.Value) -> NDArray[Any]:
    """Numbers of a stored FP32 tensor; empty for other values."""
    tensor = value.const_value
    return tensor.numpy() if tensor is not None and tensor.dtype == _FLOAT else np.empty(0, np.float32)
