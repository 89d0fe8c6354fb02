"""Runs and bundles of earlier versions open and give the recorded results.

``*-v1`` precede the move to today's packages. ``*-v2`` were written by commit 55f2298, the last before the
simplification; of the language model only the bundle is kept.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgeformer.artifacts.report import Report, read_report
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle
from edgeformer.run import Run
from tests.cli.run_cli import edgeformer, run_json
from tests.conftest import OLD_FORMAT

RUNS = ("classifier-v1", "language-v1", "classifier-v2")
BUNDLES = (*RUNS, "language-v2")
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "int8": 2e-2}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder whose artifacts/ holds copies of all."""
    for name in BUNDLES:
        shutil.copytree(OLD_FORMAT / name, tmp_path / "artifacts" / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_their_bundles_are_verified(name: str, workplace: Path) -> None:
    result = run_json("verify", f"artifacts/{name}/bundle", cwd=workplace)
    assert result["exit_code"] == 0 and {check["status"] for check in result["files"]} == {"intact"}
    built = {artifact.id for artifact in Bundle.open(OLD_FORMAT / name / "bundle").built()}
    assert {check["artifact"] for check in result["artifacts"] if check["status"] == "verified"} == built


@pytest.mark.parametrize("name, step_graphs", [("classifier-v1", ["onnx-fp32-step"]), ("classifier-v2", [])])
def test_predictions_are_those_of_that_version(name: str, step_graphs: list[str]) -> None:
    recorded = json.loads((OLD_FORMAT / f"{name}-predictions.json").read_text(encoding="utf-8"))
    texts = [prediction["text"] for prediction in recorded["predictions"]]
    for artifact in ("onnx-fp32", "onnx-fp16", "onnx-int8", *step_graphs, "torch"):
        result = run_json("predict", str(OLD_FORMAT / name), *texts, "--artifact", artifact, cwd=OLD_FORMAT)
        assert result["run"] == recorded["run"]
        precision = next((part for part in artifact.split("-") if part in TOLERANCE), "fp32")
        for prediction, expected in zip(result["predictions"], recorded["predictions"], strict=True):
            assert prediction["probabilities"] == pytest.approx(expected["probabilities"], abs=TOLERANCE[precision])


@pytest.mark.parametrize("name", RUNS)
def test_scores_are_those_of_that_version(name: str, workplace: Path) -> None:
    """The synthetic data is made again by the recipe, and is what training saw, or it would be refused."""
    recorded = {(row.artifact, row.split, row.exit): row for row in read_evaluation(OLD_FORMAT / name).rows}
    rows = run_json("evaluate", name, "--artifact", "all", cwd=workplace)["rows"]
    current = {(row["artifact"], row["split"], row["exit"]): row for row in rows}
    compared = recorded.keys() & current.keys()
    for key in compared:
        assert current[key]["n"] == recorded[key].n
        assert current[key]["loss"] == pytest.approx(recorded[key].loss, abs=1e-4)
    assert compared, f"{sorted(map(str, recorded))} against {sorted(map(str, current))}"


def test_text_is_written(workplace: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "8")
    graphs = run_json("generate", "language-v1", "a good", *options, cwd=workplace)
    weights = run_json("generate", "language-v1", "a good", *options, "--artifact", "torch", cwd=workplace)
    assert graphs["tokens"] == weights["tokens"] and len(graphs["tokens"]) > 0
    assert (graphs["artifact"], weights["artifact"]) == ("onnx-fp32-decode", "torch")
    bundle = run_json("generate", "artifacts/language-v2/bundle", "a good", *options, cwd=workplace)
    assert bundle["tokens"] == [221] * 8  # what commit 55f2298 generates


def test_they_are_listed_and_their_reports_read_and_compared(workplace: Path) -> None:
    outcome = edgeformer("list", "runs", cwd=workplace)
    assert outcome.code == 0 and all(Run.open(OLD_FORMAT / name).name in outcome.out for name in RUNS)
    for name in ("classifier-v1", "language-v1"):
        report = read_manifest(Report, OLD_FORMAT / name / "reports" / "rtx4050.json")
        assert report.run == Run.open(OLD_FORMAT / name).name and report.rows
    assert run_json("compare", "classifier-v1", "language-v1", cwd=workplace)


def test_removed_parts_of_a_report_are_left_out(tmp_path: Path) -> None:
    report = json.loads((OLD_FORMAT / "language-v1" / "reports" / "rtx4050.json").read_text(encoding="utf-8"))
    phases = [row["phase"] for row in report["rows"]]
    report["rows"].append({**report["rows"][-1], "phase": "speculate", "conditions": {"tokens_per_round": 3.5}})
    report["search"] = {
        "metric": "perplexity", "bound": None, "minimize": "latency", "candidates": [], "pick": None, "reason": "none",
        "compared": {"first": 0, "second": 1, "found": "slower", "change": 0.1, "low": 0.05, "high": 0.2, "rounds": 9},
    }  # fmt: skip
    (path := tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    read = read_report(path)
    assert read.search is not None and read.search.reason == "none"
    assert [row.phase for row in read.rows] == phases


@pytest.mark.slow
def test_they_are_profiled(workplace: Path) -> None:
    shape = ("--batch", "1", "--seq", "8", "--artifact", "onnx-int8")
    rows = run_json("profile", "classifier-v1", "--device", "host", *shape, cwd=workplace)["rows"]
    assert {row["artifact"] for row in rows} == {"onnx-int8"}
    assert any(row["latency_ms"]["status"] == "measured" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "exported_ids"),
    [
        pytest.param("classifier-v1", ("--replace",), {"onnx-fp32"}, marks=pytest.mark.slow),
        ("classifier-v2", (), {"onnx-fp32"}),
    ],
)
def test_a_run_is_exported_again(name: str, options: tuple[str, ...], exported_ids: set[str], workplace: Path) -> None:
    old = Bundle.open(OLD_FORMAT / name / "bundle")
    result = run_json("export", name, *options, cwd=workplace)
    ids = [artifact.id for artifact in old.artifacts if not options or artifact.id in exported_ids]
    kept = [(id_, id_ not in exported_ids) for id_ in ids]
    assert [(artifact["id"], artifact["kept"]) for artifact in result["artifacts"]] == kept
    assert {check["status"] for check in run_json("verify", name, cwd=workplace)["files"]} == {"intact"}
    new = Bundle.open(workplace / "artifacts" / name / "bundle")
    assert new.manifest.labels == old.manifest.labels and new.name == old.name
    assert new.name in (new.folder / "README.md").read_text(encoding="utf-8")
    old_sharing, new_sharing = (bundle.artifact("onnx-fp32").sharing for bundle in (old, new))
    assert old_sharing and new_sharing and new_sharing.unique_parameters == old_sharing.unique_parameters
    old_arrays, new_arrays = old.golden().arrays, new.golden().arrays
    assert old_arrays.keys() == new_arrays.keys()
    for key, array in old_arrays.items():  # another processor adds up in another order
        assert np.allclose(array, new_arrays[key], atol=1e-5 if "logits" in key else 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("language-v1", "exported by an older version"), ("classifier-v2", "another model/model.safetensors")],
)
def test_a_bundle_of_other_weights_is_not_taken_for_the_runs(name: str, reason: str, workplace: Path) -> None:
    weights = workplace / "artifacts" / name / "model" / "model.safetensors"
    save_file({tensor: value * 1.01 for tensor, value in load_file(weights).items()}, weights)
    outcome = edgeformer("export", name, cwd=workplace)
    assert outcome.code == 2 and reason in outcome.err and "--replace" in outcome.err
