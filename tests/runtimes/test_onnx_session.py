from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.runtimes.tiny_bundle import CLASSES, POSITIONS, classifier_graph, greedy_graph


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx.save(classifier_graph(), path)
    return path


def inputs(batch: int = 2, seq: int = 6) -> dict[str, np.ndarray]:
    ids = np.arange(1, batch * seq + 1, dtype=np.int64).reshape(batch, seq)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_runs_and_names_its_outputs(graph: Path) -> None:
    with OnnxSession(graph, threads=1) as session:
        outputs = session.run(inputs())
        assert session.provider == "CPUExecutionProvider"
    assert list(outputs) == ["logits"]
    assert outputs["logits"].shape == (2, CLASSES)
    assert outputs["logits"].dtype == np.float32


def test_gives_what_the_reference_evaluator_gives(graph: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    expected = ReferenceEvaluator(str(graph)).run(None, inputs())[0]
    with OnnxSession(graph) as session:
        np.testing.assert_allclose(session.run(inputs())["logits"], expected, atol=1e-5)


def test_leaves_out_inputs_that_the_graph_does_not_have(graph: Path) -> None:
    with OnnxSession(graph) as session:
        assert session.run({**inputs(), "token_type_ids": inputs()["input_ids"]})["logits"].shape == (
            2,
            CLASSES,
        )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"attention_mask": None}, "'attention_mask' is missing"),
        (
            {"input_ids": np.ones((2, 6), np.int32)},
            r"must be int64\[batch, seq\] and not empty, but is int32\[2, 6\]",
        ),
        ({"input_ids": np.ones(6, np.int64)}, r"but is int64\[6\]"),
        ({"input_ids": np.ones((0, 6), np.int64)}, "not empty"),
        ({"input_ids": np.full((2, 6), 5000, np.int64)}, "outside the model's vocabulary"),
        ({"attention_mask": np.ones((2, 5), np.int64)}, "the graph refuses"),
    ],
)
def test_unusable_inputs_are_explained(
    graph: Path, changed: dict[str, np.ndarray | None], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changed_inputs = {name: array for name, array in {**inputs(), **changed}.items() if array is not None}
    with OnnxSession(graph) as session, pytest.raises(InputError, match=says):
        session.run(changed_inputs)
    assert capfd.readouterr().err == "", "onnxruntime's own log must not reach the terminal"


def test_a_sequence_longer_than_the_positional_table_is_an_input_error(graph: Path) -> None:
    with (
        OnnxSession(graph) as session,
        pytest.raises(InputError, match="longer than the model's positional table"),
    ):
        session.run(inputs(1, POSITIONS + 1))
    limited = OnnxSession(graph, max_positions=POSITIONS)
    with limited, pytest.raises(InputError, match=f"is {POSITIONS + 1} tokens long, .* at most {POSITIONS}"):
        limited.run(inputs(1, POSITIONS + 1))


@pytest.mark.parametrize("content", ["truncated", "text", "empty"])
def test_a_damaged_file_is_named_with_a_remedy(
    graph: Path, tmp_path: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    graph_bytes = graph.read_bytes()
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(
        {"truncated": graph_bytes[: len(graph_bytes) // 2], "text": b"hello\n" * 50, "empty": b""}[content]
    )
    with pytest.raises(ArtifactError, match=r"damaged\.onnx: is truncated, damaged, or not an ONNX.*export the run"):
        OnnxSession(damaged)
    assert capfd.readouterr().err == ""


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent\.onnx: no such file"):
        OnnxSession(tmp_path / "absent.onnx")


def test_an_unknown_operator_is_an_artifact_error(tmp_path: Path) -> None:
    model = classifier_graph()
    model.graph.node[-1].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ArtifactError, match="cannot be opened by onnxruntime"):
        OnnxSession(tmp_path / "odd.onnx")


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "NoSuchProvider"])
def test_an_unavailable_provider_lists_those_that_are(graph: Path, provider: str) -> None:
    import onnxruntime

    if provider in onnxruntime.get_available_providers():
        pytest.skip(f"{provider} is available here")
    with pytest.raises(InputError, match=f"{provider}.*available: .*CPUExecutionProvider"):
        OnnxSession(graph, provider=provider)


def test_running_out_of_memory_is_said_in_words(tmp_path: Path) -> None:
    onnx.save(greedy_graph(), tmp_path / "greedy.onnx")
    with OnnxSession(tmp_path / "greedy.onnx") as session:
        with pytest.raises(EdgeformerError, match="not enough memory") as caught:
            session.run(inputs(4, 6))
        assert caught.value.exit_code == 1


def test_a_closed_session_says_so(graph: Path) -> None:
    session = OnnxSession(graph)
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run(inputs())


def test_opening_and_failing_prints_nothing_on_a_terminal(graph: Path, tmp_path: Path) -> None:
    """In a process of its own, where no test runner has touched stderr."""
    (tmp_path / "half.onnx").write_bytes(graph.read_bytes()[:500])
    program = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from edgeformer.runtimes.onnxruntime.session import OnnxSession\n"
        "from edgeformer.artifacts.errors import InputError\n"
        "ids = np.ones((1, 99), np.int64)\n"
        "for attempt in (lambda: OnnxSession(Path(sys.argv[2])), lambda: OnnxSession(Path(sys.argv[1]))"
        ".run({'input_ids': ids, 'attention_mask': ids})):\n"
        "    try: attempt()\n"
        "    except InputError: continue\n"
        "    raise SystemExit('was not refused')\n"
    )
    command = [sys.executable, "-c", program, str(graph), str(tmp_path / "half.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
