"""The runs that are missing, each command in a process of its own: what is killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.formats.errors import ArtifactError, InterruptedRun
from edgeformer.formats.files import write_text
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.study_result import StudyRun
from edgeformer.formats.units import format_duration
from edgeformer.machine.host import default_threads
from edgeformer.machine.lock import LockedError, claiming
from edgeformer.studies.jobs import Job
from edgeformer.studies.needs import Step, lacking, status_of, training_step
from edgeformer.studies.results import Results, collect

_POLL_S = 0.2


@dataclass(frozen=True)
class Workplace:
    """Where and how missing runs are made.

    Attributes:
        artifacts: the folder that holds the runs.
        results: where finished ones are kept.
        splits: on which graphs are scored.
        jobs: how many at a time.
        again: the command that goes on, for the message of an interruption.
    """

    artifacts: Path
    results: Results
    splits: Sequence[str]
    jobs: int
    again: str


@dataclass
class Lane:
    """One job that is being worked at."""

    job: Job
    held: contextlib.ExitStack
    recipe: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    step: Step | None = None
    done: list[tuple[str, ...]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    step_began: float = 0.0
    scoring_s: float = 0.0
    training_s: float | None = None
    seen: int = 0
    waiting: bool = False


class Failure(Exception):
    """A job cannot be finished; the others go on."""


def work(jobs: Sequence[Job], steps: Mapping[str, int], place: Workplace, progress: Progress) -> dict[str, str]:
    """Train, export and score what is missing, a few at a time.

    Args:
        jobs: with their keys, teachers before those that they teach; of each key one.
        steps: key → optimizer steps that are left, for the progress bar.

    Returns:
        Key → why that job could not be finished.

    Raises:
        InterruptedRun: Ctrl-C or SIGTERM; every run can go on.
    """
    crew = _Crew(place, [*jobs], progress)
    with bar(progress, "Training", sum(steps.values()) or None, "steps"), _stoppable():
        try:
            while crew.waiting or crew.lanes:
                crew.begin()
                crew.look()
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            crew.stop()
            raise InterruptedRun(f"interrupted; go on with: {place.again}") from None
        finally:
            for lane in crew.lanes:
                lane.held.close()
    return crew.failed


class _Crew:
    def __init__(self, place: Workplace, jobs: list[Job], progress: Progress) -> None:
        self.waiting, self.lanes, self.failed = jobs, list[Lane](), dict[str, str]()
        self._place, self._progress, self._told = place, progress, set[str]()

    def begin(self) -> None:
        """Fill the free places with jobs that nobody else works at and whose teacher is ready."""
        for job in [*self.waiting]:
            if len(self.lanes) >= self._place.jobs:
                return
            key, teacher = job.key or "", job.teacher.key if job.teacher is not None else None
            if teacher in self.failed:
                self.waiting.remove(job)
                self.failed[key] = f"its teacher is missing: {self.failed[teacher or '']}"
            if job not in self.waiting or any(teacher == (other.key or "") for other in self._unfinished()):
                continue
            held = contextlib.ExitStack()
            try:
                self._place.results.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(claiming(self._place.results.folder / key))
            except LockedError as error:  # another study works at it; it is looked for again
                if key not in self._told:
                    self._progress.message(f"{job.title}: waiting for another study: {error}")
                self._told.add(key)
                continue
            folder = self._place.artifacts / "studies"
            lane = Lane(job, held, folder / "recipes" / f"{key}.yaml", folder / "logs" / f"{key}.log")
            self.waiting.remove(job)
            self.lanes.append(lane)

    def _unfinished(self) -> list[Job]:
        return [*self.waiting, *(lane.job for lane in self.lanes)]

    def look(self) -> None:
        """Let every lane do its next step where the one before has ended."""
        for lane in [*self.lanes]:
            self._show(lane)
            if lane.process is not None and lane.process.poll() is None:
                continue
            try:
                if not self._next(lane):
                    continue
            except (Failure, ArtifactError) as error:
                self.failed[lane.job.key or ""] = str(error)
                self._progress.message(f"{lane.job.title}: failed: {error}")
            lane.held.close()
            self.lanes.remove(lane)

    def _next(self, lane: Lane) -> bool:
        """Start the lane's next step; True where there is none left."""
        self._ended(lane)
        job, folder = lane.job, self._place.artifacts / lane.job.folder_name
        status = status_of(folder)
        if status == "running":
            if not lane.waiting:
                self._progress.message(f"{job.title}: {folder} is being trained by another process; waiting for it")
            lane.waiting = True
            return False
        if status == "finished":
            run = collect(job, folder, lane.scoring_s, lane.training_s)
            step = lacking(job, run, folder, self._place.splits)
            if step is None:
                self._finish(lane, run)
                return True
        else:
            self._write_recipe(lane)
            step = training_step(job, folder, lane.recipe)
        if step.arguments in lane.done:
            raise Failure(f"`edgeformer {' '.join(step.arguments)}` ended, and nothing came of it; see {lane.log}")
        self._start(lane, step)
        return False

    def _write_recipe(self, lane: Lane) -> None:
        recipe = lane.job.recipe
        if lane.job.teacher is not None:
            folder = (self._place.artifacts / lane.job.teacher.folder_name).absolute()
            if status_of(folder) != "finished":
                raise Failure(f"its teacher's weights are needed and are not in {folder}; train {lane.job.teacher.row}")
            training = recipe.training.model_copy(update={"teacher": str(folder)})
            recipe = recipe.model_copy(update={"training": training})
        write_text(lane.recipe, recipe.to_yaml())

    def _start(self, lane: Lane, step: Step) -> None:
        lane.log.parent.mkdir(parents=True, exist_ok=True)
        with lane.log.open("ab") as log:
            log.write(f"\n$ edgeformer {' '.join(step.arguments)}\n".encode())
            log.flush()
            # In a session of its own: Ctrl-C at the terminal comes to the study alone, which then asks once.
            lane.process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(self._place.jobs),
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
        lane.step, lane.step_began = step, time.monotonic()
        lane.done.append(step.arguments)
        if step.kind in ("train", "resume"):
            self._progress.message(f"{lane.job.title}: {step.kind} {lane.job.folder_name}")

    def _ended(self, lane: Lane) -> None:
        """Note what became of the step that has just ended. Raises Failure."""
        if lane.process is None or lane.step is None:
            return
        code, step = lane.process.returncode, lane.step
        if step.kind == "train":
            lane.training_s = time.monotonic() - lane.step_began
        elif step.kind != "resume":
            lane.scoring_s += time.monotonic() - lane.step_began
        lane.process = lane.step = None
        if code not in (0, 3):  # 3: an artifact was rejected, which its manifest says
            raise Failure(f"{step.kind} ended with exit code {code}: {_last_line(lane.log)}; see {lane.log}")

    def _finish(self, lane: Lane, run: StudyRun) -> None:
        self._place.results.keep(run)
        took = format_duration(run.seconds + run.scoring_s)
        self._progress.message(f"{lane.job.title}: finished, {run.steps:,} steps, {took}")

    def _show(self, lane: Lane) -> None:
        """Move the bar by what the run's log says."""
        log = self._place.artifacts / lane.job.folder_name / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            record = json.loads(_tail(log).splitlines()[-1])
            before, lane.seen = lane.seen, int(record["step"])
            if lane.seen > before:
                self._progress.advance(lane.seen - before, loss=record.get("loss", record.get("val_loss", 0.0)))

    def stop(self) -> None:
        """Ask every process to end, and wait for it; a training saves its state first."""
        running = [lane.process for lane in self.lanes if lane.process is not None and lane.process.poll() is None]
        for process in running:
            process.terminate()
        self._progress.message("stopping: runs save their state")
        for process in running:
            process.wait()


def environment(jobs: int) -> dict[str, str]:
    """Of a child among ``jobs``: they share the cores, and are not bound to the same ones."""
    found = dict(os.environ)
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, default_threads() // jobs)))
        found.setdefault("OMP_PROC_BIND", "false")
    return found


def _tail(path: Path, most: int = 4096) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode("utf-8", errors="replace")


def _last_line(log: Path) -> str:
    return next((line for line in reversed(_tail(log).splitlines()) if line.strip()), "it said nothing")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM, and a terminal that is gone, end the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
