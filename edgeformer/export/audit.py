"""Audit ONNX files: stored parameters against the model's, weight bytes by part, types, and portability."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edgeformer.artifacts.manifest import Denormals, Portability, Saturation, Sharing
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_HALF_BYTES = {TensorProto.INT4, TensorProto.UINT4}
INTEGERS = {TensorProto.INT8, TensorProto.UINT8} | _HALF_BYTES
"""Types of quantised weights."""
NO_PARAMETERS = ("cos", "sin", "running_mean", "running_var")
"""Stored tensors that are no parameters: the rotary table, running statistics of a batch normalisation."""
QUANTIZED, SCALE, ZERO_POINT = "_quantized", "_scale", "_zero_point"
"""Suffixes of a quantised weight, its scales and its zero points, in ONNX Runtime's quantizers too; the 4-bit one
writes the plural."""

_PACKED = "MatMulNBits"
_PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", _PACKED)


def audit_sharing(graph: onnx.ModelProto, unique_parameters: int) -> Sharing:
    """Count the parameters that a file stores.

    Every stored tensor of floating-point or 8-bit numbers with more than one element counts (initializer or Constant
    node), except ``NO_PARAMETERS`` and, in a quantised graph, scales and zero points. A weight that was copied for each
    use counts as often as it is stored.

    Args:
        unique_parameters: that this graph needs.
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
    sizes = [packed.get(tensor.name, math.prod(tensor.dims)) for tensor in tensors]
    stored = sum(
        size
        for size, tensor in zip(sizes, tensors, strict=True)
        if _is_parameter(tensor, counts_scales=not is_quantized)
    )
    return Sharing(
        unique_parameters=unique_parameters,
        stored_parameters=stored,
        constant_elements=sum(sizes) - stored,
        weight_bytes=sum(map(_bytes, tensors)),
    )


def stored_twice(sharing: Sharing) -> str | None:
    """Return the problem of a file that stores more parameters than its graph needs, or None.

    Fewer are no problem: parameters with equal numbers, such as untrained zeros, are stored once.
    """
    if sharing.stored_parameters > sharing.unique_parameters:
        return f"stores {sharing.stored_parameters:,} parameters for a model of {sharing.unique_parameters:,}"
    return None


def count_quantization_numbers(graph: onnx.ModelProto) -> int:
    """Count the scales and zero points of INT8 weights, which are no parameters of the model.

    They have the name of a quantised weight with another suffix; any other tensor of a foreign graph that is called
    ``…_scale`` is a parameter. Tensors of one element do not count, as in the outline.
    """
    names = {tensor.name for tensor in graph.graph.initializer}
    count = 0
    for tensor in graph.graph.initializer:
        for suffix in (SCALE, ZERO_POINT):
            weight = f"{tensor.name.removesuffix(suffix)}{QUANTIZED}"
            if tensor.name.endswith(suffix) and weight in names and (size := math.prod(tensor.dims)) > 1:
                count += size
    return count


def _is_parameter(tensor: onnx.TensorProto, *, counts_scales: bool) -> bool:
    if math.prod(tensor.dims) <= 1 or tensor.name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False
    is_scale = tensor.name.removesuffix("s").endswith((SCALE, ZERO_POINT))
    return tensor.data_type in _FLOATS | INTEGERS and (counts_scales or not is_scale)


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type in _HALF_BYTES:
        return int(-(-math.prod(tensor.dims) // 2))
    return int(math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def weight_parts(graph: onnx.ModelProto) -> dict[str, int]:
    """Bytes of the stored weights by purpose: ``embeddings``, ``block`` and ``heads``.

    The purpose follows from the graph, because folded weights have lost their names. Tables from which rows are taken
    are embeddings, a tied table too. Weights from the last product (included) to the logits are a head; all others are
    the block. Scales and zero points count with their weights. Rotary tables, running statistics, shapes and scalars
    do not count.
    """
    dequantized = {node.output[0]: node.input[0] for node in graph.graph.node if node.op_type == "DequantizeLinear"}
    read_by_row = [node.input[0] for node in graph.graph.node if node.op_type in ("Gather", "Slice")]
    read_by_row += [name for node in graph.graph.node if node.op_type == "GatherBlockQuantized" for name in node.input]
    tables = {dequantized.get(name, name) for name in read_by_row}
    heads = _head_values(graph)
    parts = dict.fromkeys(("embeddings", "block", "heads"), 0)
    for tensor in graph.graph.initializer:
        if _is_parameter(tensor, counts_scales=True):
            is_table = tensor.name in tables and len(tensor.dims) > 1
            parts["embeddings" if is_table else "heads" if tensor.name in heads else "block"] += _bytes(tensor)
    return parts


def _head_values(graph: onnx.ModelProto) -> set[str]:
    """Names of all values from the logits back to the operands of the last product with a stored weight.

    Empty where several products meet on the way, as in a stack of layers that ends without a head (embeddings).
    """
    stored = {tensor.name for tensor in graph.graph.initializer}
    producers = {name: node for node in graph.graph.node for name in node.output}
    stack = [value.name for value in graph.graph.output if value.name.split(".")[-1] == "logits"]
    visited: set[str] = set()
    products = 0
    while stack:
        name = stack.pop()
        if name in visited:
            continue
        visited.add(name)
        node = producers.get(name)
        # INT8 scales a product by its input's scale, which is computed from that input: the search stops there.
        if node is None or node.op_type == "DynamicQuantizeLinear":
            continue
        if node.op_type in _PRODUCTS and any(operand in stored for operand in node.input):
            visited.update(operand for operand in node.input if operand in stored)
            products += 1
        else:
            stack += list(node.input)
    return visited if products == 1 else set()


def describe_io(graph: onnx.ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs as name → type[shape], e.g. ``int64[batch, sequence]``."""

    def describe(value: onnx.ValueInfoProto) -> str:
        tensor = value.type.tensor_type
        shape = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
        return f"{onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name}[{shape}]"

    inputs, outputs = graph.graph.input, graph.graph.output
    return {value.name: describe(value) for value in inputs}, {value.name: describe(value) for value in outputs}


def float32_operators(graph: onnx.ModelProto) -> dict[str, int]:
    """Operator → nodes that compute in FP32: those with an FP32 result, by type inference over the file."""
    inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=False)
    values = (*inferred.graph.value_info, *inferred.graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    counts = Counter(
        node.op_type
        for node in inferred.graph.node
        if node.op_type != "Cast" and any(types.get(name) == TensorProto.FLOAT for name in node.output)
    )
    return dict(counts)


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counts of several graphs."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


# Portability: what other processors and runtimes may compute differently.

_CONTROL_FLOW = ("Loop", "If", "Scan")
_STANDARD = ("", "ai.onnx")
_MAX_ACTIVATION = 255
_INT16_MIN, _INT16_MAX = -(2**15), 2**15 - 1
_CHUNK = 2**16
"""Numbers that are inspected together, so that temporaries stay in the processor's cache."""
_NO_SIGN, _FRACTION = np.uint32(0x7FFFFFFF), np.uint32(0x7FFFFF)
_MAX_ROWS, _MAX_PAIRS = 256, 4096
"""Of a product: positions and pairs of weights whose sums are computed one by one."""
_MAX_VALUES, _MAX_FED_ROWS = 64, 4
"""Values of a graph that are inspected, evenly sampled, and rows of the call: each takes memory and time."""

Feed = Mapping[str, Array]
_Stored = tuple[onnx.ModelProto, Path]
"""A graph and the folder of its external weights."""


def audit_portability(paths: Sequence[Path], feed: Feed | None = None) -> Portability:
    """Audit the graphs of one artifact.

    Args:
        paths: of the graphs.
        feed: real inputs: values inside the graph are inspected too, if it is one graph with these inputs.
    """
    # Weights beside the graphs are not loaded: those that several graphs share are inspected once.
    graphs = [onnx.load(str(path), load_external_data=False) for path in paths]
    stored = [(graph, path.parent) for graph, path in zip(graphs, paths, strict=True)]
    nodes = [node for graph in graphs for node in _all_nodes(graph.graph)]
    foreign = Counter(f"{node.domain}:{node.op_type}" for node in nodes if node.domain not in _STANDARD)
    control_flow = Counter(node.op_type for node in nodes if node.op_type in _CONTROL_FLOW)
    inputs = {value.name: value.type.tensor_type.shape.dim for graph in graphs for value in graph.graph.input}
    axes = {name: tuple(dim.dim_param for dim in dims if dim.dim_param) for name, dims in inputs.items()}
    values = None
    if feed is not None and len(paths) == 1 and set(inputs) == set(feed):
        values = _InnerValues(paths[0], {name: array[:_MAX_FED_ROWS] for name, array in feed.items()})
    return Portability(
        opset=max((o.version for graph in graphs for o in graph.opset_import if o.domain in _STANDARD), default=0),
        ir_version=max(graph.ir_version for graph in graphs),
        other_operators=dict(sorted(foreign.items())),
        control_flow=dict(sorted(control_flow.items())),
        dynamic={name: names for name, names in axes.items() if names},
        fixed=tuple(name for name, names in axes.items() if not names),
        denormals=_count_denormals(stored, values),
        saturation=_count_saturation(stored, values),
    )


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, those of branches and loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)


class _InnerValues:
    """Values inside a graph, by a run in which they are outputs."""

    def __init__(self, path: Path, feed: Feed) -> None:
        self._graph, self._feed, self._folder = onnx.load(str(path), load_external_data=False), feed, path.parent

    def compute(self, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Name → value, of a sample of these names (None: all); names of the graph's inputs and outputs are ignored."""
        graph = self._graph.graph
        if names is None:
            names = [name for node in graph.node for name in node.output]
        ends = {value.name for value in (*graph.output, *graph.input)}
        inferred = onnx.shape_inference.infer_shapes(self._graph, strict_mode=False)
        typed = {value.name: value for value in inferred.graph.value_info}
        inner = [name for name in dict.fromkeys(names) if name and name not in ends and name in typed]
        sample = inner[:: -(-len(inner) // _MAX_VALUES)] if inner else []
        output_count = len(graph.output)
        graph.output.extend(typed[name] for name in sample)
        # The copy lies beside the graph, so that it reads the same weights.
        with tempfile.NamedTemporaryFile(prefix=".values-", suffix=".onnx", dir=self._folder, delete=False) as file:
            file.write(self._graph.SerializeToString())
        del graph.output[output_count:]
        try:
            with OnnxSession(Path(file.name)) as session:
                outputs = session.run({name: self._feed[name] for name in session.inputs})
        finally:
            Path(file.name).unlink()
        return {name: outputs[name] for name in sample}


def _count_denormals(graphs: Sequence[_Stored], values: _InnerValues | None) -> Denormals:
    stored = []
    for graph, folder in graphs:
        for tensor in graph.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                stored.append((_tensor_denormals(tensor, folder), math.prod(tensor.dims)))
    computed = None
    # INT8 graphs compute the same activations in fewer bits.
    if values is not None and all(n.op_type != "MatMulInteger" for graph, _ in graphs for n in graph.graph.node):
        arrays = [array for array in values.compute().values() if array.dtype == np.float32]
        computed = [(_array_denormals(array), array.size) for array in arrays]
    return Denormals(
        weights=sum(count for count, _ in stored),
        of_weights=sum(size for _, size in stored),
        activations=None if computed is None else sum(count for count, _ in computed),
        of_activations=None if computed is None else sum(size for _, size in computed),
    )


def _array_denormals(array: Array) -> int:
    """Count float32 numbers with an exponent of 0 and a fraction that is not 0."""
    bits, count = np.ascontiguousarray(array).reshape(-1).view(np.uint32), 0
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK] & _NO_SIGN
        chunk -= np.uint32(1)  # 0 becomes the largest number
        count += int(np.count_nonzero(chunk < _FRACTION))
    return count


def _tensor_denormals(tensor: onnx.TensorProto, folder: Path) -> int:
    if not uses_external_data(tensor):
        return _array_denormals(numpy_helper.to_array(tensor))
    location = ExternalDataInfo(tensor)
    file = folder / location.location
    stat = file.stat()
    return _file_denormals(file, location.offset or 0, location.length or 0, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4096)
def _file_denormals(file: Path, offset: int, length: int, version: tuple[int, int]) -> int:
    """Count denormals of a tensor beside a graph, once per ``version`` of the file."""
    return _array_denormals(np.fromfile(file, np.float32, count=length // 4, offset=offset))


def _count_saturation(graphs: Sequence[_Stored], values: _InnerValues | None) -> Saturation | None:
    """Count pairs of 8-bit weights whose sums may exceed 16 bits on CPUs without VNNI.

    Looks at every MatMulInteger with a u8 first operand and a stored s8 weight [K, N]; None without any.
    """
    pairs = at_risk = 0
    products: list[tuple[str, NDArray[np.int32]]] = []
    for graph, folder in graphs:
        weights = {tensor.name: tensor for tensor in graph.graph.initializer if tensor.data_type == TensorProto.INT8}
        unsigned = {node.output[0] for node in graph.graph.node if node.op_type == "DynamicQuantizeLinear"} | {
            value.name
            for value in (*graph.graph.value_info, *graph.graph.input)
            if value.type.tensor_type.elem_type == TensorProto.UINT8
        }
        for node in graph.graph.node:
            if node.op_type != "MatMulInteger" or node.input[1] not in weights or node.input[0] not in unsigned:
                continue
            int8_weight = numpy_helper.to_array(weights[node.input[1]], base_dir=str(folder))
            pairs += len(int8_weight) // 2 * int8_weight.shape[1]
            max_abs = max(int(int8_weight.max()), -int(int8_weight.min())) if int8_weight.size else 0
            if 2 * _MAX_ACTIVATION * max_abs <= _INT16_MAX:
                continue  # 7 bits: no sum of two can exceed 16 bits
            weight = int8_weight.astype(np.int32)
            risky = int(_risky_pairs(weight).sum())
            at_risk += risky
            if risky:
                products.append((node.input[0], weight))
    if not pairs:
        return None
    if not at_risk or values is None:
        return Saturation(pairs=pairs, at_risk=at_risk)
    activations = values.compute([name for name, _ in products])
    counts = [_saturated_sums(activations[name], weight) for name, weight in products if name in activations]
    sums, saturated = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return Saturation(pairs=pairs, at_risk=at_risk, sums=sums, saturated=saturated)


def _pairs(weight: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The two weights of each sum, [K/2, N] each: the kernel adds neighbours in K; the last of an odd K has none."""
    even = weight[: len(weight) // 2 * 2]
    return even[0::2], even[1::2]


def _risky_pairs(weight: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Pairs whose sum exceeds 16 bits for some activations."""
    first, second = _pairs(weight)
    highest = _MAX_ACTIVATION * (np.maximum(first, 0) + np.maximum(second, 0))
    lowest = _MAX_ACTIVATION * (np.minimum(first, 0) + np.minimum(second, 0))
    risky: NDArray[np.bool_] = (highest > _INT16_MAX) | (lowest < _INT16_MIN)
    return risky


def _saturated_sums(activations: Array, weight: NDArray[np.int32]) -> tuple[int, int]:
    """Count sums of the pairs at risk, and those beyond 16 bits, for activations u8 [..., K]."""
    rows = activations.reshape(-1, activations.shape[-1])[:_MAX_ROWS].astype(np.int32)
    first, second = _pairs(weight)
    place, column = (indices[:_MAX_PAIRS] for indices in np.nonzero(_risky_pairs(weight)))
    sums = rows[:, 2 * place] * first[place, column] + rows[:, 2 * place + 1] * second[place, column]
    return sums.size, int(((sums > _INT16_MAX) | (sums < _INT16_MIN)).sum())
