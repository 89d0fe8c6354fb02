"""What ONNX Runtime says it has executed, read back from its profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph, Tensor
from tests.runtimes.tiny_bundle import VOCABULARY, WIDTH, write_bundle


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("nodes") / "bundle") / "onnx" / "model.onnx"


def feed(batch: int, seq: int) -> dict[str, np.ndarray]:
    ids = np.ones((batch, seq), np.int64)
    return {"input_ids": ids, "attention_mask": ids}


def test_nodes_come_with_operator_shapes_and_constants(graph: Path) -> None:
    (nodes,) = ProfiledGraph(graph).list_nodes(feed(2, 5))
    by_op = {node.op: node for node in nodes}
    product = by_op["MatMul"]
    assert product.inputs == (Tensor("float", (2, WIDTH)), Tensor("float", (WIDTH, 2)))
    assert product.outputs == (Tensor("float", (2, 2)),)
    assert product.parameter_bytes == WIDTH * 2 * 4
    lookup = by_op["Gather"]
    assert lookup.inputs[0] == Tensor("float", (VOCABULARY, WIDTH))
    assert lookup.outputs[0].bytes == 2 * 5 * WIDTH * 4
    assert all(node.duration_us >= 0 and node.name for node in nodes)


def test_every_feed_has_its_own_nodes(graph: Path) -> None:
    small, large = ProfiledGraph(graph).list_nodes(feed(1, 3), feed(4, 7), calls=4)
    assert [node.name for node in small] == [node.name for node in large]
    rows = [next(node for node in nodes if node.op == "MatMul").outputs[0].shape[0] for nodes in (small, large)]
    assert rows == [1, 4]


def test_packed_weights_do_not_show(graph: Path) -> None:
    """The reason why listings are made without packing."""
    (plain,), (packed,) = (ProfiledGraph(graph, prepacked=how).list_nodes(feed(1, 3)) for how in (False, True))
    weight_bytes = [sum(node.parameter_bytes for node in nodes if node.op == "MatMul") for nodes in (plain, packed)]
    assert weight_bytes[0] > weight_bytes[1]


def test_a_shape_that_the_graph_refuses(graph: Path) -> None:
    with pytest.raises(InputError, match="refuses an input"):
        ProfiledGraph(graph).list_nodes(feed(1, 99))


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(ArtifactError, match="cannot be opened"):
        ProfiledGraph(tmp_path / "bad.onnx")
    with pytest.raises(ArtifactError, match="cannot be opened"):
        ProfiledGraph(tmp_path / "absent.onnx")


def test_inputs_are_as_declared(graph: Path) -> None:
    opened = ProfiledGraph(graph)
    assert opened.inputs["input_ids"] == ("tensor(int64)", (None, None))
    opened.list_nodes(feed(1, 3))


def test_nothing_is_left_behind(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ProfiledGraph(graph).list_nodes(feed(1, 3))
    assert list(tmp_path.iterdir()) == []
