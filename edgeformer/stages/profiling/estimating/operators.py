"""Kinds of operators: how their work is counted, and whether estimates of them were ever held against a measurement.

The estimator was checked on transformers. Operators that those have are trusted as far as its error says; the work of
convolutions and of recurrent ones is counted by their formulas, but how close to its peaks a device gets with them was
never checked; of what is in no list here, not even the work is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode, Tensor

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
"""What they hold is listed by itself, as often as it ran."""

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
    """By how much an operator's time may be less than the range's low end, and more than its high end."""

    less: float
    more: float


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
"""Share of the time that operators may take whose work nobody can count; beyond it there is no estimate."""


def trust_of(node: ExecutedNode) -> Trust:
    """How the estimate of a node is known."""
    if node.op in CONVOLUTIONS | TRANSPOSED:
        kernel = node.inputs[1].shape if len(node.inputs) > 1 else ()
        return "narrow" if len(kernel) > 2 and kernel[1] == 1 and kernel[0] > 1 else "convolution"
    if node.op in RECURRENT:
        return "recurrent"
    if node.op in _WINDOWS:
        return "window"
    known = MATRIX_PRODUCTS | WHOLE_ATTENTION | LOOKUPS | RENAMES | MOVES | CONTROL | _ELEMENTWISE
    return "checked" if node.op in known or node.op.startswith("Reduce") else "unknown"


def convolution_operations(node: ExecutedNode) -> float:
    """2 × outputs × (channels of a group × kernel), as a product of matrices would need them.

    Kernels are [C out, C in / groups, …]; of a transposed one [C in, C out / groups, …], and every input meets all of
    its channel's.
    """
    kernel, at = node.inputs[1], node.inputs[0] if node.op in TRANSPOSED else node.outputs[0]
    return 2.0 * at.elements * kernel.elements / max(1, kernel.shape[0] if kernel.shape else 1)


def recurrent_operations(node: ExecutedNode) -> float:
    """2 × steps × rows × directions × gates × H × (I + H), for X [steps, rows, I] and W [directions, gates × H, I]."""
    (steps, rows, width), (directions, gates, _) = node.inputs[0].shape, node.inputs[1].shape
    hidden = gates // RECURRENT[node.op]
    return 2.0 * steps * rows * directions * gates * (width + hidden)


def recurrent_rereads(node: ExecutedNode, weights: Iterable[Tensor]) -> list[Tensor]:
    """The weights as a step-by-step loop reads them: those of the state once in every step."""
    steps = node.inputs[0].shape[0] if node.inputs[0].shape else 1
    state = node.inputs[2] if len(node.inputs) > 2 else None
    return [again for tensor in weights for again in [tensor] * (steps if tensor is state else 1)]


def unchecked_words(counts: Counter[str]) -> str:
    """``Conv (62), Resize (6)``: operators that the estimator was never checked on, the most frequent ones."""
    most = counts.most_common(5)
    return ", ".join(f"{name} ({count})" for name, count in most) + (", …" if len(counts) > len(most) else "")
