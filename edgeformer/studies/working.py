"""The runs that are missing, each command in a process of its own: what is killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeformer.formats.errors import EdgeformerError, InterruptedRun
from edgeformer.formats.files import write_text
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.study_result import StudyRun
from edgeformer.formats.units import format_duration
from edgeformer.machine.lock import LockedError, claiming
from edgeformer.studies.jobs import Job
from edgeformer.studies.lanes import Failure, Lane, exporter, nothing_came
from edgeformer.studies.needs import Step, lacking, status_of, steps_of, training_step
from edgeformer.studies.processes import end, environment, last_line, stoppable, tail
from edgeformer.studies.results import Results, collect

_POLL_S = 0.2
_REMIND_S = 600.0
"""How often is said that a lock is waited for whose owner nobody here can see."""


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
    with bar(progress, "Training", sum(steps.values()) or None, "steps"), stoppable():
        try:
            while crew.waiting or crew.lanes:
                crew.begin()
                crew.look()
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            raise InterruptedRun(f"interrupted; go on with: {place.again}") from None
        finally:  # whatever happened: no process is left that nobody waits for
            crew.stop()
    return crew.failed


class _Crew:
    def __init__(self, place: Workplace, jobs: list[Job], progress: Progress) -> None:
        self.waiting, self.lanes, self.failed = jobs, list[Lane](), dict[str, str]()
        self._place, self._progress, self._told = place, progress, dict[str, float]()
        self._untrained = set[str]()

    def begin(self) -> None:
        """Fill the free places with jobs that nobody else works at and whose teacher is ready."""
        for job in [*self.waiting]:
            scoring = any(lane.step is not None and lane.step.kind == "score" for lane in self.lanes)
            if scoring or sum(lane.pending is None for lane in self.lanes) >= self._place.jobs:
                return
            teacher = job.teacher.key if job.teacher is not None else None
            if teacher in self._untrained:
                self._fail(job, f"its teacher is missing: {self.failed[teacher or '']}")
            if job not in self.waiting or any(teacher == (other.key or "") for other in self._unfinished()):
                continue
            try:
                lane = self._lane(job)
            except LockedError as error:  # another study works at it; it is looked for again
                self._tell(job, error)
            except (EdgeformerError, OSError) as error:
                self._fail(job, str(error))
            else:
                self.waiting.remove(job)
                self.lanes.append(lane)

    def _lane(self, job: Job) -> Lane:
        """A place for a job, which nobody else works at from now on. Raises LockedError, ArtifactError or OSError."""
        key, folder, results = job.key or "", self._place.artifacts / "studies", self._place.results
        results.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(claiming(results.folder / key))
            found = results.of(job)
            return Lane(
                job,
                held.pop_all(),
                folder / "recipes" / f"{key}.yaml",
                folder / "logs" / f"{key}.log",
                found.run if found is not None else None,
                seen=steps_of(self._place.artifacts / job.folder_name),  # the bar counts what is left
            )

    def _tell(self, job: Job, error: LockedError) -> None:
        """Say once who is waited for; again and again where nobody here can know whether that one lives."""
        key, now = job.key or "", time.monotonic()
        if key in self._told and (error.held or now - self._told[key] < _REMIND_S):
            return
        unseen = "" if error.held else "; whether that still runs cannot be seen from here: this study waits until then"
        self._progress.message(f"{job.title}: waiting for another study: {error}{unseen}")
        self._told[key] = now

    def _fail(self, job: Job, reason: str, *, trained: bool = False) -> None:
        self.failed[job.key or ""] = reason
        if not trained:
            self._untrained.add(job.key or "")
        self._progress.message(f"{job.title}: failed: {reason}")
        if job in self.waiting:
            self.waiting.remove(job)

    def _unfinished(self) -> list[Job]:
        """Those whose weights are not there yet."""
        return [*self.waiting, *(lane.job for lane in self.lanes if lane.kept is None)]

    def look(self) -> None:
        """Let every lane do its next step where the one before has ended."""
        for lane in [*self.lanes]:
            self._show(lane)
            if lane.lives:
                continue
            try:
                if not (self._next(lane) if lane.pending is None else self._try(lane, lane.pending)):
                    continue
            except (Failure, EdgeformerError, OSError) as error:
                self._fail(lane.job, str(error), trained=lane.kept is not None)
            lane.held.close()
            self.lanes.remove(lane)

    def _next(self, lane: Lane) -> bool:
        """Start the lane's next step; True where there is none left. Raises Failure."""
        self._ended(lane)
        job, folder = lane.job, self._place.artifacts / lane.job.folder_name
        status = status_of(folder)
        if status == "running":
            self._wait(lane, f"{folder} is being trained by another process")
            return False
        if status != "finished":
            self._write_recipe(lane)
            step = training_step(job, folder, lane.recipe)
            if step.arguments in lane.tried:
                raise Failure(nothing_came(step, lane))
            return self._try(lane, step)
        run = self._keep(lane, folder)
        if (missing := lacking(job, run, folder, self._place.splits, lane.tried)) is not None:
            return self._try(lane, missing)
        left = lacking(job, run, folder, self._place.splits)
        if left is not None:
            raise Failure("; ".join(lane.problems) or nothing_came(left, lane))
        took = format_duration(run.seconds + run.scoring_s)
        self._progress.message(f"{job.title}: finished, {run.steps:,} steps, {took}")
        return True

    def _keep(self, lane: Lane, folder: Path) -> StudyRun:
        """Write down what is known of a finished run, whatever becomes of the steps that follow."""
        run, before = collect(lane.job, folder, lane.scoring_s, lane.training_s), lane.before
        if before is not None and before.started == run.started:  # the same training: only scores were added
            overhead = before.overhead_s if run.overhead_s is None else run.overhead_s
            scoring = round(before.scoring_s + run.scoring_s, 1)
            run = run.model_copy(update={"scoring_s": scoring, "overhead_s": overhead})
        if run != lane.kept:
            self._place.results.keep(run)
        lane.kept = run
        return run

    def _try(self, lane: Lane, step: Step) -> bool:
        """Start a step, or let it wait: who measures time is alone, and only one process writes a bundle."""
        others = [lane.job for other in self.lanes if other is not lane and other.pending is None]
        waits = step.kind == "score" and bool(others)
        if step.kind == "export" and (owner := exporter(self._place.artifacts / lane.job.folder_name)) is not None:
            self._wait(lane, owner)
            waits = True
        lane.pending = step if waits else None
        if not waits:
            self._start(lane, step)
        return False

    def _wait(self, lane: Lane, what: str) -> None:
        if not lane.waiting:
            self._progress.message(f"{lane.job.title}: {what}; waiting for it")
        lane.waiting = True

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
        alone = step.kind == "score"
        with lane.log.open("ab") as log:
            log.write(f"\n$ edgeformer {' '.join(step.arguments)}\n".encode())
            log.flush()
            # In a session of its own: Ctrl-C at the terminal comes to the study alone, which then asks once.
            lane.process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(1 if alone else self._place.jobs), start_new_session=sys.platform != "win32",
            )  # fmt: skip
        lane.step, lane.step_began, lane.waiting = step, time.monotonic(), False
        lane.tried.add(step.arguments)
        if step.kind in ("train", "resume"):
            self._progress.message(f"{lane.job.title}: {step.kind} {lane.job.folder_name}")

    def _ended(self, lane: Lane) -> None:
        """Note what became of the step that has just ended. Raises Failure where it was a training that failed."""
        if lane.process is None or lane.step is None:
            return
        code, step = lane.process.returncode, lane.step
        trains, folder = step.kind in ("train", "resume"), self._place.artifacts / lane.job.folder_name
        if step.kind == "train":
            lane.training_s = time.monotonic() - lane.step_began
        elif step.kind != "resume":
            lane.scoring_s += time.monotonic() - lane.step_began
        lane.process = lane.step = None
        if code in (0, 3):  # 3: an artifact was rejected, which its manifest says
            return
        first = ("running", "finished") if step.kind == "resume" else ("running",)
        if (trains and status_of(folder) in first) or (step.kind == "export" and exporter(folder) is not None):
            lane.tried.discard(step.arguments)  # another process came first: it is waited for, or has just ended
            return
        problem = f"{step.kind} ended with exit code {code}: {last_line(lane.log)}; see {lane.log}"
        if trains:
            raise Failure(problem)
        lane.problems.append(problem)

    def _show(self, lane: Lane) -> None:
        """Move the bar by what the run's log says."""
        log = self._place.artifacts / lane.job.folder_name / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            record = json.loads(tail(log).splitlines()[-1])
            before, lane.seen = lane.seen, int(record["step"])
            if lane.seen > before:
                self._progress.advance(lane.seen - before, loss=record.get("loss", record.get("val_loss", 0.0)))

    def stop(self) -> None:
        """End what still runs, and give the jobs back."""
        running = [lane.process for lane in self.lanes if lane.process is not None and lane.lives]
        try:
            if running:
                self._progress.message("stopping: runs save their state")
        finally:
            try:
                end(running)
            finally:
                for lane in self.lanes:
                    lane.held.close()
