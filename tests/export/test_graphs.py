"""Graphs cut out of one trace, and graphs that share one file of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.models.blocks.tracing import export_graph, extract_outputs, text_spec
from edgeformer.runtimes.onnxruntime.session import OnnxSession


class TwoHeads(nn.Module):
    """One table, one product used twice, a head for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.block = nn.Linear(16, 16, bias=False)
        self.steps = nn.Parameter(torch.randn(2, 16))
        self.early, self.late = nn.Linear(16, 8, bias=False), nn.Linear(16, 24, bias=False)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        first = self.block(self.table(input_ids) + self.steps[0])
        return self.early(first), self.late(self.block(first + self.steps[1]))


@pytest.fixture(scope="module")
def traced() -> tuple[TwoHeads, onnx.ModelProto]:
    torch.manual_seed(0)
    model = TwoHeads().eval()
    return model, export_graph(text_spec(model, ["input_ids"], 64, ("first", "second")))


def stored(path: Path) -> int:
    graph = onnx.load(str(path), load_external_data=False).graph
    return sum(int(np.prod(t.dims)) for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT)


def test_cut_out_graph_holds_only_what_it_needs(traced, tmp_path: Path) -> None:
    model, graph = traced
    for name, needed in (("first", 20 * 16 + 16 * 16 + 16 + 16 * 8), ("second", 20 * 16 + 16 * 16 + 32 + 16 * 24)):
        path = tmp_path / f"{name}.onnx"
        write_graph(extract_outputs(graph, {name: "logits"}), path)
        assert stored(path) == needed
        ids = np.arange(10, dtype=np.int64).reshape(2, 5)
        with OnnxSession(path) as session, torch.inference_mode():
            expected = model(torch.from_numpy(ids))[0 if name == "first" else 1].numpy()
            assert np.abs(session.run({"input_ids": ids})["logits"] - expected).max() < 1e-5
    assert [value.name for value in graph.graph.outputs] == ["first", "second"]  # the trace is unchanged


def test_incomplete_weights_file_is_not_renamed(traced, tmp_path: Path) -> None:
    _, graph = traced
    with pytest.raises(RuntimeError), weights_file(tmp_path / "model.onnx_data") as weights:
        write_graph(graph, tmp_path / "all.onnx", weights)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["all.onnx"]
