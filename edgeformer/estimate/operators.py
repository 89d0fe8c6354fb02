"""Kinds of operators: how their work is counted, and whether estimates of them were ever held against a measurement.

The estimator was checked on transformers. Operators that those have are trusted as far as its error says; the work of
convolutions and of recurrent ones is counted by their formulas, but how close to its peaks a device gets with them was
never checked; of what is in no list here, not even the work is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgeformer.artifacts.device import OperatorClass
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Work
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

CONVOLUTIONS = {"Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"}
TRANSPOSED = {"ConvTranspose"}
RECURRENT = {"LSTM": 4, "DynamicQuantizeLSTM": 4, "GRU": 3, "RNN": 1}
"""Operator → products of a step: gates, and what is kept."""

MATRIX_PRODUCTS = {
    "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "MatMulNBits", "QLinearMatMul", "QGemm",
}  # fmt: skip
PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS | TRANSPOSED | RECURRENT.keys()
WHOLE_ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
LOOKUPS = {"Gather", "GatherBlockQuantized", "GatherND", "GatherElements", "EmbedLayerNormalization"}
# They give the same bytes another shape; runtimes let input and output share the memory.
RENAMES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size"}
MOVES = {
    "Transpose", "Slice", "Concat", "Split", "Cast", "Expand", "Tile", "Pad", "Where", "ConstantOfShape", "Range",
    "MemcpyFromHost", "MemcpyToHost", "ScatterND", "ScatterElements", "ReorderInput", "ReorderOutput", "Constant",
    "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
# They read a part of their first input, as many bytes as they write.
PARTIAL = {"Slice", "Split", "Expand", "Gather", "GatherBlockQuantized", "GatherND", "GatherElements"}
CONTROL = {"If", "Loop", "Scan"}
"""Operators whose bodies are listed separately, once per iteration."""

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

Trust = Literal["checked", "convolution", "narrow", "recurrent", "window", "unknown"]
"""How an operator's estimate is known: ``narrow`` is a convolution of one channel at a time."""


@dataclass(frozen=True)
class Doubt:
    """Factors by which an operator may be faster than the low end, and slower than the high end, of its range."""

    faster: float
    slower: float


DOUBTS: dict[Trust, Doubt] = {
    "checked": Doubt(1.0, 1.0),
    # Winograd's algorithm needs 2.25 times fewer multiplications than are counted (3 × 3 on tiles of 2 × 2).
    "convolution": Doubt(2.25, 2.0),
    # One channel at a time is no product of matrices: 5 to 10 % of the peak are usual.
    "narrow": Doubt(2.25, 6.0),
    # Step by step, with products of few rows.
    "recurrent": Doubt(1.5, 4.0),
    # On one CPU up to 1.5 times the high end (Resize).
    "window": Doubt(1.5, 4.0),
    "unknown": Doubt(2.0, 10.0),
}
MOST_UNKNOWN = 0.5
"""Largest share of time of operators without a work count; beyond it there is no estimate."""


def trust_of(node: ExecutedNode) -> Trust:
    """How the estimate of a node is known."""
    if node.op in CONVOLUTIONS | TRANSPOSED:
        kernel = node.inputs[1].shape if len(node.inputs) > 1 else ()
        return "narrow" if len(kernel) > 2 and kernel[1] == 1 and kernel[0] > 1 else "convolution"
    if node.op in RECURRENT:
        return "recurrent"
    if node.op in _WINDOWS:
        return "window"
    counted = MATRIX_PRODUCTS | WHOLE_ATTENTION | LOOKUPS | RENAMES | MOVES | CONTROL | _ELEMENTWISE
    return "checked" if node.op in counted or node.op.startswith("Reduce") else "unknown"


def convolution_operations(node: ExecutedNode) -> float:
    """2 × outputs × (channels of a group × kernel), as a product of matrices would need them.

    Kernels are [C out, C in / groups, …]; of a transposed one [C in, C out / groups, …], and every input meets all of
    its channel's.
    """
    kernel, positions = node.inputs[1], node.inputs[0] if node.op in TRANSPOSED else node.outputs[0]
    return 2.0 * positions.elements * kernel.elements / max(1, kernel.shape[0] if kernel.shape else 1)


def recurrent_operations(node: ExecutedNode) -> float:
    """2 × steps × rows × directions × gates × H × (I + H), for X [steps, rows, I] and W [directions, gates × H, I]."""
    (steps, rows, width), (directions, gates, _) = node.inputs[0].shape, node.inputs[1].shape
    hidden = gates // RECURRENT[node.op]
    return 2.0 * steps * rows * directions * gates * (width + hidden)


def recurrent_rereads(node: ExecutedNode, weights: Iterable[Tensor]) -> list[Tensor]:
    """The weights as a step-by-step loop reads them: those of the state once in every step."""
    steps = node.inputs[0].shape[0] if node.inputs[0].shape else 1
    state = node.inputs[2] if len(node.inputs) > 2 else None
    return [repeated for tensor in weights for repeated in [tensor] * (steps if tensor is state else 1)]


def unchecked_words(counts: Counter[str]) -> str:
    """``Conv (62), Resize (6)``: operators that the estimator was never checked on, the most frequent ones."""
    frequent = counts.most_common(5)
    return ", ".join(f"{name} ({count})" for name, count in frequent) + (", …" if len(counts) > len(frequent) else "")


# Operations and bytes of executed nodes: what each one computes, and what it moves. Pure functions.


# Sums over an axis: a fused kernel ends there, since every later element needs the sum.
_REDUCTIONS = ("Softmax", "LayerNormalization", "Reduce", "LpNormalization", "InstanceNormalization", "CumSum")
_STORED_BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 1}
"""Of an element as it is listed; one of packed weights holds two of 4 bits."""

_CPU_CAST = "InsertedPrecisionFreeCast"
_FLOATS = ("float", "float16", "bfloat16", "double")
# Arithmetic per element written, counted as one pass of a polynomial or a few passes; only for `operations`.
_PER_ELEMENT = {"Softmax": 5.0, "SimplifiedLayerNormalization": 4.0, "LayerNormalization": 5.0, "QuickGelu": 5.0}


BROADCAST = " broadcast"
"""How the key of an operator ends that meets tensors of several sizes."""


@dataclass(frozen=True)
class NodeWork:
    """What one node does.

    Attributes:
        key: operator, split where its cost per byte differs: ``Mul broadcast``.
        operations: a multiplication and an addition are two.
        weight_bytes: constants that it reads (matrix products only: tables are read in part).
        moved_bytes: activations read and written.
        rows, columns: of a product's result, batches and heads counted among the rows.
        host_only: bookkeeping on shapes; on a GPU it happens beside the device or was folded away.
        trust: whether estimates of such a node were ever checked.
    """

    cls: OperatorClass
    key: str
    operations: float
    weight_bytes: float
    moved_bytes: float
    rows: int = 1
    columns: int = 1
    host_only: bool = False
    reduces: bool = False
    quantized: bool = False
    trust: Trust = "checked"

    @property
    def bytes(self) -> float:
        """All bytes read and written."""
        return self.weight_bytes + self.moved_bytes

    @property
    def is_product(self) -> bool:
        """A matrix product, with weights or between activations."""
        return self.cls in ("gemm", "attention") and not self.reduces


def count_node(node: ExecutedNode, float_bytes: int | None = None) -> NodeWork:
    """The work of one node.

    Args:
        float_bytes: bytes of one float on the device where they differ from the listing's: an FP16 graph that a CPU
            has listed computes in FP32 there. None: as listed.
    """

    def size(tensors: Iterable[Tensor]) -> float:
        narrow = float_bytes or 0
        return float(sum(t.elements * narrow if narrow and t.dtype in _FLOATS else t.bytes for t in tensors))

    cls, inputs, outputs = _class_of(node), node.inputs, node.outputs
    written = sum(tensor.elements for tensor in outputs)
    if node.op in PRODUCTS or node.op in WHOLE_ATTENTION:
        constant = _weights(node)
        weights = [inputs[place] for place in constant]
        activations = [tensor for place, tensor in enumerate(inputs) if place not in constant]
        columns = _columns(node)
        read = recurrent_rereads(node, weights) if node.op in RECURRENT else weights
        return NodeWork(
            cls, _key(node), _product_operations(node), size(read), size(activations) + size(outputs),
            rows=written // columns if columns else 1, columns=columns,
            quantized=any(tensor.dtype in ("int8", "uint8") for tensor in weights), trust=trust_of(node),
        )  # fmt: skip
    if node.op in RENAMES | CONTROL:
        moved = 0.0
    elif node.op in PARTIAL:
        moved = 2 * size(outputs)
    else:
        moved = size(inputs) + size(outputs)
    layout = cls in ("layout", "lookup")
    return NodeWork(
        cls,
        _key(node),
        0.0 if layout else written * _PER_ELEMENT.get(node.op, 1.0),
        0.0,
        moved,
        host_only=node.op == "Shape"
        or node.op in CONTROL
        or all(t.dtype == "int64" and t.elements <= 64 for t in outputs),
        reduces=node.op.endswith(_REDUCTIONS[:2]) or node.op.startswith(_REDUCTIONS),
        trust=trust_of(node),
    )


def count_nodes(nodes: Sequence[ExecutedNode], float_bytes: int | None = None) -> list[NodeWork]:
    """The work of a whole call.

    Args:
        nodes: of the call.
        float_bytes: as :func:`count_node` takes it; with it the casts that only CPUs need for FP16 are left out.
    """
    kept = [node for node in known_weights(nodes) if float_bytes is None or _CPU_CAST not in node.name]
    return [count_node(node, float_bytes) for node in kept]


def known_weights(nodes: Sequence[ExecutedNode]) -> list[ExecutedNode]:
    """The same nodes, with the weights of FP16 graphs counted as products' parameters again.

    CPUs widen each of them with a cast before the product, which then reads an ordinary tensor of the same shape.
    """
    cast = {
        node.outputs[0] for node in nodes if _CPU_CAST in node.name and 0 < node.inputs[0].bytes <= node.parameter_bytes
    }
    return [
        replace(node, parameter_bytes=node.parameter_bytes + node.inputs[1].bytes)
        if node.op in PRODUCTS and node.inputs[1] in cast and not _weights(node)
        else node
        for node in nodes
    ]


def total(works: Sequence[NodeWork]) -> Work:
    """Sum over a call."""
    return Work(
        operations=sum(work.operations for work in works),
        bytes_moved=sum(work.bytes for work in works),
        weight_bytes=sum(work.weight_bytes for work in works),
        operators=len(works),
        kernels=len(fuse(works)),
    )


def fuse(works: Sequence[NodeWork]) -> list[list[NodeWork]]:
    """Kernels of a compiler that fuses: a product each; what lies between products becomes one kernel, but a sum over
    an axis (norm, softmax) begins a new one. Nodes that only name or shape data belong to none."""
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


def _class_of(node: ExecutedNode) -> OperatorClass:
    if node.op in PRODUCTS:
        return "gemm" if _weights(node) else "attention"
    if node.op in WHOLE_ATTENTION or node.op.endswith("Softmax"):
        return "attention"
    if node.op in LOOKUPS:
        # Gather also picks sizes out of a shape; only rows of a table of floats are a lookup.
        return "lookup" if node.inputs and len(node.inputs[0].shape) > 1 else "layout"
    return "layout" if node.op in RENAMES | MOVES | CONTROL else "elementwise"


def _weights(node: ExecutedNode) -> tuple[int, ...]:
    """Which inputs of a product are constant. The profiler gives only their bytes together: the second input first."""
    remaining = node.parameter_bytes
    weights: list[int] = []
    for place, tensor in enumerate(node.inputs[1:], start=1):
        if tensor.elements > 1 and tensor.bytes <= remaining:
            weights.append(place)
            remaining -= tensor.bytes
    # A bias alone makes no weight: Gemm between activations with a constant third input.
    return tuple(weights) if 1 in weights else ()


def _product_operations(node: ExecutedNode) -> float:
    if node.op in CONVOLUTIONS | TRANSPOSED:
        return convolution_operations(node)
    if node.op in RECURRENT:
        return recurrent_operations(node)
    if node.op in WHOLE_ATTENTION:
        query, key = node.inputs[0].shape, node.inputs[min(1, len(node.inputs) - 1)].shape
        if len(node.outputs) > 1:  # the keys that it passes on hold those of earlier tokens
            key = node.outputs[1].shape
        length = key[-2] if len(key) > 1 else 1
        return 4.0 * node.outputs[0].elements * length if query else 0.0
    # [..., M, K] × [K, N]: the inner size K is the left operand's elements over its rows, whatever is transposed.
    first, second, out = node.inputs[0], node.inputs[1], node.outputs[0]
    if node.op == "MatMulNBits":  # its weight is listed as it is packed
        return 2.0 * out.elements * (first.shape[-1] if first.shape else 1)
    inner = second.elements / max(1, math.prod(second.shape[:-2]) * _columns(node))
    return 2.0 * out.elements * inner if first.elements else 0.0


def _columns(node: ExecutedNode) -> int:
    """Of a product's result: the last axis, of a convolution its channels."""
    shape = node.outputs[0].shape
    if node.op in CONVOLUTIONS | TRANSPOSED and len(shape) > 1:
        return shape[1]
    return shape[-1] if shape else 1


def _key(node: ExecutedNode) -> str:
    if _class_of(node) == "attention" and node.op in PRODUCTS:
        return "product of activations"
    arrays = [tensor.elements for tensor in node.inputs if tensor.elements > 1]
    broadcasts = len(arrays) > 1 and min(arrays) < max(arrays)
    return f"{node.op}{BROADCAST}" if broadcasts and _class_of(node) == "elementwise" else node.op


def stored_weight_bytes(nodes: Sequence[ExecutedNode], works: Sequence[NodeWork], artifact: ArtifactManifest) -> float:
    """Weights of all products, each counted once however often a loop reads it, in the bytes that are computed with.

    The profiler does not name weights, but the manifest says how many bytes the file stores: what is left of them
    without the tables is what the products share.

    Args:
        nodes: of one call.
        works: theirs, as :func:`count_nodes` gives it.
        artifact: whose nodes they are.
    """
    read = sum(work.weight_bytes for work in works)
    if artifact.sharing is None:
        return read
    nodes = known_weights(nodes)
    products = {node.inputs[1].elements for node in nodes if _class_of(node) == "gemm"}
    lookups = [node for node in nodes if _class_of(node) == "lookup"]
    tables = {node.inputs[0] for node in lookups if node.parameter_bytes >= node.inputs[0].bytes}
    # A head that uses the embedding table as its weights reads all of it.
    embedding_bytes = sum(table.bytes for table in tables if table.elements not in products)
    stored = float(max(0, artifact.sharing.weight_bytes - embedding_bytes))
    weights = [node.inputs[place] for node in nodes if node.op in PRODUCTS for place in _weights(node)]
    computed = sum(weight.elements for weight in weights)
    wider = read / computed / _STORED_BYTES[artifact.precision] if computed else 1.0
    return min(read, max(stored * wider, max((work.weight_bytes for work in works), default=0.0)))
