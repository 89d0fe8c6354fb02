"""Audit ONNX files: stored parameters against the model's, weight bytes by part, types, and portability."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto

from edgeformer.artifacts.manifest import Denormals, Portability, Sharing

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_HALF_BYTES = {TensorProto.INT4, TensorProto.UINT4}
INTEGERS = {TensorProto.INT8, TensorProto.UINT8} | _HALF_BYTES
"""Types of quantised weights."""
NO_PARAMETERS = ("cos", "sin", "inv_freq", "running_mean", "running_var", "fingerprints")
"""Stored tensors that are no parameters: the rotary table, running statistics of a batch normalisation, hashes."""
SCALE, ZERO_POINT = "_scale", "_zero_point"
"""Suffixes of the scales and zero points of a weight, in ONNX Runtime's quantizers too; the 4-bit one writes the
plural."""

_PACKED = "MatMulNBits"
_PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", _PACKED)


def audit_sharing(graph: onnx.ModelProto, unique_parameters: int) -> Sharing:
    """Count the parameters that a file stores, of ``unique_parameters`` that its graph needs.

    Every stored tensor of floating-point or 8-bit numbers with more than one element counts (initializer or Constant
    node), except ``NO_PARAMETERS`` and, in a quantised graph, scales and zero points. A weight that was copied for each
    use counts as often as it is stored.
    """
    tensors = list(graph.graph.initializer)
    for node in graph.graph.node:
        tensors += [a.t for a in node.attribute if node.op_type == "Constant" and a.HasField("t")]
    is_quantized = any(tensor.data_type in INTEGERS for tensor in tensors)
    # A packed weight holds several numbers in a byte, and its last block is padded: its node knows the count.
    packed = {
        node.input[1]: math.prod(a.i for a in node.attribute if a.name in ("K", "N"))
        for node in graph.graph.node
        if node.op_type == _PACKED
    }
    elements = stored = 0
    for tensor in tensors:
        size = packed.get(tensor.name, math.prod(tensor.dims))
        elements += size
        is_scale = is_quantized and tensor.name.removesuffix("s").endswith((SCALE, ZERO_POINT))
        if _is_parameter(tensor) and not is_scale:
            stored += size
    return Sharing(
        unique_parameters=unique_parameters, stored_parameters=stored, constant_elements=elements - stored,
        weight_bytes=sum(map(_bytes, tensors)),
    )  # fmt: skip


def _is_parameter(tensor: onnx.TensorProto) -> bool:
    if math.prod(tensor.dims) <= 1 or tensor.name.endswith(NO_PARAMETERS):
        return False
    return tensor.data_type in _FLOATS | INTEGERS


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type in _HALF_BYTES:
        return int(-(-math.prod(tensor.dims) // 2))
    return int(math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def weight_parts(graph: onnx.ModelProto) -> dict[str, int]:
    """Bytes of the stored weights by purpose, which follows from the graph: folded weights have lost their names.

    Tables from which rows are taken are ``embeddings``, a tied table too; weights from the last product to the logits
    are ``heads``; all others are the ``block``, with scales and zero points.
    """
    nodes, stored = graph.graph.node, {tensor.name for tensor in graph.graph.initializer}
    dequantized = {node.output[0]: node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    read_by_row = [node.input[0] for node in nodes if node.op_type in ("Gather", "Slice")]
    read_by_row += [name for node in nodes if node.op_type == "GatherBlockQuantized" for name in node.input]
    tables = {dequantized.get(name, name) for name in read_by_row}
    # From the logits back to the operands of the last product with a stored weight.
    producers = {name: node for node in nodes for name in node.output}
    stack = [value.name for value in graph.graph.output if value.name.split(".")[-1] == "logits"]
    heads: set[str] = set()
    products = 0
    while stack:
        name = stack.pop()
        node = producers.get(name)
        # INT8 scales a product by its input's scale, which is computed from that input: the search stops there.
        if name in heads or node is None or node.op_type == "DynamicQuantizeLinear":
            heads.add(name)
            continue
        heads.add(name)
        weights = stored.intersection(node.input) if node.op_type in _PRODUCTS else set()
        if weights:
            heads |= weights
            products += 1
        else:
            stack += list(node.input)
    if products != 1:  # several products meet on the way, as in a stack of layers without a head (embeddings)
        heads = set()
    parts = dict.fromkeys(("embeddings", "block", "heads"), 0)
    for tensor in filter(_is_parameter, graph.graph.initializer):
        is_table = tensor.name in tables and len(tensor.dims) > 1
        parts["embeddings" if is_table else "heads" if tensor.name in heads else "block"] += _bytes(tensor)
    return parts


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


_CHUNK = 2**16
"""Numbers that are inspected together, so that temporaries stay in the processor's cache."""


def audit_portability(paths: Sequence[Path]) -> Portability:
    """Report what other processors and runtimes may compute differently in the graphs of one artifact."""
    models = [onnx_ir.load(path) for path in paths]
    nodes = [node for model in models for node in model.graph.all_nodes()]
    foreign = Counter(f"{node.domain}:{node.op_type}" for node in nodes if node.domain)
    control_flow = Counter(node.op_type for node in nodes if node.op_type in ("Loop", "If", "Scan"))
    shapes = {str(value.name): value.shape or () for model in models for value in model.graph.inputs}
    named = {name: [dim.value for dim in shape if not isinstance(dim, int)] for name, shape in shapes.items()}
    axes = {name: tuple(filter(None, names)) for name, names in named.items()}
    denormals = of_weights = 0
    for tensor in [value.const_value for model in models for value in model.graph.initializers.values()]:
        if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT:
            continue
        of_weights += tensor.size
        bits = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint32)
        for start in range(0, len(bits), _CHUNK):
            without_sign = bits[start : start + _CHUNK] & np.uint32(0x7FFFFFFF)
            # An exponent of 0 and a fraction that is not 0; 0 − 1 is the largest number.
            denormals += int(np.count_nonzero(without_sign - np.uint32(1) < np.uint32(0x7FFFFF)))
    return Portability(
        opset=max(model.opset_imports.get("", 0) for model in models),
        ir_version=max(model.ir_version for model in models),
        other_operators=dict(sorted(foreign.items())), control_flow=dict(sorted(control_flow.items())),
        dynamic={name: names for name, names in axes.items() if names},
        fixed=tuple(name for name, names in axes.items() if not names),
        denormals=Denormals(weights=denormals, of_weights=of_weights),
    )  # fmt: skip
