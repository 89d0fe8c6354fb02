"""The bundle of a language model: graphs that predict what torch predicts, each weight once, and no hidden leak."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.models.weights import load_model
from edgeformer.run import locate, read_run
from edgeformer.tasks.language_modeling import LanguageScore
from tests.cli.run_cli import edgeformer
from tests.export import language_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_run.exported_language_run(tmp_path_factory)


@pytest.fixture(scope="module")
def artifacts(run: Path) -> dict[str, ArtifactManifest]:
    return {artifact.id: artifact for artifact in Bundle.open(run / "bundle").artifacts}


def test_looped_block_is_stored_once_without_unused_heads(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    exit_head = language_run.WORDS * 32
    assert load_model(run).exit_heads["shared"].weight.numel() == exit_head
    for artifact in artifacts.values():
        assert artifact.status == "built", artifact.reason
        assert artifact.parity is not None and artifact.parity.n >= 8 * 32
    for artifact in (artifacts["onnx-fp32"], artifacts["onnx-int8"]):
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
        assert artifact.sharing.unique_parameters == read_run(run).parameters - exit_head
    for name, products in (("full", 21), ("decode", 21), ("step", 14)):
        int8 = next(a for a in artifacts.values() if a.precision == "int8" and a.role == name)
        assert int8.quantized["MatMulInteger"] == products, name
    fp32 = artifacts["onnx-fp32"]
    assert fp32.parity is not None and fp32.parity.max_abs_error is not None and fp32.parity.max_abs_error < 1e-4
    assert (fp32.parity.n, fp32.role, fp32.exit) == (8 * 64, "full", None)
    assert fp32.inputs == {"input_ids": "int64[batch, sequence]"}
    assert fp32.outputs == {"logits": f"float32[batch, sequence, {language_run.WORDS}]"}


@pytest.mark.slow
def test_fp16_and_int4_halve_the_weights_and_stay_close(tmp_path: Path) -> None:
    recipe = language_run.language_recipe(embedding_size=32)  # four bits do not shrink narrower tables
    options = ExportOptions(fp16=True, int4=True, keep_going=True)
    built = export(language_run.write_language_run(tmp_path / "run", recipe), options).artifacts
    artifacts: dict[str, Any] = {artifact.id: artifact for artifact in built}
    fp32, fp16, int4 = (artifacts[f"onnx-{precision}"] for precision in ("fp32", "fp16", "int4"))
    assert fp16.status == "built" and fp16.parity.relative_error < 1e-2, fp16.reason
    assert fp16.parity.max_abs_error > 10 * fp32.parity.max_abs_error, "the FP16 graph does not compute in FP16"
    assert fp16.sharing.weight_bytes / fp32.sharing.weight_bytes == pytest.approx(0.5, abs=0.02)
    assert "MatMul" not in fp16.ops_in_fp32 and fp16.score.loss == pytest.approx(fp32.score.loss, abs=1e-2)
    assert (int4.parity.status, int4.parity.tolerance_kind) == ("measured", "score")
    assert int4.sharing.stored_parameters == int4.sharing.unique_parameters == fp32.sharing.unique_parameters
    assert int4.size_bytes < 0.6 * fp32.size_bytes and int4.quantized["MatMulNBits"] > 0
    assert int4.drift.tolerance == 0.3 and len(int4.drift.loops) == 2


def test_golden_outputs_equal_torch_at_every_exit(run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    with np.load(run / "bundle" / "golden.npz") as file:
        golden = dict(file)
    ids, targets = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["targets"])
    assert ids.shape == targets.shape == (8, 64) and torch.equal(ids[:, 1:], targets[:, :-1])
    for loop in (language_run.EXIT, language_run.LOOPS):
        with torch.inference_mode():
            expected = load_model(run).logits(ids, loop).numpy()
        values, indices = golden[f"top_values_exit{loop}"], golden[f"top_indices_exit{loop}"]
        assert values.shape == indices.shape == (8, 64, 32)
        np.testing.assert_allclose(values, np.sort(expected, axis=-1)[..., ::-1][..., :32], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, indices, -1), values, atol=1e-5)
        log_sum = np.log(np.exp(expected.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(golden[f"log_sum_exp_exit{loop}"], log_sum, atol=1e-5)
    first, last = (golden[f"top_values_exit{loop}"] for loop in (language_run.EXIT, language_run.LOOPS))
    assert not np.array_equal(first, last)
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(expected).flatten(0, 1), targets.flatten())
    score = artifacts["onnx-fp32"].score
    assert isinstance(score, LanguageScore) and score.loss == pytest.approx(float(loss), abs=1e-5)
    assert (score.n, list(score.exits), score.words) == (512, [str(language_run.LOOPS)], None)


def test_manifest_fields_of_a_language_model(run: Path) -> None:
    bundle = Bundle.open(run / "bundle").manifest
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    assert bundle.task == "language-modeling" and isinstance(bundle.data, TextConfig)
    assert (bundle.labels, bundle.exits, bundle.leaks) == ((), (language_run.EXIT, language_run.LOOPS), False)
    assert (bundle.max_length, bundle.max_positions) == (64, language_run.POSITIONS)
    assert bundle.pad_id == config["boundary_token_id"]
    assert bundle.parameters == read_run(run).parameters
    present = {p.relative_to(run / "bundle").as_posix() for p in (run / "bundle").rglob("*") if p.is_file()}
    files = {name for artifact in bundle.artifacts for name in (str(artifact.file), *artifact.parts.values())}
    assert {*bundle.files, *files, "bundle.json"} == present
    assert all(sha256_of(run / "bundle" / name) == sha256 for name, sha256 in bundle.files.items())


@pytest.mark.slow
def test_leaking_model_is_refused_or_marked(run: Path, tmp_path: Path) -> None:
    """With batch normalisation, whose running statistics are stored and are no parameters."""
    recipe = language_run.language_recipe(mode="paragraphs", causal=False, cycles=1, norm="batch")
    leaking = language_run.write_language_run(tmp_path / "artifacts" / "tiny-leak", recipe)
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
    assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
    assert artifact.sharing.constant_elements > 2 * 32 * 4
    assert all(row.leaks for row in evaluate(locate(str(leaking), tmp_path), EvaluateOptions()).rows)
    marked = Path(shutil.copytree(run, tmp_path / "marked"))
    manifest = json.loads((marked / "run.json").read_text(encoding="utf-8"))
    (marked / "run.json").write_text(json.dumps({**manifest, "leaks": True}), encoding="utf-8")
    with pytest.raises(InputError, match=r"leaks future tokens \(run\.json says so\)"):
        export(marked)
