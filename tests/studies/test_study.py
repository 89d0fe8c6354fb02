"""A study trains what is missing and nothing else, goes on after it was killed, and is made again from its results."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from edgeformer.formats.study_result import StudyRun
from edgeformer.studies import working
from edgeformer.studies.jobs import Job
from edgeformer.studies.needs import Step
from edgeformer.studies.study import Plan, StudyOptions, plan_study, run_study
from edgeformer.studies.working import Workplace, work

from edgeformer.formats.progress import Silent
from edgeformer.machine.lock import claiming
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


@pytest.mark.parametrize("slow", [0, 1])
def test_a_run_that_was_held_up_says_nothing_of_the_next_one(place: Path, tmp_path: Path, slow: int) -> None:
    path, options = copied(place, tmp_path)
    plan = plan_study(path, options)
    (*others, gone), results = plan.jobs, options.artifacts / "studies" / "runs"
    shutil.rmtree(options.artifacts / gone.folder_name)
    (results / f"{gone.key}.json").unlink()
    held_up = results / f"{others[slow].key}.json"
    held_up.write_text(json.dumps({**json.loads(held_up.read_text(encoding="utf-8")), "seconds": 1e6}))
    estimate = plan_study(path, options).estimates[2]
    assert estimate.seconds < 1000 and others[1 - slow].folder_name in estimate.basis


def test_another_study_shares_the_run(place: Path, tmp_path: Path) -> None:
    _, options = copied(place, tmp_path)
    before = trained(options.artifacts)
    other = write(tmp_path, study("other", {"mine": run("Mine"), "again": run("Again")}))
    plan, table = make(other, options)
    assert set(states(plan).values()) == {"done"}
    assert trained(options.artifacts) == before
    assert table.rows[0].cells["accuracy"] == table.rows[1].cells["accuracy"]


def test_rows_without_graphs_do_not_keep_the_others_from_being_timed(place: Path, tmp_path: Path) -> None:
    _, options = copied(place, tmp_path)
    rows = {"exported": {**run("Exported"), "export": ["fp16"]}, "scored": run("Scored", (2,))}
    timing = {"seq": 8, "rounds": 1, "against": "exported/fp32"}
    table = {"rows": "artifacts", "columns": ["accuracy", "latency_ms", "speedup"], "timing": timing}
    plan, found = make(write(tmp_path, study("timed", rows, table=table)), options)
    assert plan.estimates[1].state == "done"
    times = {(line.run, line.at): line.cells["latency_ms"].mean for line in found.rows}
    assert times["exported", "fp32"] and times["exported", "fp16"]
    assert {time for (row, _), time in times.items() if row == "scored"} == {None}


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
    missing = table.rows[1].missing or ""
    assert missing.startswith("second, seed 1: has no results here") and "--results CLONE/benchmarks" in missing


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


class Told(Silent):
    """Hears every message."""

    def __init__(self, hear: Callable[[str], None] = lambda text: None) -> None:
        self.messages, self._hear = list[str](), hear

    def message(self, text: str) -> None:
        self.messages.append(text)
        self._hear(text)

    def advance(self, amount: float = 1, **metrics: float) -> None:
        raise AssertionError("no step was left to train")


def at_work(plan: Plan, options: StudyOptions, jobs: list[Job], told: Told, at_a_time: int = 1) -> dict[str, str]:
    return work(jobs, {}, Workplace(options.artifacts, plan.results, ("test",), at_a_time, "again"), told)


def kept(options: StudyOptions, job: Job) -> StudyRun:
    path = options.artifacts / "studies" / "runs" / f"{job.key}.json"
    return StudyRun.model_validate_json(path.read_text(encoding="utf-8"))


def test_a_trained_run_is_in_the_table_though_its_export_waits_and_fails(place: Path, tmp_path: Path) -> None:
    """Another process writes the bundle first; then the export finds no weights."""
    _, options = copied(place, tmp_path)
    path = write(tmp_path, study("int8", {"first": {**run("First"), "export": ["int8"]}}))
    (job,) = plan_study(path, options).jobs
    folder = options.artifacts / job.folder_name
    shutil.rmtree(folder / "model")
    (options.artifacts / "studies" / "runs" / f"{job.key}.json").unlink()
    other, freed = claiming(folder / "bundle"), list[float]()
    other.__enter__()

    def free() -> None:
        freed.append(time.time())
        other.__exit__(None, None, None)

    told = Told(lambda text: threading.Timer(0.5, free).start() if "waiting for it" in text else None)
    (row,) = run_study(plan_study(path, options), options, told).rows
    assert [text for text in told.messages if "is being replaced by" in text and "waiting for it" in text]
    assert row.cells["accuracy"].mean is not None
    assert "export ended with exit code 2" in told.messages[-1]
    log = options.artifacts / "studies" / "logs" / f"{job.key}.log"
    assert log.read_text(encoding="utf-8").count("$ edgeformer export") == 1 and log.stat().st_mtime > freed[0]


def test_no_training_is_left_behind_whatever_goes_wrong(place: Path, tmp_path: Path) -> None:
    _, options = copied(place, tmp_path)
    path = write(tmp_path, study("long", {"first": run("First", (11,), training__epochs=400)}))
    plan = plan_study(path, options)

    def fail(text: str) -> None:
        if "train " in text:
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        at_work(plan, options, [*plan.jobs], Told(fail))
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if plan.jobs[0].folder_name in command]


def test_what_the_system_refuses_fails_one_job_and_not_the_study(place: Path, tmp_path: Path) -> None:
    _, options = copied(place, tmp_path)
    path = write(tmp_path, study("two", {"first": run("First", (11,)), "second": run("Second")}))
    plan = plan_study(path, options)
    shutil.rmtree(options.artifacts / "studies" / "logs")
    (options.artifacts / "studies" / "logs").write_text("in the way", encoding="utf-8")
    failed = at_work(plan, options, [*plan.jobs], Told())
    assert [*failed] == [plan.jobs[0].key] and "logs" in failed[plan.jobs[0].key or ""]


def test_a_lock_of_another_host_is_told_of(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = copied(place, tmp_path)
    plan = plan_study(str(tmp_path / "tiny.yaml"), options)
    job = plan.jobs[0]
    lock = options.artifacts / "studies" / "runs" / f".{job.key}.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "far-away", "since": "yesterday"}), encoding="utf-8")
    monkeypatch.setattr(working, "_REMIND_S", 0.3)
    said = list[str]()

    def hear(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            lock.unlink()

    assert at_work(plan, options, [job], Told(hear)) == {}
    assert "far-away" in said[1] and "cannot be seen from here" in said[1] and f"remove {lock}" in said[1]


@dataclass(frozen=True)
class _Timed(Step):
    """Writes down when it began and when it ended."""

    @property
    def command(self) -> list[str]:
        code = "import sys,time; f=open(sys.argv[1],'a'); a=time.time(); time.sleep(.4); print(a,time.time(),file=f)"
        return [sys.executable, "-c", code, self.arguments[0]]


def test_who_measures_time_is_alone_and_what_was_known_stays(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, options = copied(place, tmp_path)
    plan = plan_study(str(tmp_path / "tiny.yaml"), options)
    before = {job.key: kept(options, job) for job in plan.jobs}
    assert all(one.overhead_s is not None for one in before.values())
    noted = tmp_path / "times"
    monkeypatch.setattr(working, "lacking", lambda job, run, folder, splits, tried=None: _next(noted, job, tried))
    at_work(plan, options, [*plan.jobs], Told(), at_a_time=3)
    spans = sorted(tuple(map(float, line.split())) for line in noted.read_text(encoding="utf-8").splitlines())
    assert len(spans) == 3 and all(one[1] <= other[0] for one, other in pairwise(spans))
    for job in plan.jobs:
        after, earlier = kept(options, job), before[job.key]
        assert after.overhead_s == earlier.overhead_s and after.scoring_s > earlier.scoring_s


def _next(noted: Path, job: Job, tried: Container[tuple[str, ...]] | None) -> Step | None:
    step = _Timed("score", (str(noted), job.title))
    return None if tried is None or step.arguments in tried else step
