"""What export does with artifacts that are wrong: each is found, named and left out; the others stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export import int8, judging
from edgeformer.export.export import export
from edgeformer.export.fp16 import FP16_MAX, max_abs_activation
from edgeformer.export.variants import ExportOptions
from edgeformer.models.weights import load_model
from edgeformer.tasks.language_modeling import LOSS as LANGUAGE_LOSS
from tests.export.language_run import write_language_run


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("bundle"))
    return tmp_path / "run"


def by_id(artifacts: tuple[ArtifactManifest, ...]) -> dict[str, ArtifactManifest]:
    return {artifact.id: artifact for artifact in artifacts}


def test_a_weight_that_fp16_cannot_hold_rejects_fp16_alone(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "large")
    weights = load_file(run / "model" / "model.safetensors")
    name = next(name for name, tensor in weights.items() if tensor.ndim == 2 and "head" in name)
    weights[name][0, 0] = 1e5
    save_file(weights, run / "model" / "model.safetensors")
    artifacts = by_id(export(run, ExportOptions(fp16=True, keep_going=True)).artifacts)
    assert artifacts["onnx-fp32"].status == "built"
    assert artifacts["onnx-fp16"].status == "rejected" and "overflow" in str(artifacts["onnx-fp16"].reason)
    assert Bundle.open(run / "bundle").artifacts[-1].status == "rejected"  # it could be written, and read again
    assert not list((run / "bundle" / "onnx").glob("*fp16.onnx")), "a client would open it by its name"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_activations_that_are_no_numbers_are_an_overflow(run: Path, broken: float) -> None:
    """NaN loses every comparison: taken as it is, it would be no larger than anything."""
    model = load_model(run)
    with torch.no_grad():
        model.layers[0].attention.qkv.weight[0, 0] = broken
    assert max_abs_activation(model, np.full((2, 5), 7), np.ones((2, 5), dtype=np.int64)) == float("inf")


def test_attention_scores_beyond_fp16_are_seen_although_torch_keeps_them_to_itself(run: Path) -> None:
    model = load_model(run)
    ids, mask = np.full((2, 5), 7), np.ones((2, 5), dtype=np.int64)
    assert max_abs_activation(model, ids, mask) < FP16_MAX
    attention = model.layers[0].attention
    size = attention.heads * attention.head_size
    with torch.no_grad():
        attention.qkv.weight[: 2 * size] *= 1500  # queries and keys stay in range, their products do not
    observed: list[float] = []
    hook = attention.qkv.register_forward_hook(lambda _, __, arguments: observed.append(float(arguments.abs().max())))
    assert max_abs_activation(model, ids, mask) > FP16_MAX
    hook.remove()
    assert max(observed) < FP16_MAX


def test_a_decode_graph_that_answers_nonsense_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_language_run(tmp_path / "nonsense")
    decode = judging.decode_windows

    def nonsense(session: object, ids: np.ndarray, half: int) -> np.ndarray:
        logits: np.ndarray = decode(session, ids, half)  # type: ignore[arg-type]
        int8 = "int8" in str(session.path)  # type: ignore[attr-defined]
        return np.random.default_rng(0).normal(0, 9, logits.shape).astype(np.float32) if int8 else logits

    monkeypatch.setattr(judging, "decode_windows", nonsense)
    artifacts = by_id(export(run, ExportOptions(int8=True)).artifacts)
    assert artifacts["onnx-fp32-decode"].status == "built" and artifacts["onnx-int8"].status == "built"
    assert artifacts["onnx-int8-decode"].status == "rejected"
    assert "above FP32's" in str(artifacts["onnx-int8-decode"].reason)


def test_what_cannot_be_made_does_no_harm_to_the_rest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def refuse(graphs: object, workplace: Path) -> None:
        calls.append(graphs)
        raise EdgeformerError("INT8: these weights would stay FP32: w")

    monkeypatch.setattr(int8, "quantized_graphs", refuse)
    stopped = export(run, ExportOptions(int8=True, vocab_trim=True)).artifacts
    assert {artifact.id: artifact.status for artifact in stopped} == {"onnx-fp32": "built", "onnx-int8": "rejected"}
    assert "would stay FP32" in str(stopped[-1].reason) and len(calls) == 1
    assert not (run / "bundle" / "trimmed").exists()  # nothing would stand in it


def test_going_on_builds_what_comes_after_a_rejected_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANGUAGE_LOSS, "int8", -1.0)  # no perplexity can fall that far
    run = write_language_run(tmp_path / "going")
    built = by_id(export(run, ExportOptions(int8=True, fp16=True, keep_going=True)).artifacts)
    assert {name: artifact.status for name, artifact in built.items()} == {
        "onnx-fp32": "built",
        "onnx-fp32-decode": "built",
        "onnx-int8": "rejected",
        "onnx-int8-decode": "rejected",
        "onnx-fp16": "built",
        "onnx-fp16-decode": "built",
    }
    files = {path.name for path in (run / "bundle" / "onnx").glob("*.onnx")}
    assert files == {"model.onnx", "decode.onnx", "model_fp16.onnx", "decode_fp16.onnx"}


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_tokenizer_is_named(run: Path, damage: str) -> None:
    tokenizer = run / "model" / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    tokenizer.unlink() if damage == "missing" else tokenizer.write_text(text[:100], encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: missing or damaged"):
        export(run)


def test_a_target_needs_something_to_build_for_it(run: Path) -> None:
    with pytest.raises(InputError, match=r"--target: .* add --trt"):
        export(run, ExportOptions(target="rtx4050"))
    with pytest.raises(InputError, match=r"--build nonsense: no such builder; there are: .*tensorrt"):
        export(run, ExportOptions(build=("nonsense",)))
