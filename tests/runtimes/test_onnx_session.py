"""Sessions of ONNX Runtime and torch, nodes that other providers compute, and the profile of executed nodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph, Tensor
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.torch import RUNTIME
from edgeformer.runtimes.torch.session import TorchSession
from tests.conftest import OLD_FORMAT
from tests.runtimes.tiny_bundle import POSITIONS, VOCABULARY, WIDTH, classifier_graph, greedy_graph, inputs

CPU, CUDA, AZURE = "CPUExecutionProvider", "CUDAExecutionProvider", "AzureExecutionProvider"
needs_azure = pytest.mark.skipif(
    AZURE not in onnxruntime.get_available_providers()
    or not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason=f"this onnxruntime has no {AZURE}, which takes no operator, or does not report where nodes are computed",
)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx.save(classifier_graph(), path)
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_mask": None}, "'attention_mask' is missing"),
        ({"input_ids": np.ones((2, 6), np.int32)}, r"must be int64\[batch, seq\] and not empty, but is int32\[2, 6\]"),
        ({"input_ids": np.ones(6, np.int64)}, r"but is int64\[6\]"),
        ({"input_ids": np.ones((0, 6), np.int64)}, "not empty"),
        ({"input_ids": np.full((2, 6), 5000, np.int64)}, "outside the model's vocabulary"),
        ({"attention_mask": np.ones((2, 5), np.int64)}, "the graph does not accept"),
        (inputs(1, POSITIONS + 1), "the sequence may be too long for the model"),
    ],
)
def test_unusable_inputs_are_explained(graph, changed, message, capfd):
    changed_inputs = {name: array for name, array in {**inputs(), **changed}.items() if array is not None}
    with OnnxSession(graph) as session, pytest.raises(InputError, match=message):
        session.run(changed_inputs)
    assert capfd.readouterr().err == "", "onnxruntime's own log must not reach the terminal"


def test_a_damaged_file_is_named_with_a_remedy(graph: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for content in (graph.read_bytes()[: graph.stat().st_size // 2], b"hello\n" * 50, b""):
        (tmp_path / "damaged.onnx").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"d\.onnx: is truncated, damaged, or not an ONNX.*export the run"):
            OnnxSession(tmp_path / "damaged.onnx")
    assert capfd.readouterr().err == ""
    with pytest.raises(ArtifactError, match=r"absent\.onnx: no such file"):
        OnnxSession(tmp_path / "absent.onnx")
    model = classifier_graph()
    model.graph.node[-1].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ArtifactError, match="cannot be opened by onnxruntime"):
        OnnxSession(tmp_path / "odd.onnx")


def test_an_unavailable_provider_lists_the_available_ones(graph: Path) -> None:
    with pytest.raises(InputError, match=f"NoSuchProvider.*available: .*{CPU}"):
        OnnxSession(graph, provider="NoSuchProvider")


def test_running_out_of_memory_is_explained(tmp_path: Path) -> None:
    onnx.save(greedy_graph(), path := tmp_path / "greedy.onnx")
    with OnnxSession(path) as session, pytest.raises(EdgeformerError, match="not enough memory") as caught:
        session.run(inputs(4, 6))
    assert caught.value.exit_code == 1


@needs_azure
def test_a_provider_that_leaves_nodes_to_the_cpu_reports_it(graph: Path) -> None:
    with OnnxSession(graph) as session:
        assert (session.settings(), session.caveats()) == ({}, ())
    with OnnxSession(graph, AZURE) as session:
        placement, (note,) = session.settings()["nodes_by_provider"], session.caveats()
    assert set(placement) == {CPU} and placement[CPU] >= 5
    assert note.startswith(f"{placement[CPU]} of {placement[CPU]} nodes ran on CPU, not on Azure: ")
    bundle = Bundle.open(OLD_FORMAT / "classifier-v1" / "bundle")
    steps = bundle.artifact("onnx-int8-step")
    with bundle.session(steps, OpenOptions(AZURE, threads=1)) as steps_session:
        placement, notes = steps_session.settings()["nodes_by_provider"], steps_session.caveats()
    assert set(placement) == {CPU}
    assert {note.partition(":")[0] for note in notes} == set(steps.parts) & {"embed", "loop", "readout"}


def test_notes_name_the_most_frequent_operators_first() -> None:
    session: Any = SimpleNamespace(provider=CUDA, _assigned={(CUDA, "MatMul"): 9})
    assert OnnxSession.caveats(session) == ()
    session._assigned = {(CUDA, "MatMul"): 9, (CPU, "Shape"): 2, (CPU, "MatMulInteger"): 6}
    assert OnnxSession.caveats(session) == ("8 of 17 nodes ran on CPU, not on CUDA: MatMulInteger (6), Shape (2)",)
    session._assigned = None
    assert "does not report which nodes CUDA left to the CPU" in OnnxSession.caveats(session)[0]


def test_executed_nodes_have_operator_shapes_and_constants(graph, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = ProfiledGraph(graph)
    assert opened.inputs["input_ids"] == ("tensor(int64)", (None, None))
    (nodes,) = opened.list_nodes(inputs(2, 5))
    by_op = {node.op: node for node in nodes}
    assert by_op["MatMul"].inputs == (Tensor("float", (2, WIDTH)), Tensor("float", (WIDTH, 2)))
    assert by_op["MatMul"].outputs == (Tensor("float", (2, 2)),)
    assert by_op["MatMul"].parameter_bytes == WIDTH * 2 * 4
    assert by_op["Gather"].inputs[0] == Tensor("float", (VOCABULARY, WIDTH))
    assert by_op["Gather"].outputs[0].bytes == 2 * 5 * WIDTH * 4
    assert all(node.duration_us >= 0 and node.name for node in nodes)
    small, large = ProfiledGraph(graph).list_nodes(inputs(1, 3), inputs(4, 7), calls=4)
    assert [node.name for node in small] == [node.name for node in large]
    rows = [next(node for node in nodes if node.op == "MatMul").outputs[0].shape[0] for nodes in (small, large)]
    assert rows == [1, 4] and list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="does not accept an input"):
        ProfiledGraph(graph).list_nodes(inputs(1, 99))
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    for name in ("bad.onnx", "absent.onnx"):
        with pytest.raises(ArtifactError, match="cannot open it"):
            ProfiledGraph(tmp_path / name)


def test_torch_runs_in_evaluation_mode_and_answers_in_float32() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.dropout = torch.nn.Dropout(0.9)

        def forward(self, input_ids, attention_mask):  # type: ignore[no-untyped-def]
            assert torch.is_inference_mode_enabled()
            kept = (input_ids * attention_mask).sum(-1, keepdim=True)
            return self.dropout(kept.to(self.scale.dtype) * self.scale)

    ids = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int64)
    with TorchSession(Counting().train()) as session:
        outputs = session.run({"input_ids": ids, "attention_mask": np.array([[1, 1, 0], [1, 1, 1]], np.int64)})
        assert session.provider == "torch-cpu" and outputs["logits"].dtype == np.float32
        np.testing.assert_array_equal(outputs["logits"], [[3, 3], [15, 15]])
        with pytest.raises(InputError, match="'attention_mask' is missing"):
            session.run({"input_ids": ids})
        with pytest.raises(InputError, match=r"but is float64\[2, 3\]"):
            session.run({"input_ids": ids.astype(float), "attention_mask": ids})
    with pytest.raises(EdgeformerError, match="closed"):
        session.run({"input_ids": ids, "attention_mask": ids})


def test_a_run_is_computed_on_a_card_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_card, kinds in ((True, ("cuda", "cpu", "cuda")), (False, ("cpu", "cpu"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_card=has_card: has_card)
        providers = (None, "torch-cpu", "torch-cuda")[: len(kinds)]
        assert tuple(map(RUNTIME.device, providers)) == kinds
    for provider, message in (("torch-cuda", "torch finds no CUDA card"), ("torch", "torch-cpu or")):
        with pytest.raises(InputError, match=f"--runtime {provider}: .*{message}"):
            RUNTIME.device(provider)
