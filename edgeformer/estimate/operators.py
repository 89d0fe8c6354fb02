"""Operations and bytes of executed graph nodes, and how far estimates of each kind of operator were checked.

Published measurements of convolutional networks check convolutions and what pools or resizes; a calibration checks what
it was fitted on. Of an operator that is in no list here even the work is unknown.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgeformer.artifacts.device import OperatorClass
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Work
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

CONVOLUTIONS = {"Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv", "ConvTranspose"}
MATRIX_PRODUCTS = {
    "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "MatMulNBits", "QLinearMatMul", "QGemm",
}  # fmt: skip
PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS
FUSED_ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
LOOKUPS = {"Gather", "GatherBlockQuantized", "GatherND", "GatherElements", "EmbedLayerNormalization"}
# They give the same bytes another shape; runtimes let input and output share the memory.
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size"}
MOVES = {
    "Transpose", "Slice", "Concat", "Split", "Cast", "Expand", "Tile", "Pad", "Where", "ConstantOfShape", "Range",
    "MemcpyFromHost", "MemcpyToHost", "ScatterND", "ScatterElements", "ReorderInput", "ReorderOutput", "Constant",
    "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
# They read as much of their first input as they write.
PARTIAL = {"Slice", "Split", "Expand", "Gather", "GatherBlockQuantized", "GatherND", "GatherElements"}
CONTROL = {"If", "Loop", "Scan"}  # operators whose bodies are listed separately, once per iteration
_ELEMENTWISE = {
    "Abs", "Add", "And", "BatchNormalization", "BiasAdd", "BiasGelu", "BiasSoftmax", "BitShift", "Ceil", "Clip", "Cos",
    "CumSum", "DequantizeLinear", "Div", "Dropout", "DynamicQuantizeLinear", "Elu", "Equal", "Erf", "Exp", "FastGelu",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LayerNormalization",
    "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "Max", "Mean", "Min", "Mod", "Mul",
    "Neg", "Not", "OneHot", "Or", "PRelu", "Pow", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QuantizeLinear",
    "QuickGelu", "RMSNormalization", "Reciprocal", "Relu", "RotaryEmbedding", "Round", "Selu", "Sigmoid", "Sign", "Sin",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax", "Softplus",
    "Softsign", "Sqrt", "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Trilu", "Xor",
}  # fmt: skip
_WINDOWS = {
    "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "Resize", "Upsample", "LRN",
    "InstanceNormalization", "GroupNorm", "GroupNormalization", "ArgMax", "ArgMin", "TopK", "MeanVarianceNormalization",
}  # fmt: skip
_COUNTED = MATRIX_PRODUCTS | FUSED_ATTENTION | LOOKUPS | VIEWS | MOVES | CONTROL | _ELEMENTWISE
# Sums over an axis: a fused kernel ends there, since every later element needs the sum.
_REDUCTIONS = ("Softmax", "LayerNormalization", "Reduce", "LpNormalization", "InstanceNormalization", "CumSum")
_STORED_BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 1}
"""Bytes of a listed weight element; an element of packed INT4 weights holds two weights."""
_CPU_CAST = "InsertedPrecisionFreeCast"
_FLOATS = ("float", "float16", "bfloat16", "double")
# Arithmetic per written element, as passes of a polynomial; other operators count one.
_PER_ELEMENT = {"Softmax": 5.0, "SimplifiedLayerNormalization": 4.0, "LayerNormalization": 5.0, "QuickGelu": 5.0}

Trust = Literal["checked", "convolution", "narrow", "window", "unknown"]
"""``checked``: every calibration checks its estimates; ``narrow`` is a convolution of one channel at a time."""


MOST_UNKNOWN = 0.1
"""Largest share of time that moving the data of operators without a work count may take; they may take ten times it."""


@dataclass(frozen=True)
class NodeWork:
    """Work of one executed node."""

    cls: OperatorClass
    operator: str  # ONNX name, or ``product of activations``
    operations: float  # a multiplication and an addition are two
    weight_bytes: float  # constants that it reads (matrix products only: tables are read in part)
    moved_bytes: float  # activations read and written
    host_only: bool = False  # bookkeeping on shapes; on a GPU it runs beside the device or was folded away
    reduces: bool = False  # it sums over an axis, where a fused kernel ends
    quantized: bool = False
    trust: Trust = "checked"

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.moved_bytes

    @property
    def is_product(self) -> bool:
        """A matrix product, with weights or between activations."""
        return self.cls in ("gemm", "attention") and not self.reduces


def trust_of(node: ExecutedNode) -> Trust:
    """Return how far estimates of a node's operator were checked."""
    if node.op in CONVOLUTIONS:
        kernel = node.inputs[1].shape if len(node.inputs) > 1 else ()
        return "narrow" if len(kernel) > 2 and kernel[1] == 1 and kernel[0] > 1 else "convolution"
    if node.op in _WINDOWS:
        return "window"
    return "checked" if node.op in _COUNTED or node.op.startswith("Reduce") else "unknown"


def count_node(node: ExecutedNode, float_bytes: int | None = None) -> NodeWork:
    """Return the work of one node.

    ``float_bytes``: of one float on the device; None: as listed. A CPU lists an FP16 graph as it computes it, in FP32.
    """

    def size(tensors: Iterable[Tensor]) -> float:
        return float(sum(t.elements * float_bytes if float_bytes and t.dtype in _FLOATS else t.bytes for t in tensors))

    cls, inputs, outputs = _class_of(node), node.inputs, node.outputs
    if node.op in PRODUCTS or node.op in FUSED_ATTENTION:
        weight_inputs = _weight_inputs(node)
        weights = [inputs[index] for index in weight_inputs]
        activations = [tensor for index, tensor in enumerate(inputs) if index not in weight_inputs]
        operator = "product of activations" if cls == "attention" and node.op in PRODUCTS else node.op
        first, out = inputs[0], outputs[0]
        if node.op in CONVOLUTIONS:
            # 2 × outputs × (channels of a group × kernel). Kernels are [C out, C in / groups, …]; of a transposed
            # convolution [C in, C out / groups, …], where every input meets all of its channel's kernel.
            kernel, positions = inputs[1], first if node.op == "ConvTranspose" else out
            operations = 2.0 * positions.elements * kernel.elements / max(1, kernel.shape[0] if kernel.shape else 1)
        elif node.op in FUSED_ATTENTION:
            # The keys that it passes on include those of earlier tokens.
            key = outputs[1].shape if len(outputs) > 1 else inputs[min(1, len(inputs) - 1)].shape
            operations = 4.0 * out.elements * (key[-2] if len(key) > 1 else 1) if first.shape else 0.0
        elif node.op == "MatMulNBits":  # its weight is listed as it is packed
            operations = 2.0 * out.elements * (first.shape[-1] if first.shape else 1)
        else:
            # [..., M, K] × [K, N]: K is the right operand's elements over its columns, whatever is transposed.
            second, columns = inputs[1], out.shape[-1] if out.shape else 1
            inner = second.elements / max(1, math.prod(second.shape[:-2]) * columns)
            operations = 2.0 * out.elements * inner if first.elements else 0.0
        return NodeWork(
            cls, operator, operations, size(weights), size(activations) + size(outputs),
            quantized=any(tensor.dtype in ("int8", "uint8") for tensor in weights), trust=trust_of(node),
        )  # fmt: skip
    if node.op in VIEWS | CONTROL:
        moved = 0.0
    elif node.op in PARTIAL:
        moved = 2 * size(outputs)
    else:
        moved = size(inputs) + size(outputs)
    per_element = 0.0 if cls in ("layout", "lookup") else _PER_ELEMENT.get(node.op, 1.0)
    operations = per_element * sum(tensor.elements for tensor in outputs)
    on_shapes = all(tensor.dtype == "int64" and tensor.elements <= 64 for tensor in outputs)
    return NodeWork(
        cls, node.op, operations, 0.0, moved,
        host_only=node.op == "Shape" or node.op in CONTROL or on_shapes,
        reduces=node.op.endswith(_REDUCTIONS[:2]) or node.op.startswith(_REDUCTIONS), trust=trust_of(node),
    )  # fmt: skip


def count_nodes(nodes: Sequence[ExecutedNode], float_bytes: int | None = None) -> list[NodeWork]:
    """Return the work of every node. With ``float_bytes``, the casts that only CPUs need for FP16 are left out."""
    nodes = _with_cast_weights(nodes)
    return [count_node(node, float_bytes) for node in nodes if float_bytes is None or _CPU_CAST not in node.name]


def _with_cast_weights(nodes: Sequence[ExecutedNode]) -> list[ExecutedNode]:
    """Count the weights of FP16 graphs, which a CPU widens with casts first, as parameters of their products."""
    cast = {
        node.outputs[0] for node in nodes if _CPU_CAST in node.name and 0 < node.inputs[0].bytes <= node.parameter_bytes
    }
    return [
        replace(node, parameter_bytes=node.parameter_bytes + node.inputs[1].bytes)
        if node.op in PRODUCTS and node.inputs[1] in cast and not _weight_inputs(node)
        else node
        for node in nodes
    ]


def total(works: Sequence[NodeWork]) -> Work:
    return Work(
        operations=sum(work.operations for work in works), bytes_moved=sum(work.bytes for work in works),
        weight_bytes=sum(work.weight_bytes for work in works), operators=len(works), kernels=len(fuse(works)),
    )  # fmt: skip


def fuse(works: Sequence[NodeWork]) -> list[list[NodeWork]]:
    """Group nodes into the kernels of a compiler that fuses: each product, and what lies between two products.

    A sum over an axis (norm, softmax) starts a new one. Nodes that only name or shape data belong to none.
    """
    kernels: list[list[NodeWork]] = []
    open_chain = False
    for work in works:
        if work.host_only or (work.bytes == 0 and not work.is_product):
            continue
        if open_chain and not work.is_product and not work.reduces:
            kernels[-1].append(work)
        else:
            kernels.append([work])
            open_chain = not work.is_product
    return kernels


def stored_weight_bytes(nodes: Sequence[ExecutedNode], works: Sequence[NodeWork], artifact: ArtifactManifest) -> float:
    """Return the bytes of all products' weights, each counted once however often a loop reads it.

    The profiler does not name weights. They are the bytes that the file stores, by the manifest, without its tables.
    """
    read = sum(work.weight_bytes for work in works)
    if artifact.sharing is None:
        return read
    nodes = _with_cast_weights(nodes)
    products = {node.inputs[1].elements for node in nodes if _class_of(node) == "gemm"}
    lookups = [node for node in nodes if _class_of(node) == "lookup"]
    tables = {node.inputs[0] for node in lookups if node.parameter_bytes >= node.inputs[0].bytes}
    # A head that uses the embedding table as its weights reads all of it.
    embedding_bytes = sum(table.bytes for table in tables if table.elements not in products)
    stored = float(max(0, artifact.sharing.weight_bytes - embedding_bytes))
    weights = [node.inputs[index] for node in nodes if node.op in PRODUCTS for index in _weight_inputs(node)]
    computed = sum(weight.elements for weight in weights)
    wider = read / computed / _STORED_BYTES[artifact.precision] if computed else 1.0
    return min(read, max(stored * wider, max((work.weight_bytes for work in works), default=0.0)))


def _class_of(node: ExecutedNode) -> OperatorClass:
    if node.op in PRODUCTS:
        return "gemm" if _weight_inputs(node) else "attention"
    if node.op in FUSED_ATTENTION or node.op.endswith("Softmax"):
        return "attention"
    if node.op in LOOKUPS:
        # Gather also picks sizes out of a shape; only rows of a table of floats are a lookup.
        return "lookup" if node.inputs and len(node.inputs[0].shape) > 1 else "layout"
    return "layout" if node.op in VIEWS | MOVES | CONTROL else "elementwise"


def _weight_inputs(node: ExecutedNode) -> tuple[int, ...]:
    """Return the constant inputs of a product. The profiler gives only their total bytes: the second input first."""
    remaining = node.parameter_bytes
    weights: list[int] = []
    for index, tensor in enumerate(node.inputs[1:], start=1):
        if tensor.elements > 1 and tensor.bytes <= remaining:
            weights.append(index)
            remaining -= tensor.bytes
    # A bias alone is no weight: Gemm between activations with a constant third input.
    return tuple(weights) if 1 in weights else ()


def describe_operators(counts: Counter[str]) -> str:
    """Return ``Conv (62), Resize (6)``: the most frequent operators with their counts."""
    frequent = counts.most_common(5)
    return ", ".join(f"{name} ({count})" for name, count in frequent) + (", …" if len(counts) > len(frequent) else "")
