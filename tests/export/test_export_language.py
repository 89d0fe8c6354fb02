"""The bundle of a language model: graphs that predict what torch predicts, each weight once, and no hidden leak."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_every_precision_is_built_and_close_on_every_golden_token(artifacts: dict[str, ArtifactManifest]) -> None:
    for artifact in artifacts.values():
        assert artifact.status == "built", artifact.reason
        assert artifact.parity is not None and artifact.parity.n >= 8 * 32
    fp32, fp16 = artifacts["onnx-fp32"], artifacts["onnx-fp16"]
    for artifact in (fp32, fp16):
        assert artifact.parity is not None and artifact.parity.n == 8 * 64
        assert artifact.inputs == {"input_ids": "int64[batch, sequence]"}
        assert artifact.outputs == {"logits": f"float32[batch, sequence, {WORDS}]"}
        assert (artifact.role, artifact.exit) == ("full", None)
    assert fp32.parity is not None and fp32.parity.max_abs_error is not None and fp32.parity.max_abs_error < 1e-4
    assert fp16.parity is not None and fp16.parity.relative_error is not None and fp16.parity.relative_error < 1e-2
    assert (fp16.parity.max_abs_error or 0) > 10 * fp32.parity.max_abs_error, "the FP16 graph does not compute in FP16"


def test_looped_block_is_stored_once_without_unused_heads(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    exit_head = WORDS * 32
    assert model_of(run).exit_heads["shared"].weight.numel() == exit_head
    for artifact in (artifacts["onnx-fp32"], artifacts["onnx-int8"], artifacts["onnx-fp16"]):
        assert artifact.sharing is not None
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
        assert artifact.sharing.unique_parameters == read_run(run).parameters - exit_head
    for name, products in (("full", 21), ("decode", 21), ("step", 14)):
        int8 = next(a for a in artifacts.values() if a.precision == "int8" and a.role == name)
        assert int8.quantized["MatMulInteger"] == products, name
    fp32, fp16 = artifacts["onnx-fp32"].sharing, artifacts["onnx-fp16"].sharing
    assert fp32 is not None and fp16 is not None
    assert fp16.weight_bytes / fp32.weight_bytes == pytest.approx(0.5, abs=0.02)


def test_fp16_keeps_norms_and_their_weights_in_fp32(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    norms = 1 + LOOPS * (2 + 2)  # of the embeddings' cycle, and in each loop those of two cycles and of the block
    assert artifacts["onnx-fp16"].ops_in_fp32["LayerNormalization"] == norms
    assert "MatMul" not in artifacts["onnx-fp16"].ops_in_fp32
    graph = onnx.load(run / "bundle" / "onnx" / "model_fp16.onnx").graph  # with its weights file
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for name in ("block.model.norm1.weight", "block.model.trm.cycles.0.norm.bias"):
        assert stored[name].data_type == onnx.TensorProto.FLOAT
    for name in ("text_embed.model.tokens.weight", "text_embed.model.positions.weight"):
        assert stored[name].data_type == onnx.TensorProto.FLOAT16
    scale = onnx.numpy_helper.to_array(stored["block.model.norm1.weight"])
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


def test_golden_outputs_equal_torch_at_every_exit(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    with np.load(run / "bundle" / "golden.npz") as file:
        golden = dict(file)
    ids, targets = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["targets"])
    assert ids.shape == targets.shape == (8, 64) and torch.equal(ids[:, 1:], targets[:, :-1])
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
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(expected).flatten(0, 1), targets.flatten())
    for name, tolerance in (("onnx-fp32", 1e-5), ("onnx-fp16", 1e-2)):
        score = artifacts[name].score
        assert isinstance(score, LanguageScore)
        assert score.loss == pytest.approx(float(loss), abs=tolerance)
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
    files = {name for artifact in bundle.artifacts for name in (str(artifact.file), *artifact.parts.values())}
    assert {*bundle.files, *files, "bundle.json"} == present
    assert all(sha256_of(run / "bundle" / name) == sha256 for name, sha256 in bundle.files.items())


def test_leaking_model_is_refused_or_marked(run: Path, tmp_path: Path) -> None:
    """With batch normalisation, whose running statistics are stored and are no parameters."""
    recipe = language_recipe(mode="paragraphs", causal=False, cycles=1, norm="batch")
    leaking = write_language_run(tmp_path / "artifacts" / "tiny-leak", recipe)
    ahead = r"leaks future tokens \(outputs depend on tokens up to \d+ positions ahead\).*--allow-leak"
    with pytest.raises(InputError, match=ahead):
        export(leaking)
    assert not (leaking / "bundle").exists()
    outcome = edgeformer("export", "tiny-leak", "--allow-leak", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "leaks future tokens" in outcome.out and "--allow-leak" in outcome.out
    bundle = Bundle.open(leaking / "bundle").manifest
    (artifact,) = bundle.artifacts
    assert bundle.leaks and artifact.status == "built", artifact.reason
    assert artifact.sharing is not None
    assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
    assert artifact.sharing.constant_elements > 2 * 32 * 4
    marked = Path(shutil.copytree(run, tmp_path / "marked"))
    manifest = json.loads((marked / "run.json").read_text(encoding="utf-8"))
    (marked / "run.json").write_text(json.dumps({**manifest, "leaks": True}), encoding="utf-8")
    with pytest.raises(InputError, match=r"leaks future tokens \(run\.json says so\)"):
        export(marked)


def test_golden_inputs_of_another_type_are_damaged(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    path = copy / "model" / "golden_inputs.npz"
    np.savez(path, input_ids=np.ones((8, 64), np.int32), targets=np.ones((8, 64), np.int64))
    with pytest.raises(ArtifactError, match=r"golden_inputs\.npz: .*damaged.*train the run again"):
        export(copy)


def test_untrained_weights_are_reported(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    path = copy / "model" / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ArtifactError, match="causality probe"):
        export(copy)
