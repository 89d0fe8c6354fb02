"""What an ONNX file really stores: parameters against the model's, types, and operators left in FP32."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from edgeformer.schema.errors import ArtifactError
from edgeformer.schema.manifest import Sharing

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_INTEGERS = {TensorProto.INT8, TensorProto.UINT8}
_TYPE_NAMES = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.INT64: "int64"}
NO_PARAMETERS = ("cos", "sin", "running_mean", "running_var")
"""What a model stores beside its parameters: the rotary table, running statistics of a batch normalisation."""

SCALE, ZERO_POINT = "_scale", "_zero_point"
"""How the names of a quantised weight's scales and zero points end, here and in ONNX Runtime's quantizer."""


def open_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file. Raises ArtifactError when it is missing, truncated or something else."""
    try:
        return onnx.load(str(path), load_external_data=False)  # sizes and types are enough
    except (OSError, DecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read as ONNX: {error}; export it again") from None


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
    quantized = any(tensor.data_type in _INTEGERS for tensor in tensors)
    stored = constants = size = 0
    for tensor in tensors:
        elements = math.prod(tensor.dims)
        if _is_parameter(tensor, quantized):
            stored += elements
        else:
            constants += elements
        size += elements * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return Sharing(
        unique_parameters=unique_parameters,
        stored_parameters=stored,
        constant_elements=constants,
        weight_bytes=size,
    )


def _is_parameter(tensor: onnx.TensorProto, quantized: bool) -> bool:
    if math.prod(tensor.dims) <= 1 or tensor.name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False
    if quantized and tensor.name.endswith((SCALE, ZERO_POINT)):
        return False
    return tensor.data_type in _FLOATS or tensor.data_type in _INTEGERS


def stored_twice(sharing: Sharing) -> str | None:
    """What is wrong with a file that stores more parameters than its graph needs; None when it does not.

    Fewer are no fault: parameters that hold the same numbers, such as untrained zeros, are stored once.
    """
    if sharing.stored_parameters > sharing.unique_parameters:
        return f"stores {sharing.stored_parameters:,} parameters for a model of {sharing.unique_parameters:,}"
    return None


def describe_io(graph: onnx.ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs as name → type[shape], e.g. ``int64[batch, sequence]``."""
    return _describe(graph.graph.input), _describe(graph.graph.output)


def _describe(values: list[onnx.ValueInfoProto]) -> dict[str, str]:
    described = {}
    for value in values:
        kind = value.type.tensor_type
        shape = ", ".join(dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim)
        described[value.name] = f"{_TYPE_NAMES.get(kind.elem_type, str(kind.elem_type))}[{shape}]"
    return described


def float32_operators(graph: onnx.ModelProto) -> dict[str, int]:
    """Operators of a graph that compute in FP32: those with an FP32 result, by type inference over the file."""
    inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=False)
    kinds = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    kinds |= {v.name: v.type.tensor_type.elem_type for v in inferred.graph.output}
    counted = Counter(
        node.op_type
        for node in inferred.graph.node
        if node.op_type != "Cast" and any(kinds.get(name) == TensorProto.FLOAT for name in node.output)
    )
    return dict(sorted(counted.items()))
