"""Train, export and score what is missing: each step is an ordinary `edgeformer` command in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.jobs import Job, speed_sha256
from benchmarks.studies.results import StudyRun
from benchmarks.studies.store import Results, collect
from edgeformer.artifacts.errors import EdgeformerError, InterruptedRun
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.manifest import RunStatus
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.workspace import RECIPE_FILE, RUN_FILE
from edgeformer.run import TORCH, Run
from edgeformer.system.host import default_threads
from edgeformer.system.signals import handle_signals
from edgeformer.tasks import get_task
from edgeformer.training.duration import TrainingTime, time_steps

_EXPORT_S = 20.0
"""Seconds to trace, write and score a graph: a guess."""
_SWEPT = 0.85
"""The first threshold of the released code's sweep, beside those that `evaluate` always tries."""


@dataclass(frozen=True)
class Estimate:
    """What is left to do of a run; ``state``: done, shared (with another row), to score, resumable, missing or
    unavailable."""

    job: Job
    state: str
    seconds: float = 0.0
    steps: int = 0
    basis: str = ""


def status_of(folder: Path) -> RunStatus | None:
    """Return the status of the run in a folder; None: there is none. Raises ArtifactError where it is damaged."""
    return Run.open(folder).status if (folder / RUN_FILE).is_file() else None


def missing_steps(job: Job, run: StudyRun, folder: Path, splits: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands by which a finished run gets the graphs and scores that the study needs.

    Args:
        run: its results so far.
        folder: of the run.
        splits: on which graphs are scored.
    """
    spec, artifacts = job.spec, ("--artifacts", str(folder.parent))
    full = {artifact.precision for artifact in run.artifacts if artifact.role == "full"}
    exits = {artifact.exit for artifact in run.artifacts if artifact.role == "exit"}
    graphs = {"fp32", *spec.export} if spec.export or spec.exits else set()
    if not (graphs <= full and job.exits <= exits):
        options = [f"--{precision}" for precision in sorted(graphs - {"fp32"})]
        options += ["--exit", ",".join(map(str, sorted(job.exits)))] if job.exits else []
        yield "export", str(folder), *options, "--keep-going", *(["--allow-leak"] if run.leaks else []), *artifacts
    built = [artifact.id for artifact in run.artifacts if artifact.role == "full" and artifact.status == "built"]
    scored = {(row.artifact, row.split) for row in run.evaluation.rows}
    swept = {row.split for row in run.evaluation.early_exit if row.artifact == TORCH and row.threshold == _SWEPT}
    for split in splits:
        name: str | None = split
        if (TORCH, split) not in scored:  # of another row, unless it is the protocol's own test set
            name = get_task(run.task).set_name(job.written.data, split) if split == "test" else None
        if name is None:
            continue
        for artifact in built if spec.export else []:
            if (artifact, name) not in scored:
                yield "evaluate", str(folder), "--artifact", artifact, "--split", split, *artifacts
        if spec.sweep and name not in swept:
            threshold = ("--threshold", str(_SWEPT))
            yield "evaluate", str(folder), "--artifact", TORCH, *threshold, "--split", split, *artifacts


def _graphs(job: Job) -> int:
    return len({"fp32", *job.spec.export}) + len(job.exits) if job.spec.export or job.spec.exits else 0


def child_environment(jobs: int) -> dict[str, str]:
    """Return the environment of one of ``jobs`` processes: they share the cores and are not bound to the same ones."""
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, default_threads() // jobs)))
        environment.setdefault("OMP_PROC_BIND", "false")
    return environment


@dataclass
class Trainer:
    """Makes the missing runs of a study.

    Attributes:
        artifacts: the folder that holds the runs.
        splits: on which graphs are scored.
        jobs: trainings at a time. Exports and scores follow one by one, because scores measure time.
    """

    artifacts: Path
    results: Results
    splits: Sequence[str]
    jobs: int
    progress: Progress

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}  # key → reason
        self._rates: dict[str, tuple[TrainingTime, int]] = {}  # and the rows that its steps are of
        self._futures: dict[str, Future[None]] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopping = threading.Lock(), False

    def estimate(self, job: Job) -> Estimate:
        """Return what is left of a run, and how long it will take: by timing some steps of its kind."""
        match, folder = self.results.find(job), self.artifacts / job.folder_name
        status = status_of(folder) if job.key is not None else None
        if match is not None:
            count = len([*missing_steps(job, match.run, folder, self.splits)])
            if not count or job.key is None:
                return Estimate(job, "done", basis=match.origin)
            if status == "finished":
                return Estimate(job, "to score", _EXPORT_S * count, basis="guessed")
        if job.key is None or job.data.summary is None:
            reasons = (job.data.reason or "what its teacher is made of cannot be read", self.results.ambiguity(job))
            return Estimate(job, "unavailable", basis="; ".join(filter(None, reasons)))
        if status == "finished":
            return Estimate(job, "to score", _EXPORT_S, basis="guessed")
        rows, epochs = max(1, job.data.summary.rows["train"]), job.written.training.epochs
        kind = speed_sha256(job.written)
        if kind not in self._rates:
            try:
                with bar(self.progress, f"Timing some steps of {job.row}", None):
                    cache = self.artifacts / ".cache" / "tokens"
                    self._rates[kind] = time_steps(job.recipe, cache, child_environment(self.jobs)), rows * epochs
            except EdgeformerError as error:
                return Estimate(job, "unavailable", basis=str(error))
        probe, probe_rows = self._rates[kind]
        done = Run.open(folder).manifest.steps if status is not None else 0
        steps = max(0, round(probe.steps * rows * epochs / probe_rows) - done)
        seconds = steps * probe.total_s / probe.steps + _EXPORT_S * _graphs(job)
        return Estimate(job, "resumable" if status else "missing", seconds, steps, f"by {probe.timed_steps} steps")

    def run(self, estimates: Sequence[Estimate], command: str) -> None:
        """Make every run that is missing or incomplete, teachers first; reasons of failures are in ``failed``.

        Args:
            estimates: of all runs.
            command: that continues the study, for the message of an interruption.

        Raises:
            InterruptedRun: Ctrl-C or SIGTERM; trainings have saved their state.
        """
        open_states = ("missing", "resumable", "to score")
        jobs: dict[str, Job] = {}

        def add(job: Job) -> None:
            if job.teacher is not None and status_of(self.artifacts / job.folder_name) != "finished":
                add(job.teacher)
            jobs.setdefault(job.key or "", job)

        for estimate in estimates:
            if estimate.state in open_states:
                add(estimate.job)
        self._estimates = {estimate.job.key or "": estimate for estimate in reversed(estimates)}

        def stop(number: int, frame: object) -> None:
            self._stopping = True

        with handle_signals(("SIGINT", "SIGTERM", "SIGHUP"), stop):
            self._run_all("Training", self._train, [*jobs.values()], self.jobs)
            shared = [e.job for e in estimates if e.state in (*open_states, "shared") and e.job.key in jobs]
            self._run_all("Scoring", self._score, [job for job in shared if job.key not in self.failed], 1)
        if self._stopping:
            raise InterruptedRun(f"interrupted; continue with: {command}")

    def _run_all(self, title: str, function: Callable[[Job], None], jobs: Sequence[Job], at_a_time: int) -> None:
        total = round(sum(self._seconds(job, title) for job in jobs)) or None
        with bar(self.progress, title, total, "s of estimated work"), ThreadPoolExecutor(at_a_time) as pool:
            futures: dict[Future[None], Job] = {}
            self._futures = {}
            for job in jobs:  # teachers first: a student waits for the future of its teacher
                future = pool.submit(function, job)
                futures[future] = job
                self._futures[job.key or ""] = future
            pending, displayed, first_steps = {*futures}, 0, dict[str, int]()
            try:
                while pending and not self._stopping:
                    done, pending = wait(pending, timeout=0.5)
                    for future in done:
                        job, error = futures[future], future.exception()
                        if isinstance(error, (EdgeformerError, OSError)):
                            self.failed[job.key or ""] = str(error)
                            self.progress.message(f"{job.title}: failed: {error}")
                        elif error is not None:
                            raise error
                    seconds = 0.0  # of the work that is done, by the steps in the logs of the runs
                    for future, job in futures.items():
                        share = float(future.done())
                        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                            log, key = self.artifacts / job.folder_name / "metrics.jsonl", job.key or ""
                            step = int(json.loads(log.read_bytes().splitlines()[-1])["step"])
                            steps = step - first_steps.setdefault(key, step)
                            share = max(share, min(1.0, steps / max(1, self._estimates[key].steps)))
                        seconds += share * self._seconds(job, title)
                    self.progress.advance(int(seconds) - displayed)
                    displayed = int(seconds)
            finally:
                with self._lock:
                    self._stopping = self._stopping or bool(pending)
                    for process in self._processes if self._stopping else ():
                        process.terminate()  # a training saves its state
                pool.shutdown(wait=False, cancel_futures=True)

    def _seconds(self, job: Job, title: str) -> float:
        """Return the estimated seconds of a job's training or scoring."""
        estimate = self._estimates[job.key or ""]
        scoring = min(estimate.seconds, _EXPORT_S * _graphs(job))
        return scoring if title == "Scoring" else estimate.seconds - scoring

    def _train(self, job: Job) -> None:
        """Train a run, or continue it, and keep its results."""
        folder, process_s = self.artifacts / job.folder_name, None
        if (status := status_of(folder)) != "finished":
            recipe = job.recipe
            if job.teacher is not None:
                teacher = self._futures.get(job.teacher.key or "")
                if teacher is not None and (error := teacher.exception()) is not None:
                    raise EdgeformerError(f"its teacher is missing: {error}")
                weights = str((self.artifacts / job.teacher.folder_name).absolute())
                training = recipe.training.model_copy(update={"teacher": weights})
                recipe = recipe.model_copy(update={"training": training})
            path = self.artifacts / "studies" / "recipes" / f"{job.key}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, recipe.to_yaml())
            source = (str(path),) if status is None else (str(folder / RECIPE_FILE), "--resume")
            seconds = self._call(job, ("train", *source, "--name", folder.name, "--artifacts", str(self.artifacts)))
            process_s = seconds if status is None else None
        match = self.results.find(job)
        run = collect(job, folder, match.run if match is not None else None, 0.0, process_s)
        self.results.keep(run)
        self.progress.message(f"{job.title}: trained, {run.steps:,} steps, {run.seconds:,.0f} s")

    def _score(self, job: Job) -> None:
        """Export and score a finished run; a command that fails does not keep the others from being run."""
        folder, problems, tried = self.artifacts / job.folder_name, list[str](), set[tuple[str, ...]]()
        match = self.results.find(job)
        run = collect(job, folder, match.run if match is not None else None, 0.0, None)
        while step := next((s for s in missing_steps(job, run, folder, self.splits) if s not in tried), None):
            tried.add(step)
            seconds = 0.0
            try:
                seconds = self._call(job, step)
            except EdgeformerError as error:
                problems.append(str(error))
                if self._stopping:
                    raise
            run = collect(job, folder, run, seconds, None)
            self.results.keep(run)
        if remaining := [" ".join(step) for step in missing_steps(job, run, folder, self.splits)]:
            log = self.artifacts / "studies" / "logs" / f"{job.key}.log"
            raise EdgeformerError("; ".join(problems) or f"`edgeformer {remaining[0]}` had no effect; see {log}")

    def _call(self, job: Job, arguments: Sequence[str]) -> float:
        """Run an edgeformer command and return its seconds. Raises EdgeformerError where it fails."""
        log, start = self.artifacts / "studies" / "logs" / f"{job.key}.log", time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        at_a_time = self.jobs if arguments[0] == "train" else 1
        with log.open("ab") as file:
            file.write(f"\n$ edgeformer {' '.join(arguments)}\n".encode())
            file.flush()
            with self._lock:
                if self._stopping:
                    raise InterruptedRun("interrupted")
                # In a session of its own: Ctrl-C in the terminal reaches the study alone, which terminates it once.
                process = subprocess.Popen(
                    [sys.executable, "-m", "edgeformer", *arguments], stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, env=child_environment(at_a_time), start_new_session=sys.platform != "win32",
                )  # fmt: skip
                self._processes.add(process)
            code = process.wait()
        self._processes.discard(process)
        if code not in (0, 3):  # 3: an artifact was rejected, as its manifest says
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise EdgeformerError(f"{arguments[0]} ended with exit code {code}: {lines[-1]}; see {log}")
        return time.monotonic() - start


def total_seconds(estimates: Sequence[Estimate], jobs: int) -> float:
    """Return the seconds until the last run ends, with ``jobs`` at a time."""
    seconds = [estimate.seconds for estimate in estimates]
    return max([sum(seconds) / jobs, *seconds])
