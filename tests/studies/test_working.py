"""What a study does with its processes: results outlive a failed step, and nobody is left behind or in the way."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from edgeformer.formats.progress import Silent
from edgeformer.formats.study_result import StudyRun
from edgeformer.machine.lock import claiming
from edgeformer.studies import working
from edgeformer.studies.jobs import Job
from edgeformer.studies.needs import Step
from edgeformer.studies.study import Plan, StudyOptions, plan_study, run_study
from edgeformer.studies.working import Workplace, work
from tests.studies.tiny_study import run, study, write


class Told(Silent):
    """Hears every message."""

    def __init__(self, hear: Callable[[str], None] = lambda text: None) -> None:
        self.messages, self._hear = list[str](), hear

    def message(self, text: str) -> None:
        self.messages.append(text)
        self._hear(text)


def copied(place: Path, folder: Path) -> StudyOptions:
    shutil.copytree(place, folder, dirs_exist_ok=True)
    return StudyOptions(folder / "artifacts")


def at_work(plan: Plan, options: StudyOptions, jobs: list[Job], told: Told, at_a_time: int = 1) -> dict[str, str]:
    return work(jobs, {}, Workplace(options.artifacts, plan.results, ("test",), at_a_time, "again"), told)


def kept(options: StudyOptions, job: Job) -> StudyRun:
    path = options.artifacts / "studies" / "runs" / f"{job.key}.json"
    return StudyRun.model_validate_json(path.read_text(encoding="utf-8"))


def test_a_trained_run_is_in_the_table_though_its_export_waits_and_fails(place: Path, tmp_path: Path) -> None:
    """Another process writes the bundle first; then the export finds no weights."""
    options = copied(place, tmp_path)
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
    assert row.missing is not None and "export ended with exit code 2" in row.missing
    log = options.artifacts / "studies" / "logs" / f"{job.key}.log"
    assert log.read_text(encoding="utf-8").count("$ edgeformer export") == 1 and log.stat().st_mtime > freed[0]


def test_no_training_is_left_behind_whatever_goes_wrong(place: Path, tmp_path: Path) -> None:
    options = copied(place, tmp_path)
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
    options = copied(place, tmp_path)
    path = write(tmp_path, study("two", {"first": run("First", (11,)), "second": run("Second")}))
    plan = plan_study(path, options)
    shutil.rmtree(options.artifacts / "studies" / "logs")
    (options.artifacts / "studies" / "logs").write_text("in the way", encoding="utf-8")
    failed = at_work(plan, options, [*plan.jobs], Told())
    assert [*failed] == [plan.jobs[0].key] and "logs" in failed[plan.jobs[0].key or ""]


def test_a_lock_of_another_host_is_told_of(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = copied(place, tmp_path)
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
    options = copied(place, tmp_path)
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
