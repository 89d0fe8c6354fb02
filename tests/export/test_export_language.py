"""The bundle of a language model: graphs that predict what torch predicts, each weight once, and no hidden leak."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.models.crt.model import CRT
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.language_modeling import LanguageScore
from tests.cli.run_cli import edgeformer
from tests.export.language_run import (
    EXIT,
    LOOPS,
    POSITIONS,
    WORDS,
    exported_language_run,
    language_recipe,
    write_language_run,
)


def model_of(run: Path) -> CRT:
    model = load_model(run)
    assert isinstance(model, CRT)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory)


@pytest.fixture(scope="module")
def artifacts(run: Path) -> dict[str, ArtifactManifest]:
    return {artifact.id: artifact for artifact in Bundle.open(run / "bundle").artifacts}


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = language_recipe(mode="paragraphs", causal=False, cycles=1, norm="batch")
    return write_language_run(tmp_path_factory.mktemp("leaking") / "tiny-leak", recipe)


def test_both_precisions_are_built_and_close_on_every_golden_token(artifacts: dict[str, ArtifactManifest]) -> None:
    assert all(artifact.status == "built" for artifact in artifacts.values())
    for artifact in (artifacts["onnx-fp32"], artifacts["onnx-fp16"]):
        assert artifact.parity is not None and artifact.parity.n == 8 * 64
        assert artifact.inputs == {"input_ids": "int64[batch, sequence]"}
        assert artifact.outputs == {"logits": f"float32[batch, sequence, {WORDS}]"}
        assert (artifact.role, artifact.exit) == ("full", None)
    fp32, fp16 = artifacts["onnx-fp32"].parity, artifacts["onnx-fp16"].parity
    assert fp32 is not None and fp32.max_abs_error is not None and fp32.max_abs_error < 1e-4
    assert fp32.top1_agreement == 1.0
    assert fp16 is not None and fp16.relative_error is not None and fp16.max_abs_error is not None
    assert fp16.relative_error < 1e-2
    assert fp16.max_abs_error > 10 * fp32.max_abs_error, "the FP16 graph does not compute in FP16"


def test_looped_block_is_stored_once_without_unused_heads(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    exit_head = WORDS * 32
    assert model_of(run).exit_heads["shared"].weight.numel() == exit_head
    for artifact in (artifacts["onnx-fp32"], artifacts["onnx-int8"], artifacts["onnx-fp16"]):
        assert artifact.sharing is not None
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
        assert artifact.sharing.unique_parameters == read_run(run).parameters - exit_head
    fp32, fp16 = artifacts["onnx-fp32"].sharing, artifacts["onnx-fp16"].sharing
    assert fp32 is not None and fp16 is not None
    assert fp16.weight_bytes / fp32.weight_bytes == pytest.approx(0.5, abs=0.02)


def test_fp16_keeps_norms_and_their_weights_in_fp32(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    norms = 1 + LOOPS * (2 + 2)  # of the embeddings' cycle, and in each loop those of two cycles and of the block
    assert artifacts["onnx-fp16"].ops_in_fp32["LayerNormalization"] == norms
    assert "MatMul" not in artifacts["onnx-fp16"].ops_in_fp32
    stored = onnx.load(run / "bundle" / "onnx" / "model_fp16.onnx").graph.initializer  # with its weights file
    kinds = {tensor.name: tensor.data_type for tensor in stored}
    assert kinds["block.model.norm1.weight"] == kinds["block.model.trm.cycles.0.norm.bias"] == onnx.TensorProto.FLOAT
    assert (
        kinds["text_embed.model.tokens.weight"]
        == kinds["text_embed.model.positions.weight"]
        == onnx.TensorProto.FLOAT16
    )
    (scale,) = [onnx.numpy_helper.to_array(tensor) for tensor in stored if tensor.name == "block.model.norm1.weight"]
    np.testing.assert_array_equal(scale, model_of(run).norm1.weight.detach().numpy(), "rounded to FP16 on the way")


def test_batch_and_sequence_are_dynamic_up_to_the_last_position(run: Path) -> None:
    model, generator = model_of(run), np.random.default_rng(0)
    with OnnxSession(run / "bundle" / "onnx" / "model.onnx", max_positions=POSITIONS) as session:
        for batch, length in ((1, 1), (1, 5), (3, 17), (2, POSITIONS)):
            ids = generator.integers(0, WORDS, (batch, length))
            result = session.run({"input_ids": ids})["logits"]
            assert result.dtype == np.float32 and result.shape == (batch, length, WORDS)
            with torch.inference_mode():
                assert np.abs(result - model.logits(torch.from_numpy(ids)).numpy()).max() < 1e-4
        with pytest.raises(InputError, match=str(POSITIONS + 1)):
            session.run({"input_ids": np.ones((1, POSITIONS + 1), dtype=np.int64)})


def test_golden_outputs_equal_torch_at_every_exit(run: Path) -> None:
    with np.load(run / "bundle" / "golden.npz") as file:
        golden = dict(file)
    ids = torch.from_numpy(golden["input_ids"])
    assert golden["input_ids"].shape == golden["targets"].shape == (8, 64)
    np.testing.assert_array_equal(golden["input_ids"][:, 1:], golden["targets"][:, :-1])
    for loop in (EXIT, LOOPS):
        with torch.inference_mode():
            expected = model_of(run).logits(ids, loop).numpy()
        values, indices = golden[f"top_values_exit{loop}"], golden[f"top_indices_exit{loop}"]
        assert values.shape == indices.shape == (8, 64, 32)
        np.testing.assert_allclose(values, np.sort(expected, axis=-1)[..., ::-1][..., :32], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, indices, -1), values, atol=1e-5)
        log_sum = np.log(np.exp(expected.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(golden[f"log_sum_exp_exit{loop}"], log_sum, atol=1e-5)
    assert not np.array_equal(golden[f"top_values_exit{EXIT}"], golden[f"top_values_exit{LOOPS}"])


def test_scores_are_those_of_the_last_exit_on_the_golden_targets(
    run: Path, artifacts: dict[str, ArtifactManifest]
) -> None:
    with np.load(run / "model" / "golden_inputs.npz") as golden:
        ids, targets = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["targets"])
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(model_of(run).logits(ids).flatten(0, 1), targets.flatten())
    for name, tolerance in (("onnx-fp32", 1e-5), ("onnx-fp16", 1e-2)):
        score = artifacts[name].score
        assert isinstance(score, LanguageScore)
        assert score.loss == pytest.approx(float(expected), abs=tolerance)
        assert (score.n, list(score.exits), score.words) == (512, [str(LOOPS)], None)


def test_manifest_fields_of_a_language_model(run: Path) -> None:
    bundle = Bundle.open(run / "bundle").manifest
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    assert bundle.task == "language-modeling" and isinstance(bundle.data, TextConfig)
    assert (bundle.labels, bundle.exits, bundle.leaks) == ((), (EXIT, LOOPS), False)
    assert (bundle.max_length, bundle.max_positions) == (64, POSITIONS)
    assert bundle.pad_id == config["boundary_token_id"]
    assert bundle.parameters == read_run(run).parameters
    present = {p.relative_to(run / "bundle").as_posix() for p in (run / "bundle").rglob("*") if p.is_file()}
    assert {*bundle.files, *(str(a.file) for a in bundle.artifacts), "bundle.json"} == present
    assert all(sha256_of(run / "bundle" / name) == sha256 for name, sha256 in bundle.files.items())


def test_leaking_model_is_refused(leaking: Path) -> None:
    ahead = r"leaks future tokens \(outputs depend on tokens up to \d+ positions ahead\).*--allow-leak"
    with pytest.raises(InputError, match=ahead):
        export(leaking)
    assert not (leaking / "bundle").exists()


def test_allowed_leak_is_marked_in_bundle_and_output(leaking: Path, tmp_path: Path) -> None:
    """With batch normalisation, whose running statistics are stored and are no parameters."""
    run = tmp_path / "artifacts" / "tiny-leak"
    shutil.copytree(leaking, run)
    outcome = edgeformer("export", "tiny-leak", "--allow-leak", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "leaks future tokens" in outcome.out and "--allow-leak" in outcome.out
    bundle = Bundle.open(run / "bundle").manifest
    assert bundle.leaks
    (artifact,) = bundle.artifacts
    assert artifact.status == "built", artifact.reason
    assert artifact.sharing is not None
    assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
    assert artifact.sharing.constant_elements > 2 * 32 * 4


def test_run_marked_as_leaking_is_refused(run: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    shutil.copytree(run, marked)
    manifest = json.loads((marked / "run.json").read_text(encoding="utf-8"))
    (marked / "run.json").write_text(json.dumps({**manifest, "leaks": True}), encoding="utf-8")
    with pytest.raises(InputError, match=r"leaks future tokens \(run\.json says so\)"):
        export(marked)


@pytest.mark.parametrize("damage", ["missing", "cut", "other type"])
def test_damaged_golden_inputs_are_named(run: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "model" / "golden_inputs.npz"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        np.savez(path, input_ids=np.ones((8, 64), np.int32), targets=np.ones((8, 64), np.int64))
    old = sha256_of(copy / "bundle" / "bundle.json")
    with pytest.raises(ArtifactError, match=r"golden_inputs\.npz: .*damaged.*train the run again"):
        export(copy)
    assert sha256_of(copy / "bundle" / "bundle.json") == old


def test_untrained_weights_are_reported(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "flat")
    from safetensors.torch import load_file, save_file

    state = {name: torch.zeros_like(tensor) for name, tensor in load_file(run / "model" / "model.safetensors").items()}
    save_file(state, run / "model" / "model.safetensors")
    with pytest.raises(ArtifactError, match="causality probe"):
        export(run)
