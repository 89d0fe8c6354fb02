"""export with all of its options, through the command line; and what happens after an artifact that fails."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.tasks.parity import TOLERANCES
from tests.cli.run_cli import edgeformer
from tests.export.language_run import exported_language_run

FORMS = ("", "-exit1", "-step")


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("everything")
    shutil.copytree(finished_run, folder / "artifacts" / "small")
    options = ("--fp16", "--int8", "--vocab-trim", "--trt", "--exit", "all", "--target", "rtx4050", "--json")
    outcome = edgeformer("export", "small", *options, cwd=folder)
    assert outcome.code == (0 if find_spec("tensorrt_rtx") else 3), outcome.err
    return folder, json.loads(outcome.out)


def by_id(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {artifact["id"]: artifact for artifact in document["artifacts"]}


def test_every_requested_artifact_is_built(exported: tuple[Path, dict[str, Any]]) -> None:
    artifacts = by_id(exported[1])
    onnx = {f"onnx-{precision}{form}" for precision in ("fp32", "int8", "fp16") for form in FORMS}
    assert {name for name in artifacts if name.startswith("onnx")} == {*onnx, "onnx-int8-trim", "onnx-fp16-trim"}
    for name in (*onnx, "onnx-int8-trim", "onnx-fp16-trim"):
        artifact = artifacts[name]
        assert artifact["status"] == "built", artifact["reason"]
        assert artifact["sharing"]["stored_parameters"] == artifact["sharing"]["unique_parameters"]
        assert artifact["parity"]["status"] == "measured"
    assert artifacts["onnx-int8-trim"]["vocabulary"]["kept"] < artifacts["onnx-int8-trim"]["vocabulary"]["original"]


def test_an_exit_and_the_step_bundle_answer_like_torch(exported: tuple[Path, dict[str, Any]]) -> None:
    artifacts = by_id(exported[1])
    for precision, bar in (("fp32", 1e-4), ("fp16", 5e-2)):
        for form in FORMS:
            assert artifacts[f"onnx-{precision}{form}"]["parity"]["max_abs_error"] < bar
    step = artifacts["onnx-fp32-step"]
    assert set(step["parts"]) == {"embed", "loop", "readout"} and step["role"] == "step"
    assert (artifacts["onnx-fp32-exit1"]["role"], artifacts["onnx-fp32-exit1"]["exit"]) == ("exit", 1)


def test_drift_is_known_for_every_loop(exported: tuple[Path, dict[str, Any]]) -> None:
    artifacts = by_id(exported[1])
    for precision in ("fp32", "int8", "fp16"):
        drift = artifacts[f"onnx-{precision}"]["drift"]
        assert [row["loop"] for row in drift["loops"]] == [1, 2]
        assert all(0 < row["rms_error"] < drift["tolerance"] for row in drift["loops"])
        assert drift["first_beyond"] is None


@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_engines_are_built_for_the_target_without_parity(exported: tuple[Path, dict[str, Any]]) -> None:
    artifacts = by_id(exported[1])
    names = ["tensorrt-rtx-fp16", *(f"tensorrt-rtx-fp16-{form}" for form in ("exit1", "step", "trim"))]
    if find_spec("nncf") is not None:
        names += ["tensorrt-rtx-int8", "tensorrt-rtx-int8-exit1"]
    assert {name for name in artifacts if name.startswith("tensorrt")} == set(names)
    for name in names:
        engine = artifacts[name]
        assert engine["status"] == "built", engine["reason"]
        assert engine["built_for"]["compute_capability"] == "8.9"
        assert engine["parity"]["status"] == "unavailable" and "edgeformer verify" in engine["parity"]["reason"]


def test_the_bundle_verifies_and_predicts_with_its_own_tokenizers(exported: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = exported
    outcome = edgeformer("verify", "small", "--json", cwd=folder)
    assert outcome.code == 0, outcome.err
    text = "the staff was friendly but the food was not good"
    answers = set()
    for artifact in ("onnx-fp32", "onnx-int8-trim", "onnx-fp16-step", "onnx-fp16-trim"):
        outcome = edgeformer("predict", "small", text, "--artifact", artifact, "--json", cwd=folder)
        assert outcome.code == 0, outcome.err
        answers.add(json.loads(outcome.out)["predictions"][0]["label"])
    assert len(answers) == 1
    outcome = edgeformer("evaluate", "small", "--artifact", "onnx-int8-trim", "--json", cwd=folder)
    assert outcome.code == 0 and json.loads(outcome.out)["rows"][0]["accuracy"] > 0.7, outcome.err


def test_confidence_lets_texts_exit_the_step_bundle_early(exported: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = exported
    texts = ("the staff was friendly", "the food was not good", "great place and i will come back")

    def predictions(*options: str) -> list[dict[str, Any]]:
        outcome = edgeformer("predict", "small", *texts, "--json", *options, cwd=folder)
        assert outcome.code == 0, outcome.err
        result: list[dict[str, Any]] = json.loads(outcome.out)["predictions"]
        return result

    every_loop = predictions("--artifact", "onnx-fp32")
    sure = predictions("--confidence", "1.0")
    assert [row["loops"] for row in sure] == [2, 2, 2] and [row["loops"] for row in every_loop] == [None] * 3
    for patient, full in zip(sure, every_loop, strict=True):
        assert patient["probability"] == pytest.approx(full["probability"], abs=1e-5)
    first = predictions("--artifact", "onnx-fp32-exit1")
    hasty = predictions("--confidence", "0.0")
    assert [row["loops"] for row in hasty] == [1, 1, 1]
    for early, exit1 in zip(hasty, first, strict=True):
        assert early["probability"] == pytest.approx(exit1["probability"], abs=1e-5)
    refused = edgeformer("predict", "small", "a", "--confidence", "0.9", "--artifact", "onnx-fp32", cwd=folder)
    assert refused.code == 2 and "always runs all of its loops" in refused.err


def test_unsupported_target_is_unavailable(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    engine = export(tmp_path / "run", ExportOptions(build=("tensorrt",), target="jetson-orin-nano-8gb")).artifacts[-1]
    assert engine.status == "unavailable" and engine.file is None
    assert "8.7" in str(engine.reason) and "JetPack" in str(engine.reason)


def test_after_a_rejected_artifact_nothing_is_built(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    monkeypatch.setitem(TOLERANCES, "fp32", ("absolute", 1e-12))
    stopped = export(run, ExportOptions(fp16=True, int8=True, exits=(1,), replace=True))
    assert [artifact.id for artifact in stopped.artifacts] == ["onnx-fp32"]
    assert stopped.artifacts[0].status == "rejected"
    assert "above the tolerance" in str(stopped.artifacts[0].reason)
    assert stopped.artifacts[0].file is None
    listed = {*Bundle.open(run / "bundle").manifest.files, "bundle.json"}
    assert {p.relative_to(run / "bundle").as_posix() for p in (run / "bundle").rglob("*") if p.is_file()} == listed


def test_invalid_options_list_the_valid_ones(
    finished_run: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(InputError, match=r"--exit 3: .* has exits after the loops 1, 2"):
        export(finished_run, ExportOptions(exits=(3,)))
    reason = r"--vocab-trim: only vocabularies of classifiers.* a language model's is what it predicts"
    with pytest.raises(InputError, match=reason):
        export(exported_language_run(tmp_path_factory), ExportOptions(vocab_trim=True))
    for options, message in ((("--exit", "two"), "--exit 'two'"), (("--trt-via", "x"), "--trt-via 'x'")):
        outcome = edgeformer("export", str(finished_run), *options, cwd=tmp_path)
        assert outcome.code == 2 and message in outcome.err
