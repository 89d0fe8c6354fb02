"""Graphs that share one file of weights."""

from pathlib import Path

import onnx_ir
import pytest

from edgeformer.export.graphs import weights_file, write_graph
from tests.export import graphs


def test_incomplete_weights_file_is_not_renamed(tmp_path: Path) -> None:
    graph = onnx_ir.from_proto(graphs.embedding(rows=400))
    with pytest.raises(RuntimeError), weights_file(tmp_path / "model.onnx_data") as weights:
        write_graph(graph, tmp_path / "all.onnx", weights)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["all.onnx"]
