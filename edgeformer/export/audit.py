"""What an ONNX file really stores: parameters against the model's, types, and operators left in FP32."""

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


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counts of several graphs."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


# Portability audit: what a file holds that other processors and runtimes may take otherwise.


_CONTROL_FLOW = ("Loop", "If", "Scan")
_STANDARD = ("", "ai.onnx")
_HIGHEST_ACTIVATION = 255
_LOWEST, _HIGHEST = -(2**15), 2**15 - 1
_AT_ONCE = 2**16
"""Numbers that are looked at together: what is made of them stays in the processor's cache."""
_ALL_BUT_SIGN, _FRACTION = np.uint32(0x7FFFFFFF), np.uint32(0x7FFFFF)
_MOST_ROWS, _MOST_PAIRS = 256, 4096
"""Of a product: positions and pairs of weights whose sums are computed one by one."""
_MOST_VALUES, _FED_ROWS = 64, 4
"""Values of a graph that are looked at, evenly drawn from all, and rows of the call: each takes memory and time."""

Feed = Mapping[str, Array]
_Stored = tuple[onnx.ModelProto, Path]
"""A graph, and the folder that its weights lie in where they lie beside it."""


def audit_portability(paths: Sequence[Path], feed: Feed | None = None) -> Portability:
    """Look at the graphs of one artifact.

    Args:
        paths: of the graphs, weights beside them where they have such.
        feed: real inputs of the model: where it is one graph that takes these, the values in it are looked at, too;
            None: only what is stored.
    """
    # Weights that several graphs share lie beside them, and are looked at once.
    graphs = [onnx.load(str(path), load_external_data=False) for path in paths]
    stored = [(graph, path.parent) for graph, path in zip(graphs, paths, strict=True)]
    nodes = [node for graph in graphs for node in _nodes(graph.graph)]
    named = Counter(f"{n.domain}:{n.op_type}" for n in nodes if n.domain not in _STANDARD)
    flow = Counter(node.op_type for node in nodes if node.op_type in _CONTROL_FLOW)
    inputs = {value.name: value.type.tensor_type.shape.dim for graph in graphs for value in graph.graph.input}
    axes = {name: tuple(dim.dim_param for dim in dims if dim.dim_param) for name, dims in inputs.items()}
    whole = feed is not None and len(paths) == 1 and set(inputs) == set(feed)
    values = _Values(paths[0], {name: feed[name][:_FED_ROWS] for name in feed}) if feed is not None and whole else None
    return Portability(
        opset=max((o.version for graph in graphs for o in graph.opset_import if o.domain in _STANDARD), default=0),
        ir_version=max(graph.ir_version for graph in graphs),
        other_operators=dict(sorted(named.items())),
        control_flow=dict(sorted(flow.items())),
        dynamic={name: found for name, found in axes.items() if found},
        fixed=tuple(name for name, found in axes.items() if not found),
        denormals=_denormals(stored, values),
        saturation=_saturation(stored, values),
    )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of branches and loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


class _Values:
    """Values inside of a graph, by a run in which they are outputs."""

    def __init__(self, path: Path, feed: Feed) -> None:
        # Weights beside the graph stay where they are: the copy of it lies there, too.
        self._graph, self._feed = onnx.load(str(path), load_external_data=False), feed
        self._folder = path.parent

    def of(self, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
        """Name → value, of some of them; names of what is no tensor of the outermost graph are passed over."""
        own_outputs = [value.name for value in self._graph.graph.output]
        own = {*own_outputs, *(value.name for value in self._graph.graph.input)}
        asked = [name for name in dict.fromkeys(names) if name and name not in own]
        inferred = onnx.shape_inference.infer_shapes(self._graph, strict_mode=False)
        known = {value.name: value for value in inferred.graph.value_info}
        asked = [name for name in asked if name in known]
        some = asked[:: -(-len(asked) // _MOST_VALUES)] if asked else []
        self._graph.graph.output.extend(known[name] for name in some)
        with tempfile.NamedTemporaryFile(prefix=".values-", suffix=".onnx", dir=self._folder, delete=False) as file:
            file.write(self._graph.SerializeToString())
        del self._graph.graph.output[len(own_outputs) :]
        try:
            with OnnxSession(Path(file.name)) as session:
                found = session.run({name: self._feed[name] for name in session.inputs})
        finally:
            Path(file.name).unlink()
        yield from ((name, found[name]) for name in some)

    def inner(self) -> Iterator[tuple[str, Array]]:
        """Of all that there are."""
        return self.of([name for node in self._graph.graph.node for name in node.output])


def _denormals(graphs: Sequence[_Stored], values: _Values | None) -> Denormals:
    stored = [
        _tiny_stored(tensor, folder)
        for graph, folder in graphs
        for tensor in graph.graph.initializer
        if tensor.data_type == TensorProto.FLOAT
    ]
    floats = all(node.op_type != "MatMulInteger" for graph, _ in graphs for node in graph.graph.node)
    looked = values is not None and floats  # INT8 graphs compute the same ones in fewer bits
    found = [_tiny(array) for _, array in values.inner() if array.dtype == np.float32] if values and looked else None
    return Denormals(
        weights=sum(count for count, _ in stored),
        of_weights=sum(size for _, size in stored),
        activations=None if found is None else sum(count for count, _ in found),
        of_activations=None if found is None else sum(size for _, size in found),
    )


def _tiny(array: Array) -> tuple[int, int]:
    """Denormal numbers of float32 ones, and how many there are: by their bits, an exponent of 0 and a fraction."""
    bits, found = np.ascontiguousarray(array).reshape(-1).view(np.uint32), 0
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE] & _ALL_BUT_SIGN
        part -= np.uint32(1)  # of 0 the largest of all
        found += int(np.count_nonzero(part < _FRACTION))
    return found, array.size


def _tiny_stored(tensor: onnx.TensorProto, folder: Path) -> tuple[int, int]:
    """As :func:`_tiny`; what several graphs have in one file beside them is looked at once."""
    if not uses_external_data(tensor):
        return _tiny(numpy_helper.to_array(tensor))
    place = ExternalDataInfo(tensor)
    file = folder / place.location
    told = file.stat()
    return _tiny_in_file(file, place.offset or 0, place.length or 0, (told.st_mtime_ns, told.st_size))


@lru_cache(maxsize=4096)
def _tiny_in_file(file: Path, offset: int, length: int, state: tuple[int, int]) -> tuple[int, int]:
    """``state`` of the file: another one is looked at anew."""
    return _tiny(np.fromfile(file, np.float32, count=length // 4, offset=offset))


def _saturation(graphs: Sequence[_Stored], values: _Values | None) -> Saturation | None:
    """Of every MatMulInteger whose first operand is u8 and whose second one is a stored s8 weight [K, N]."""
    pairs = at_risk = 0
    products: list[tuple[str, NDArray[np.int32]]] = []
    for graph, folder in graphs:
        stored = {one.name: one for one in graph.graph.initializer if one.data_type == TensorProto.INT8}
        unsigned = _unsigned(graph)
        for node in graph.graph.node:
            if node.op_type != "MatMulInteger" or node.input[1] not in stored or node.input[0] not in unsigned:
                continue
            narrow = numpy_helper.to_array(stored[node.input[1]], base_dir=str(folder))
            pairs += len(narrow) // 2 * narrow.shape[1]
            if not narrow.size or 2 * _HIGHEST_ACTIVATION * max(int(narrow.max()), -int(narrow.min())) <= _HIGHEST:
                continue  # 7 bits: no sum of two can be beyond
            weight = narrow.astype(np.int32)
            risky = _risky(weight)
            at_risk += int(risky.sum())
            if risky.any():
                products.append((node.input[0], weight))
    if not pairs:
        return None
    if not at_risk or values is None:
        return Saturation(pairs=pairs, at_risk=at_risk)
    found = dict(values.of([name for name, _ in products]))
    counts = [_beyond(found[name], weight) for name, weight in products if name in found]
    sums, saturated = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return Saturation(pairs=pairs, at_risk=at_risk, sums=sums, saturated=saturated)


def _unsigned(graph: onnx.ModelProto) -> set[str]:
    """Values that are u8: what is quantised while running is."""
    return {node.output[0] for node in graph.graph.node if node.op_type == "DynamicQuantizeLinear"} | {
        value.name
        for value in (*graph.graph.value_info, *graph.graph.input)
        if value.type.tensor_type.elem_type == TensorProto.UINT8
    }


def _paired(weight: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The two weights of each sum, [K/2, N] each: the kernel adds neighbours in K; a last odd one has none."""
    even = weight[: len(weight) // 2 * 2]
    return even[0::2], even[1::2]


def _risky(weight: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Pairs whose sum some activations take beyond 16 bits: the larger ones alone, or both of one sign."""
    first, second = _paired(weight)
    most = _HIGHEST_ACTIVATION * (np.maximum(first, 0) + np.maximum(second, 0))
    least = _HIGHEST_ACTIVATION * (np.minimum(first, 0) + np.minimum(second, 0))
    found: NDArray[np.bool_] = (most > _HIGHEST) | (least < _LOWEST)
    return found


def _beyond(activations: Array, weight: NDArray[np.int32]) -> tuple[int, int]:
    """Sums of the pairs at risk, and those of them beyond 16 bits, for activations u8 [..., K]."""
    rows = activations.reshape(-1, activations.shape[-1])[:_MOST_ROWS].astype(np.int32)
    first, second = _paired(weight)
    place, column = np.nonzero(_risky(weight))
    place, column = place[:_MOST_PAIRS], column[:_MOST_PAIRS]
    one = rows[:, 2 * place] * first[place, column]
    sums = one + rows[:, 2 * place + 1] * second[place, column]
    return sums.size, int(((sums > _HIGHEST) | (sums < _LOWEST)).sum())
