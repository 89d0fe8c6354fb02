"""export with all of its options, through the command line."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run_cli import edgeformer

FORMS = ("", "-exit1", "-step")


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("everything")
    shutil.copytree(finished_run, folder / "artifacts" / "small")
    options = ("--fp16", "--int8", "--int4", "--vocab-trim", "--exit", "all", "--trt", "--target", "rtx4050", "--json")
    outcome = edgeformer("export", "small", *options, cwd=folder)
    assert outcome.code == (0 if find_spec("tensorrt_rtx") else 3), outcome.err
    return folder, {artifact["id"]: artifact for artifact in json.loads(outcome.out)["artifacts"]}


def test_every_requested_artifact_is_built(exported: tuple[Path, dict[str, Any]]) -> None:
    _, artifacts = exported
    onnx = {f"onnx-{precision}{form}" for precision in ("fp32", "int8", "int4", "fp16") for form in FORMS}
    onnx |= {"onnx-int8-trim", "onnx-int4-trim", "onnx-fp16-trim"}
    assert {name for name in artifacts if name.startswith("onnx")} == onnx
    for name in onnx:
        artifact = artifacts[name]
        assert artifact["status"] == "built", artifact["reason"]
        assert artifact["sharing"]["stored_parameters"] == artifact["sharing"]["unique_parameters"]
        assert artifact["parity"]["status"] == "measured"
    assert artifacts["onnx-int8-trim"]["vocabulary"]["kept"] < artifacts["onnx-int8-trim"]["vocabulary"]["original"]
    for precision, limit in (("fp32", 1e-4), ("fp16", 5e-2)):
        for form in FORMS:
            assert artifacts[f"onnx-{precision}{form}"]["parity"]["max_abs_error"] < limit
    step = artifacts["onnx-fp32-step"]
    assert set(step["parts"]) == {"embed", "loop", "readout"} and step["role"] == "step"
    assert (artifacts["onnx-fp32-exit1"]["role"], artifacts["onnx-fp32-exit1"]["exit"]) == ("exit", 1)
    for precision in ("fp32", "int8", "fp16"):
        drift = artifacts[f"onnx-{precision}"]["drift"]
        assert [row["loop"] for row in drift["loops"]] == [1, 2] and drift["first_beyond"] is None
        assert all(0 < row["rms_error"] < drift["tolerance"] for row in drift["loops"])


@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_engines_are_built_for_the_target_without_parity(exported: tuple[Path, dict[str, Any]]) -> None:
    _, artifacts = exported
    names = ["tensorrt-rtx-fp16", *(f"tensorrt-rtx-fp16-{form}" for form in ("exit1", "step", "trim"))]
    if find_spec("nncf") is not None:
        names += ["tensorrt-rtx-int8", "tensorrt-rtx-int8-exit1"]
    assert {name for name in artifacts if name.startswith("tensorrt")} == set(names)
    for name in names:
        engine = artifacts[name]
        assert engine["status"] == "built", engine["reason"]
        assert engine["built_for"]["compute_capability"] == "8.9"
        assert engine["parity"]["status"] == "unavailable" and "edgeformer verify" in engine["parity"]["reason"]


def predictions(folder: Path, *options: str) -> list[dict[str, Any]]:
    texts = ("the staff was friendly", "the food was not good", "great place and i will come back")
    outcome = edgeformer("predict", "small", *texts, "--json", *options, cwd=folder)
    assert outcome.code == 0, outcome.err
    result: list[dict[str, Any]] = json.loads(outcome.out)["predictions"]
    return result


def test_the_bundle_verifies_and_predicts_with_its_own_tokenizers(exported: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = exported
    outcome = edgeformer("verify", "small", "--json", cwd=folder)
    assert outcome.code == 0, outcome.err
    artifacts = ("onnx-fp32", "onnx-int8-trim", "onnx-fp16-step", "onnx-fp16-trim")
    labels = [[row["label"] for row in predictions(folder, "--artifact", artifact)] for artifact in artifacts]
    assert labels == labels[:1] * len(artifacts)
    outcome = edgeformer("evaluate", "small", "--artifact", "onnx-int8-trim", "--json", cwd=folder)
    assert outcome.code == 0 and json.loads(outcome.out)["rows"][0]["accuracy"] > 0.7, outcome.err


def test_confidence_lets_texts_exit_the_step_bundle_early(exported: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = exported
    for confidence, loops, artifact in (("1.0", 2, "onnx-fp32"), ("0.0", 1, "onnx-fp32-exit1")):
        early, whole = predictions(folder, "--confidence", confidence), predictions(folder, "--artifact", artifact)
        assert [row["loops"] for row in early] == [loops] * 3 and [row["loops"] for row in whole] == [None] * 3
        probabilities = [row["probability"] for row in whole]
        assert [row["probability"] for row in early] == pytest.approx(probabilities, abs=1e-5)
    refused = edgeformer("predict", "small", "a", "--confidence", "0.9", "--artifact", "onnx-fp32", cwd=folder)
    assert refused.code == 2 and "always runs all of its loops" in refused.err


def test_unknown_values_of_options_are_refused(finished_run: Path, tmp_path: Path) -> None:
    for options, message in ((("--exit", "two"), "--exit 'two'"), (("--trt-via", "x"), "--trt-via 'x'")):
        outcome = edgeformer("export", str(finished_run), *options, cwd=tmp_path)
        assert outcome.code == 2 and message in outcome.err
