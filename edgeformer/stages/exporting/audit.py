"""What an ONNX file really stores: parameters against the model's, types, and operators left in FP32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import onnx
from onnx import TensorProto

from edgeformer.formats.manifest import Sharing

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_HALF_BYTES = {TensorProto.INT4, TensorProto.UINT4}
INTEGERS = {TensorProto.INT8, TensorProto.UINT8} | _HALF_BYTES
"""What quantised weights are stored in."""
NO_PARAMETERS = ("cos", "sin", "running_mean", "running_var")
"""What a model stores beside its parameters: the rotary table, running statistics of a batch normalisation."""

_PACKED = "MatMulNBits"
_PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", _PACKED)

QUANTIZED, SCALE, ZERO_POINT = "_quantized", "_scale", "_zero_point"
"""How the names of a quantised weight, its scales and its zero points end, here and in ONNX Runtime's quantizers: that
of 4 bits writes the plural."""


def audit_sharing(graph: onnx.ModelProto, unique_parameters: int) -> Sharing:
    """Count the stored parameters in the file's own tensors.

    Every stored tensor of floating-point or 8-bit numbers with more than one element counts as parameters, wherever it
    stands (initializer or Constant node), except ``NO_PARAMETERS`` and, in a quantised graph, scales and zero points: a
    weight that was copied for each use is counted as often as it is stored.

    Args:
        unique_parameters: parameters that this graph needs; a language model's heads for other exits are not in it.
    """
    tensors = list(graph.graph.initializer)
    for node in graph.graph.node:
        tensors += [a.t for a in node.attribute if node.op_type == "Constant" and a.HasField("t")]
    quantized = any(tensor.data_type in INTEGERS for tensor in tensors)
    packed = _packed(graph)
    sizes = {id(tensor): packed.get(tensor.name, math.prod(tensor.dims)) for tensor in tensors}
    stored = sum(sizes[id(tensor)] for tensor in tensors if _is_parameter(tensor, but_scales=quantized))
    return Sharing(
        unique_parameters=unique_parameters,
        stored_parameters=stored,
        constant_elements=sum(sizes.values()) - stored,
        weight_bytes=sum(map(_bytes, tensors)),
    )


def count_quantization_numbers(graph: onnx.ModelProto) -> int:
    """Count the stored scales and zero points of a graph's INT8 weights, which are no parameters of the model.

    A tensor is one of them if its name is that of a quantised weight with another ending. A foreign graph's own tensor
    that happens to be called ``…_scale`` is a parameter. Tensors of one element do not count, as in the outline.
    """
    names = {tensor.name for tensor in graph.graph.initializer}
    count = 0
    for tensor in graph.graph.initializer:
        for ending in (SCALE, ZERO_POINT):
            weight = f"{tensor.name.removesuffix(ending)}{QUANTIZED}"
            if tensor.name.endswith(ending) and weight in names and (size := math.prod(tensor.dims)) > 1:
                count += size
    return count


def _packed(graph: onnx.ModelProto) -> dict[str, int]:
    """Weight of a product in few bits → its numbers, several in a stored byte; a last block is padded."""
    sizes = {
        node.input[1]: {a.name: a.i for a in node.attribute} for node in graph.graph.node if node.op_type == _PACKED
    }
    return {name: size["K"] * size["N"] for name, size in sizes.items()}


def _is_parameter(tensor: onnx.TensorProto, *, but_scales: bool) -> bool:
    if math.prod(tensor.dims) <= 1 or tensor.name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False
    scales = tensor.name.removesuffix("s").endswith((SCALE, ZERO_POINT))
    return tensor.data_type in _FLOATS | INTEGERS and not (but_scales and scales)


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type in _HALF_BYTES:
        return int(-(-math.prod(tensor.dims) // 2))
    return int(math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def weight_parts(graph: onnx.ModelProto) -> dict[str, int]:
    """Bytes of the stored weights by what they are for: ``embeddings``, ``block`` and ``heads``.

    Told by what the graph does with them, because folded weights have lost the names that they had in the model:
    tables of which rows are taken are embeddings; whatever stands between the last product and the logits, that
    product's weight included, is a head, if there is one; the rest is block. Scales and zero points of INT8 go with
    their weights. Rotary tables, running statistics, shapes and scalars are in none of the three. A tied table counts
    as embeddings.
    """
    stored_as = {node.output[0]: node.input[0] for node in graph.graph.node if node.op_type == "DequantizeLinear"}
    taken_from = [node.input[0] for node in graph.graph.node if node.op_type in ("Gather", "Slice")]
    taken_from += [x for node in graph.graph.node if node.op_type == "GatherBlockQuantized" for x in node.input]
    tables = {stored_as.get(name, name) for name in taken_from}
    heads = _behind_the_logits(graph)
    parts = dict.fromkeys(("embeddings", "block", "heads"), 0)
    for tensor in graph.graph.initializer:
        if _is_parameter(tensor, but_scales=False):
            table = tensor.name in tables and len(tensor.dims) > 1
            parts["embeddings" if table else "heads" if tensor.name in heads else "block"] += _bytes(tensor)
    return parts


def _behind_the_logits(graph: onnx.ModelProto) -> set[str]:
    """Names of all values from the logits back to the operands of the last product with a stored weight.

    Empty where several products meet on the way, as in a stack of layers that ends without a head (embeddings).
    """
    stored = {tensor.name for tensor in graph.graph.initializer}
    makers = {name: node for node in graph.graph.node for name in node.output}
    waiting = [value.name for value in graph.graph.output if value.name.split(".")[-1] == "logits"]
    seen: set[str] = set()
    products = 0
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = makers.get(name)
        # INT8 scales a product by its input's scale, which is found from that input: what made it is no head.
        if node is None or node.op_type == "DynamicQuantizeLinear":
            continue
        if node.op_type in _PRODUCTS and any(operand in stored for operand in node.input):
            seen.update(operand for operand in node.input if operand in stored)
            products += 1
        else:
            waiting += list(node.input)
    return seen if products == 1 else set()


def stored_twice(sharing: Sharing) -> str | None:
    """What is wrong with a file that stores more parameters than its graph needs; None when it does not.

    Fewer are no fault: parameters that hold the same numbers, such as untrained zeros, are stored once.
    """
    if sharing.stored_parameters > sharing.unique_parameters:
        return f"stores {sharing.stored_parameters:,} parameters for a model of {sharing.unique_parameters:,}"
    return None


def describe_io(graph: onnx.ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs as name → type[shape], e.g. ``int64[batch, sequence]``."""

    def described(value: onnx.ValueInfoProto) -> str:
        kind = value.type.tensor_type
        shape = ", ".join(dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim)
        return f"{onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name}[{shape}]"

    inputs, outputs = graph.graph.input, graph.graph.output
    return {value.name: described(value) for value in inputs}, {value.name: described(value) for value in outputs}


def float32_operators(graph: onnx.ModelProto) -> dict[str, int]:
    """Operators of a graph that compute in FP32: those with an FP32 result, by type inference over the file."""
    inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=False)
    values = (*inferred.graph.value_info, *inferred.graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    counted = Counter(
        node.op_type
        for node in inferred.graph.node
        if node.op_type != "Cast" and any(kinds.get(name) == TensorProto.FLOAT for name in node.output)
    )
    return dict(counted)


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """What was counted in several graphs, together."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
