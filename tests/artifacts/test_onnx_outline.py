"""What an ONNX file says of itself, read without the package onnx, against that package."""

import contextlib
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.onnx_outline import CONTROL, read_outline
from tests.export import graphs
from tests.export.graphs import FLOAT, save, value

BUILDERS = (graphs.convolutions, graphs.recurrent, graphs.branching, graphs.looping, graphs.embedding)
GRAPHS = {build.__name__: build() for build in BUILDERS}


def stored_in(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Every tensor of a graph and of its subgraphs, wherever it stands."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.HasField("t") else []
            tensors += stored_in(attribute.g) if attribute.HasField("g") else []
    return tensors


@pytest.mark.parametrize("name", GRAPHS)
def test_as_the_package_onnx_reads_it(tmp_path: Path, name: str) -> None:
    proto = GRAPHS[name]
    outline = read_outline(save(tmp_path, proto))
    assert outline.opsets == {"": 17}
    assert [port.name for port in outline.inputs] == [port.name for port in proto.graph.input]
    ports = (*proto.graph.input, *proto.graph.output)
    for port, expected in zip((*outline.inputs, *outline.outputs), ports, strict=True):
        kind = expected.type.tensor_type
        assert port.dtype == helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        assert port.shape == tuple(dim.dim_param or dim.dim_value or None for dim in kind.shape.dim)
    tensors = stored_in(proto.graph)
    assert outline.weight_bytes == sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors)
    floats = [tensor for tensor in tensors if tensor.data_type == FLOAT and math.prod(tensor.dims) > 1]
    assert outline.parameters == sum(math.prod(tensor.dims) for tensor in floats) == outline.stored["float32"]
    assert any(operator in CONTROL for _, operator in outline.operators) == (name in ("branching", "looping"))


def test_operators_of_subgraphs_and_the_table_of_token_ids_behind_a_cast(tmp_path: Path) -> None:
    operators = {("", "If"): 1, ("", "MatMul"): 1, ("", "Add"): 1}
    assert read_outline(save(tmp_path, graphs.branching())).operators == operators
    assert read_outline(save(tmp_path, graphs.embedding(rows=40))).tables == {"input_ids": 40}
    nodes = graphs.nodes(f"wide = Cast <to = {TensorProto.INT64}> (ids)  y = Gather <axis = 0> (table, wide)")
    ports = [value("ids", TensorProto.INT32, ["N"])], [value("y", FLOAT, None)]
    graph = graphs.model(nodes, *ports, [graphs.weights("table", 9, 4)])
    assert read_outline(save(tmp_path, graph)).tables == {"ids": 9}


def test_external_weights_count_and_stored_inputs_of_old_files_are_none(tmp_path: Path) -> None:
    graph = graphs.convolutions()
    graph.graph.input.append(value("w", FLOAT, [4, 8]))
    inside = read_outline(save(tmp_path, graph))
    assert [port.name for port in inside.inputs] == ["x"]
    beside = read_outline(graphs.save_beside(tmp_path, graphs.convolutions(), name="other.onnx"))
    assert (inside.parameters, inside.weight_bytes) == (beside.parameters, beside.weight_bytes)


def test_functions(tmp_path: Path) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"])]
    function = helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    inputs, outputs = [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"])]
    graph = graphs.model([helper.make_node("Twice", ["x"], ["y"], domain="mine")], inputs, outputs, domains={"mine": 1})
    graph.functions.append(function)
    outline = read_outline(save(tmp_path, graph))
    assert outline.functions == {("mine", "Twice")} and outline.operators["", "Relu"] == 1


def test_a_cut_file_is_refused_and_any_flipped_byte_read_or_refused(tmp_path: Path) -> None:
    path = save(tmp_path, graphs.convolutions())
    original = path.read_bytes()
    for cut in (1, 7, 40, 200):
        path.write_bytes(original[:-cut])
        with pytest.raises(ArtifactError, match="not an ONNX graph"):
            read_outline(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(original), 300):
        content = bytearray(original)
        content[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        with contextlib.suppress(ArtifactError):
            assert read_outline(path).outputs
