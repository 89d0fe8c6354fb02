"""A study trains what is missing and nothing else, goes on after it was killed, and is made again from its results."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgeformer.studies.study import Plan, StudyOptions, plan_study
from tests.studies.tiny_study import make, run, study, write


def copied(place: Path, folder: Path) -> tuple[str, StudyOptions]:
    shutil.copytree(place, folder, dirs_exist_ok=True)
    return str(folder / "tiny.yaml"), StudyOptions(folder / "artifacts")


def trained(artifacts: Path) -> dict[str, str]:
    """Folder of each run → when it was started."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))["started"]
        for path in artifacts.glob("*/run.json")
    }


def states(plan: Plan) -> dict[str, str]:
    return {estimate.job.title: estimate.state for estimate in plan.estimates}


def test_its_folder_holds_what_a_reader_needs(place: Path) -> None:
    folder = place / "artifacts" / "studies" / "tiny"
    table = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    first, second = table["rows"]
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (place / "artifacts").glob("*/run.json")]
    own = {run["recipe"]: run for run in runs}
    assert len(runs) == 3 and own
    seeds = [run["test"]["accuracy"] for run in runs if run["run"] in names_of(place, "first")]
    cell = first["cells"]["accuracy"]
    assert cell["n"] == 2 and cell["mean"] == pytest.approx(sum(seeds) / 2)
    assert cell["sd"] == pytest.approx(abs(seeds[0] - seeds[1]) / 2**0.5)
    assert second["cells"]["accuracy"]["sd"] is None and second["cells"]["accuracy"]["published"] is None
    page = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("SYNTHETIC", "nobody's table", "0.5000", "trained here", "train 320", "Recommended", "figure3.png"):
        assert said in page
    lines = [*csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines())]
    assert [line["run"] for line in lines] == ["first", "second"]
    assert float(lines[0]["accuracy_difference"]) == pytest.approx(cell["mean"] - 0.5)
    assert {path.name for path in folder.glob("*.png")} == {"figure1.png", "figure2.png", "figure3.png"}


def names_of(place: Path, row: str) -> set[str]:
    plan = plan_study(str(place / "tiny.yaml"), StudyOptions(place / "artifacts"))
    return {job.folder_name for job in plan.jobs if job.row == row}


def test_what_is_there_is_not_trained_again(place: Path, tmp_path: Path) -> None:
    path, options = copied(place, tmp_path)
    before = trained(options.artifacts)
    plan, table = make(path, options)
    assert set(states(plan).values()) == {"done"} and plan.seconds == 0
    assert trained(options.artifacts) == before
    assert table.rows[0].origin == "trained here"


def test_a_deleted_run_alone_is_trained_again(place: Path, tmp_path: Path) -> None:
    path, options = copied(place, tmp_path)
    before = trained(options.artifacts)
    plan = plan_study(path, options)
    gone = plan.jobs[2]
    shutil.rmtree(options.artifacts / gone.folder_name)
    (options.artifacts / "studies" / "runs" / f"{gone.key}.json").unlink()
    plan, table = make(path, options)
    assert states(plan) == {"first, seed 1": "done", "first, seed 2": "done", "second, seed 1": "missing"}
    estimate = plan.estimates[2]
    assert estimate.steps == 20 and estimate.seconds > 0 and "trained on this machine" in estimate.basis
    after = trained(options.artifacts)
    assert {name for name in after if after[name] != before[name]} == {gone.folder_name}
    assert all(row.missing is None for row in table.rows)


def test_another_study_shares_the_run(place: Path, tmp_path: Path) -> None:
    _, options = copied(place, tmp_path)
    before = trained(options.artifacts)
    other = write(tmp_path, study("other", {"mine": run("Mine"), "again": run("Again")}))
    plan, table = make(other, options)
    assert set(states(plan).values()) == {"done"}
    assert trained(options.artifacts) == before
    assert table.rows[0].cells["accuracy"] == table.rows[1].cells["accuracy"]


def test_it_is_made_again_from_results_alone(place: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(place / "artifacts" / "studies" / "runs", kept)
    options = StudyOptions(tmp_path / "artifacts", results=(kept,), train=False)
    path = str(place / "tiny.yaml")
    _, table = make(path, options)
    first = json.loads((place / "artifacts" / "studies" / "tiny" / "table.json").read_text(encoding="utf-8"))
    assert [row.model_dump(mode="json")["cells"] for row in table.rows] == [row["cells"] for row in first["rows"]]
    assert {row.origin for row in table.rows} == {"results in kept"}
    assert not trained(options.artifacts)
    (kept / f"{plan_study(path, options).jobs[2].key}.json").unlink()
    _, table = make(path, options)
    assert table.rows[1].cells["accuracy"].mean is None
    assert table.rows[1].missing == "second, seed 1: is not trained, and training was not asked for"


def test_a_stopped_or_killed_study_goes_on(place: Path, tmp_path: Path) -> None:
    """SIGTERM leaves an interrupted run; then study and training are killed; then the study alone, whose training
    lives on and is waited for."""
    _, options = copied(place, tmp_path)
    slow = {"training__checkpoint_minutes": 0.0001, "training__epochs": 40}
    path = write(tmp_path, study("slow", {"first": run("First", (1,)), "slow": run("Slow", (7,), **slow)}))
    before = trained(options.artifacts)
    plan = plan_study(path, options)
    folder = options.artifacts / plan.jobs[1].folder_name
    for how in ("stop", "kill both", "kill"):
        child, known = start(path, options.artifacts), lines_of(folder)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and lines_of(folder) <= known and child.poll() is None:
            time.sleep(0.02)
        child.terminate() if how == "stop" else child.kill()
        child.wait()
        if how == "stop":
            assert child.returncode == 130
            assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "interrupted"
            assert states(plan_study(path, options))["slow, seed 7"] == "resumable"
        if how == "kill both" and (pid := owner(folder)) is not None:
            os.kill(pid, signal.SIGKILL)
    end = subprocess.run(command(path, options.artifacts), capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
    manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert (manifest["status"], manifest["steps"]) == ("finished", 400)
    assert {name: when for name, when in trained(options.artifacts).items() if name in before} == before


def command(path: str, artifacts: Path) -> list[str]:
    return [sys.executable, "-m", "edgeformer", "study", path, "--artifacts", str(artifacts)]


def start(path: str, artifacts: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(path, artifacts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def lines_of(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return len(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else 0


def owner(folder: Path) -> int | None:
    """The process that trains the run; None: it has ended."""
    try:
        found: dict[str, Any] = json.loads((folder / ".lock").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(found["pid"])
