"""A study trains what is missing and nothing else, continues after an interruption, and is made from results alone."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.studies.jobs import TRAINING_REVISION
from benchmarks.studies.paired import unpacked
from benchmarks.studies.results import StudyTable
from benchmarks.studies.study import Plan, StudyOptions, plan_study, run_study
from edgeformer.artifacts.recipe import Recipe
from edgeformer.training.train import TrainOptions, train
from tests.studies.tiny_study import run, study, write

pytestmark = pytest.mark.slow
RUNS = {"first": {**run("First", seeds=(1, 2)), "export": ["fp16"]}, "second": run("Second", training__epochs=1)}
PUBLISHED = {"run": "first", "source": "Table 0", "values": {"accuracy": 0.5}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of three runs: its file and its artifacts. Copy it before changing anything."""
    folder = tmp_path_factory.mktemp("study")
    bubbles = {"kind": "bubbles", "title": "trade", "x": "loss", "y": ["accuracy"], "size": "parameters"}
    dots, curves = {"kind": "dots", "title": "accuracy", "y": ["accuracy"]}, {"kind": "curves", "title": "curves"}
    figures = [dots, bubbles, {**curves, "y": ["val_loss"]}]
    choices = [{"title": "Best", "smallest": "accuracy", "paper": "none"}]
    table = {"published": [PUBLISHED], "choices": choices, "paired": {"second": "first"}}
    options = StudyOptions(folder / "artifacts", jobs=2)
    run_study(plan_study(write(folder, study("tiny", RUNS, table=table, figures=figures)), options), options)
    return folder


def make(path: str, options: StudyOptions) -> tuple[Plan, StudyTable]:
    plan = plan_study(path, options)
    return plan, run_study(plan, options)


def started(artifacts: Path) -> dict[str, str]:
    """Folder of each run → when its training began."""
    paths = artifacts.glob("*/run.json")
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["started"] for path in paths}


def test_the_folder_has_table_page_and_figures(place: Path) -> None:
    folder = place / "artifacts" / "studies" / "tiny"
    table = StudyTable.model_validate_json((folder / "table.json").read_text(encoding="utf-8"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (place / "artifacts").glob("*/run.json")]
    first, second = table.rows
    assert len(runs) == 3 and (first.cells["accuracy"].n, second.cells["accuracy"].n) == (2, 1)
    accuracies = [run["test"]["accuracy"] for run in runs if run["epochs"] == 2]
    assert first.cells["accuracy"].mean == pytest.approx(sum(accuracies) / 2) and first.missing is None
    page = (folder / "README.md").read_text(encoding="utf-8")
    for text in ("SYNTHETIC", "Table 0", "0.5000", "trained here", "**Best**: First", "figure3.png"):
        assert text in page
    assert {path.name for path in folder.glob("*.png")} == {"figure1.png", "figure2.png", "figure3.png"}
    results = [json.loads(path.read_text()) for path in (place / "artifacts" / "studies" / "runs").glob("*.json")]
    scored = {(r["epochs"], row["artifact"]) for r in results for row in r["evaluation"]["rows"]}
    for result in results:  # a bit per test row, which agree with the accuracy
        ((name, text),) = result["right"].items()
        (row,) = [r for r in result["evaluation"]["rows"] if (r["artifact"], r["split"]) == ("torch", name)]
        assert unpacked(text, row["n"]).mean() == pytest.approx(row["accuracy"])
    assert [(pair.run, pair.against) for pair in table.pairs] == [("second", "first")]
    difference = second.cells["accuracy"].mean - first.cells["accuracy"].values[0]
    assert table.pairs[0].difference == pytest.approx(difference, abs=1e-9) and "Second − First" in page
    assert (2, "onnx-fp16") in scored and not any(epochs == 1 and "onnx" in name for epochs, name in scored)


def test_only_a_missing_run_is_trained(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    path, options = str(tmp_path / "tiny.yaml"), StudyOptions(tmp_path / "artifacts")
    start = started(options.artifacts)
    job = plan_study(path, options).outcomes[2].job
    shutil.rmtree(options.artifacts / job.folder_name)
    (options.artifacts / "studies" / "runs" / f"{job.key}.json").unlink()
    plan, table = make(path, options)
    assert [outcome.state for outcome in plan.outcomes] == ["done", "done", "missing"]
    end = started(options.artifacts)
    assert {name for name in end if end[name] != start[name]} == {job.folder_name}
    assert all(row.missing is None for row in table.rows)
    other = write(tmp_path, study("other", {"mine": run("Mine", (1, 2)), "again": run("Again", (1, 2))}))
    plan, table = make(other, options)
    assert {outcome.state for outcome in plan.outcomes} == {"done"}, "studies share their runs"
    assert table.rows[0].cells["accuracy"] == table.rows[1].cells["accuracy"]


def test_a_table_is_made_from_results_alone(place: Path, tmp_path: Path) -> None:
    kept, path = tmp_path / "artifacts" / "studies" / "runs", str(place / "tiny.yaml")
    shutil.copytree(place / "artifacts" / "studies" / "runs", kept)
    options = StudyOptions(tmp_path / "artifacts", train=False)
    _, table = make(path, options)
    first = (place / "artifacts" / "studies" / "tiny" / "table.json").read_text(encoding="utf-8")
    assert table == StudyTable.model_validate_json(first) and not started(options.artifacts)
    (kept / f"{plan_study(path, options).outcomes[2].job.key}.json").unlink()
    _, table = make(path, options)
    assert table.rows[1].cells["accuracy"].mean is None
    assert (table.rows[1].missing or "").startswith("second, seed 1: not trained")


def test_a_failed_export_leaves_the_scores_and_the_reason(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    table = {"rows": "artifacts", "columns": ["accuracy"]}
    path = write(tmp_path, study("int8", {"first": {**run("First"), "export": ["int8"]}}, table=table))
    options = StudyOptions(tmp_path / "artifacts")
    shutil.rmtree(options.artifacts / plan_study(path, options).outcomes[0].job.folder_name / "model")
    rows = {row.at: row for row in make(path, options)[1].rows}
    assert rows["fp32"].cells["accuracy"].mean is not None
    assert "export ended with exit code 2" in (rows["int8"].missing or "") and ".log" in (rows["int8"].missing or "")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process")
def test_an_interrupted_study_ends_its_trainings_and_continues(tmp_path: Path) -> None:
    slow = run("Slow", (7,), training__epochs=60, training__checkpoint_minutes=0.001)
    taught = {**run("Taught", (7,), training__distillation={"weight": 0.5}, training__teacher="x"), "teacher": "slow"}
    path = write(tmp_path, study("slow", {"taught": taught, "slow": slow}))
    command = [sys.executable, "-m", "benchmarks.studies", path, "--artifacts", str(tmp_path / "artifacts")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not [*tmp_path.glob("artifacts/*/metrics.jsonl")] and process.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "continue with: python -m benchmarks.studies" in errors, errors
    assert children and not any(child.is_running() for child in children)
    plan = plan_study(path, StudyOptions(tmp_path / "artifacts"))
    assert [outcome.state for outcome in plan.outcomes] == ["missing", "resumable"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    statuses = [json.loads(path.read_text())["status"] for path in tmp_path.glob("artifacts/*/run.json")]
    assert statuses == ["finished", "finished"]


ENCODER = [0.69111, 0.69774, 0.70010, 0.68471, 0.69950]
CRT = [5.98147, 5.80980, 5.41923, 5.11702, 4.95232]


def test_what_a_seeded_training_computes_is_that_of_this_revision(small_recipe, small_language_recipe, tmp_path):
    """Mean losses of 5 steps each, then the validation loss, after 20 steps."""

    def losses(recipe: Recipe) -> list[float]:
        folder = train(recipe, TrainOptions(tmp_path, max_steps=20, accelerator="cpu"))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [record.get("loss", record.get("val_loss")) for record in records]

    results = losses(small_recipe), losses(small_language_recipe)
    assert TRAINING_REVISION == 1 and results == (pytest.approx(ENCODER, abs=1e-3), pytest.approx(CRT, abs=1e-3)), (
        "training computes something else than when results were kept: count TRAINING_REVISION up (in "
        f"benchmarks/studies/jobs.py), so that no study takes them for its own, and put these losses here: {results}"
    )
