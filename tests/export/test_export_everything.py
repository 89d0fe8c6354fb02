"""export with all of its options, through the command line."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run_cli import run_json

pytestmark = pytest.mark.slow  # other tests make each of these artifacts; this one makes all of them together
FORMS = ("", "-exit1", "-step")


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("everything")
    shutil.copytree(finished_run, folder / "artifacts" / "small")
    options = ("--fp16", "--int8", "--int4", "--vocab-trim", "--exit", "all", "--trt", "--target", "rtx4050")
    document = run_json("export", "small", *options, cwd=folder, code=0 if find_spec("tensorrt_rtx") else 3)
    return folder, {artifact["id"]: artifact for artifact in document["artifacts"]}


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


def test_the_bundle_verifies_and_predicts_with_its_own_tokenizers(exported: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = exported
    run_json("verify", "small", cwd=folder)
    texts = ("the staff was friendly", "the food was not good", "great place and i will come back")
    artifacts = ("onnx-fp32", "onnx-int8-trim", "onnx-fp16-step", "onnx-fp16-trim")
    answers = [run_json("predict", "small", *texts, "--artifact", artifact, cwd=folder) for artifact in artifacts]
    labels = [[row["label"] for row in answer["predictions"]] for answer in answers]
    assert labels == labels[:1] * len(artifacts)
    scored = run_json("evaluate", "small", "--artifact", "onnx-int8-trim", cwd=folder)
    assert scored["rows"][0]["accuracy"] > 0.7
