"""Export of a run: graphs that compute what torch computes, each weight once; rejected artifacts are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export import judging, run_source
from edgeformer.export.audit import audit_sharing, stored_twice
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.language_modeling import MAX_PERPLEXITY_RISE as LANGUAGE_LOSS
from tests.export.language_run import write_language_run


@pytest.fixture(scope="module")
def artifacts(fresh_run: Path) -> dict[str, ArtifactManifest]:
    return {a.id: a for a in Bundle.open(fresh_run / "bundle").artifacts}


def test_both_precisions_are_built_and_close(artifacts: dict[str, ArtifactManifest]) -> None:
    assert set(artifacts) == {"onnx-fp32", "onnx-fp16"}
    for artifact in artifacts.values():
        assert artifact.status == "built", artifact.reason
        assert artifact.parity is not None and artifact.parity.n == 64
        assert artifact.parity.top1_agreement == 1.0
    fp32, fp16 = artifacts["onnx-fp32"].parity, artifacts["onnx-fp16"].parity
    assert fp32 is not None and fp32.max_abs_error is not None and fp32.max_abs_error < 1e-4
    assert fp16 is not None and fp16.relative_error is not None and fp16.relative_error < 1e-2


def test_every_weight_is_stored_once(fresh_run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    parameters = read_run(fresh_run).parameters
    for artifact in artifacts.values():
        assert artifact.sharing is not None
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters == parameters


def test_manifest_has_the_loop_count(fresh_run: Path) -> None:
    bundle = Bundle.open(fresh_run / "bundle")
    assert bundle.manifest.loops == 2 == bundle.loops


def test_audit_sees_a_weight_that_was_copied(fresh_run: Path, tmp_path: Path) -> None:
    graph = onnx.load(str(fresh_run / "bundle" / "onnx" / "model.onnx"), load_external_data=False)
    unique = read_run(fresh_run).parameters
    largest = max(graph.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    copy = onnx.TensorProto()
    copy.CopyFrom(largest)
    copy.name = "copied"
    graph.graph.initializer.append(copy)
    result = audit_sharing(graph, unique)
    assert result.stored_parameters == unique + int(np.prod(largest.dims))
    assert f"stores {result.stored_parameters:,} parameters for a model of {unique:,}" in str(stored_twice(result))
    assert stored_twice(result.model_copy(update={"unique_parameters": result.stored_parameters + 1})) is None


def test_audit_sees_weights_hidden_in_constant_nodes(fresh_run: Path) -> None:
    graph = onnx.load(str(fresh_run / "bundle" / "onnx" / "model.onnx"), load_external_data=False)
    unique = read_run(fresh_run).parameters
    value = onnx.numpy_helper.from_array(np.zeros((3, 4), dtype=np.float32))
    graph.graph.node.append(onnx.helper.make_node("Constant", [], ["hidden"], value=value))
    assert audit_sharing(graph, unique).stored_parameters == unique + 12


def test_graphs_contain_no_local_paths(fresh_run: Path) -> None:
    content = (fresh_run / "bundle" / "onnx" / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b"edgeformer/models" not in content


def test_batch_and_sequence_are_dynamic(fresh_run: Path) -> None:
    model = load_model(fresh_run)
    generator = np.random.default_rng(0)
    with OnnxSession(fresh_run / "bundle" / "onnx" / "model.onnx") as session:
        for batch, length in ((1, 1), (1, 5), (3, 64), (5, 512)):
            ids = generator.integers(5, 600, (batch, length))
            mask = np.ones((batch, length), dtype=np.int64)
            mask[-1, length // 2 + 1 :] = 0
            result = session.run({"input_ids": ids, "attention_mask": mask})["logits"]
            with torch.inference_mode():
                expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
            assert result.dtype == np.float32
            assert np.abs(result - expected).max() < 1e-4
        with pytest.raises(InputError, match="513"):
            session.run(
                {"input_ids": np.ones((1, 513), dtype=np.int64), "attention_mask": np.ones((1, 513), dtype=np.int64)}
            )


def test_fp16_keeps_normalisation_and_rotary_in_fp32(artifacts: dict[str, ArtifactManifest]) -> None:
    kept = artifacts["onnx-fp16"].ops_in_fp32
    norms = 2 * 1 * 2 + 1  # two per layer, one layer, two iterations, and the final one
    assert kept["Pow"] == kept["Sqrt"] == norms
    assert "MatMul" not in kept and "Gemm" not in kept


def test_fp16_weights_are_half_the_bytes(artifacts: dict[str, ArtifactManifest]) -> None:
    fp32, fp16 = artifacts["onnx-fp32"].sharing, artifacts["onnx-fp16"].sharing
    assert fp32 is not None and fp16 is not None
    rotary = 2 * 512 * 8 * 4  # cos and sin stay in float32
    assert (fp16.weight_bytes - rotary) / (fp32.weight_bytes - rotary) == pytest.approx(0.5, abs=0.02)


def test_manifest_lists_every_file_with_its_hash(fresh_run: Path) -> None:
    bundle = fresh_run / "bundle"
    manifest = Bundle.open(bundle).manifest
    listed = {**manifest.files, **{str(a.file): a.sha256 for a in manifest.artifacts}}
    present = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()} - {"bundle.json"}
    assert set(listed) == present
    for name, sha256 in listed.items():
        assert sha256_of(bundle / name) == sha256


def test_golden_inputs_give_the_golden_logits(fresh_run: Path) -> None:
    with np.load(fresh_run / "bundle" / "golden.npz") as golden:
        assert golden["input_ids"].shape[0] == 64
        with OnnxSession(fresh_run / "bundle" / "onnx" / "model.onnx") as session:
            result = session.run({k: golden[k] for k in ("input_ids", "attention_mask")})["logits"]
        assert np.abs(result - golden["logits"]).max() < 1e-4


def test_unfinished_run_is_refused(fresh_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fresh_run, run)
    manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps({**manifest, "status": "interrupted"}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is interrupted, not finished"):
        export(run)


def test_damaged_weights_keep_the_old_bundle(fresh_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fresh_run, run)
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    old = sha256_of(run / "bundle" / "bundle.json")
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        export(run)
    assert sha256_of(run / "bundle" / "bundle.json") == old
    assert not list(run.glob(".bundle*"))


def test_fp16_computes_softmax_in_fp32(fresh_run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    graph = onnx.load(str(fresh_run / "bundle" / "onnx" / "model_fp16.onnx"), load_external_data=False).graph
    softmaxes = [node for node in graph.node if node.op_type == "Softmax"]
    assert len(softmaxes) == 1 * 2  # one layer, two iterations
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    assert all(node.input[0] in casts for node in softmaxes)
    assert artifacts["onnx-fp16"].ops_in_fp32["Softmax"] == len(softmaxes)


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


def test_decode_graph_with_wrong_logits_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_failed_quantisation_rejects_only_its_variant(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def refuse(graphs: object, *_: object) -> None:
        calls.append(graphs)
        raise EdgeformerError("INT8: these weights would stay FP32: w")

    monkeypatch.setattr(run_source, "quantized_graphs", refuse)
    stopped = export(run, ExportOptions(int8=True, vocab_trim=True)).artifacts
    assert {artifact.id: artifact.status for artifact in stopped} == {"onnx-fp32": "built", "onnx-int8": "rejected"}
    assert "would stay FP32" in str(stopped[-1].reason) and len(calls) == 1
    assert not (run / "bundle" / "trimmed").exists()  # it would be empty


def test_keep_going_builds_after_a_rejected_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
