"""Train, export, score and time what is missing; a training is an `edgeformer` command in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.jobs import TRAINING_REVISION, Job, decisive
from benchmarks.studies.paired import Right, packed
from benchmarks.studies.results import Outcome, Results, StudyRun, StudyTimes, TimedArtifact
from benchmarks.studies.specification import Timing
from edgeformer.artifacts.device import Budget
from edgeformer.artifacts.documents import load_profile, own_profiles
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InterruptedRun
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import Row
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.artifacts.workspace import BUNDLE_FOLDER, RECIPE_FILE, RUN_FILE
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle
from edgeformer.inference.evaluate import EvaluateOptions, Evaluator
from edgeformer.inference.predict import select_candidates
from edgeformer.models import model_spec_of
from edgeformer.run import TORCH, Location, Run, find_bundle
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, default_threads, describe_host, now
from edgeformer.system.signals import handle_signals
from edgeformer.tasks import get_task

_SWEPT = 0.85
"""The first threshold of the released code's sweep, beside those that `evaluate` always tries."""
_CURVE = 200
"""Steps of a curve that are kept."""


def missing_steps(job: Job, run: StudyRun, folder: Path, splits: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands by which a finished run gets the graphs and scores on ``splits`` that the study needs."""
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
            name = get_task(run.task).rows.set_name(job.written.data, split) if split == "test" else None
        if name is None:
            continue
        for artifact in built if spec.export else []:
            if (artifact, name) not in scored:
                yield "evaluate", str(folder), "--artifact", artifact, "--split", split, *artifacts
        if spec.sweep and name not in swept:
            threshold = ("--threshold", str(_SWEPT))
            yield "evaluate", str(folder), "--artifact", TORCH, *threshold, "--split", split, *artifacts


def collect(job: Job, folder: Path) -> StudyRun:
    """Return the results of a finished run. Raises ArtifactError: unfinished, damaged, or trained on other data."""
    run = Run.open(folder)
    run.require_finished()
    manifest, bundle = run.manifest, find_bundle(folder)
    same_data = job.summary is None or manifest.data.fingerprint == job.summary.fingerprint
    tokenizer = job.origins.get("tokenizer", manifest.tokenizer_fingerprint)
    if not same_data or manifest.tokenizer_fingerprint not in (None, tokenizer):
        raise ArtifactError(f"{folder}: was trained on other data or with another tokenizer; remove it to train again")
    log = folder / "metrics.jsonl"  # an imported run has none
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    steps = [number for number, record in enumerate(records) if record.get("kind") == "step"]
    every = max(1, -(-len(steps) // _CURVE))
    dropped = {*steps} - {*steps[every - 1 :: every]}
    facts = {
        "key": job.key or "",
        "recipe_sha256": job.sha256,
        "revision": TRAINING_REVISION,
        "recipe": decisive(job.written),
        "run": folder.name,
        "data": manifest.data.model_copy(update={"findings": ()}),
        "data_notes": job.notes,
        "origins": dict(job.origins),
        "loops": model_spec_of(run.recipe).loops(run.recipe.model),
        "evaluation": read_evaluation(folder),
        "artifacts": Bundle.open(bundle).manifest.artifacts if bundle is not None else (),
        "curve": [record for number, record in enumerate(records) if number not in dropped],
    }
    return StudyRun.model_validate({**manifest.model_dump(), **facts}, strict=False)


def right_rows(folder: Path, split: str) -> Right:
    """Return which rows of a set a classifier's own weights answer right, in the order of the set."""
    (candidate,) = select_candidates(Location(folder, None), TORCH)
    evaluator = Evaluator(EvaluateOptions(TORCH, split), SILENT)
    rows, reader, task = evaluator.labelled_rows(candidate), candidate.reader(), candidate.owner.task
    data: Any = candidate.owner.data
    answers = np.empty((len(rows), len(data.labels)))
    with candidate.session(every_exit=False) as session:
        for numbers in task.rows.call_batches(rows, evaluator.options.batch, reader.vocabulary):
            batch = task.rows.batch(rows, numbers, reader.pad)
            answers[numbers] = task.row_answers(session.run(batch), batch, candidate.owner.data)
    return task.row_figures(answers, rows, candidate.owner.data)[:, 0] > 0


@dataclass
class Trainer:
    """Makes the missing runs of a study. ``failed``: key of a job → reason."""

    artifacts: Path  # the folder that holds the runs
    results: Results
    splits: Sequence[str]  # on which graphs are scored
    at_a_time: int  # trainings; exports and scores follow one by one, because scores measure time
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)
    _processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)  # a second Ctrl-C comes while the first is handled
    _answering: Any = field(default_factory=threading.Lock)
    _stopping: bool = False

    def _status(self, job: Job) -> str | None:
        """Return the status of a job's run; None: there is none. Raises ArtifactError where it is damaged."""
        folder = self.artifacts / job.folder_name
        return Run.open(folder).status if job.key is not None and (folder / RUN_FILE).is_file() else None

    def outcome(self, job: Job) -> Outcome:
        """Return the results of a job, and what is left to do of it."""
        run, folder, status = self.results.find(job), self.artifacts / job.folder_name, self._status(job)
        if run is not None and (job.key is None or not [*missing_steps(job, run, folder, self.splits)]):
            return Outcome(job, run)
        if job.key is None:
            reasons = (job.reason, self.results.ambiguity(job))
            return Outcome(job, None, "; ".join(filter(None, reasons)), "unavailable")
        return Outcome(job, run, "", {None: "missing", "finished": "to score"}.get(status, "resumable"))

    def run(self, outcomes: Sequence[Outcome], command: str) -> None:
        """Make every run that is missing or incomplete, teachers first; reasons of failures are in ``failed``.

        Raises InterruptedRun with ``command``, which continues: Ctrl-C or SIGTERM; trainings have saved their state.
        """
        jobs = [outcome.job for outcome in outcomes if outcome.state in ("missing", "resumable", "to score")]
        taught = {job.key: job for job in jobs if job.teacher is not None}
        teachers = [job.teacher for job in taught.values() if job.teacher is not None]
        first = {
            job.key: job for job in [*jobs, *teachers] if job.key not in taught and self._status(job) != "finished"
        }

        def stop(number: int, frame: object) -> None:
            with self._lock:
                self._stopping = True
                for process in self._processes:
                    process.terminate()  # a training saves its state

        with handle_signals(("SIGINT", "SIGTERM", "SIGHUP"), stop):
            self._run_all("Training", self._train, [*first.values()], self.at_a_time)
            self._run_all("Training", self._train, [*taught.values()], self.at_a_time)
            self._run_all("Scoring", self._score, [job for job in jobs if job.key not in self.failed], 1)
        if self._stopping:
            raise InterruptedRun(f"interrupted; continue with: {command}")

    def _run_all(self, title: str, function: Callable[[Job], None], jobs: Sequence[Job], at_a_time: int) -> None:
        if not jobs:
            return
        with bar(self.progress, title, len(jobs), "runs"), ThreadPoolExecutor(at_a_time) as pool:
            futures = {pool.submit(function, job): job for job in jobs}
            for future in as_completed(futures):
                try:
                    future.result()
                except (EdgeformerError, OSError) as error:
                    self.failed[futures[future].key or ""] = str(error)
                    self.progress.message(f"{futures[future].title}: failed: {error}")
                self.progress.advance()

    def _train(self, job: Job) -> None:
        folder = self.artifacts / job.folder_name
        if (status := self._status(job)) != "finished":
            recipe = job.recipe
            if job.teacher is not None:
                if job.teacher.key in self.failed:
                    raise EdgeformerError(f"its teacher is missing: {self.failed[job.teacher.key]}")
                weights = str((self.artifacts / job.teacher.folder_name).absolute())
                training = recipe.training.model_copy(update={"teacher": weights})
                recipe = recipe.model_copy(update={"training": training})
            path = self.artifacts / "studies" / "recipes" / f"{job.key}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, recipe.to_yaml())
            source = (str(path),) if status is None else (str(folder / RECIPE_FILE), "--resume")
            self._call(job, ("train", *source, "--name", folder.name, "--artifacts", str(self.artifacts)))
        run = self._keep(job, folder)  # with its answers: a study that is interrupted later has lost nothing
        self.progress.message(f"{job.title}: trained, {run.steps:,} steps, {run.seconds:,.0f} s")

    def _score(self, job: Job) -> None:
        folder, problems, tried = self.artifacts / job.folder_name, list[str](), set[tuple[str, ...]]()
        run = self._keep(job, folder)
        while step := next((s for s in missing_steps(job, run, folder, self.splits) if s not in tried), None):
            tried.add(step)
            try:
                self._call(job, step)
            except EdgeformerError as error:
                problems.append(str(error))
                if self._stopping:
                    raise
            run = self._keep(job, folder)
        if remaining := [" ".join(step) for step in missing_steps(job, run, folder, self.splits)]:
            raise EdgeformerError("; ".join(problems) or f"`edgeformer {remaining[0]}` had no effect")

    def _keep(self, job: Job, folder: Path) -> StudyRun:
        """Keep and return the results of a finished run, with the rows that a classifier answers right.

        Raises EdgeformerError where torch cannot compute the answers; the other results are kept.
        """
        previous = self.results.find(job)
        run = self.results.keep(collect(job, folder))
        if get_task(run.task).metric.name != "accuracy":
            return run
        names = {row.split for row in run.evaluation.rows if row.artifact == TORCH} - {"validation"}
        right = dict(previous.right) if previous is not None and previous.started == run.started else {}
        try:
            with self._answering:  # one run at a time, beside the trainings
                right |= {name: packed(right_rows(folder, name)) for name in sorted(names - right.keys())}
        except RuntimeError as error:
            raise EdgeformerError(f"which rows it answers right is unknown: {error}") from error
        return self.results.keep(run.model_copy(update={"right": right}))

    def _call(self, job: Job, arguments: Sequence[str]) -> None:
        log, environment = self.artifacts / "studies" / "logs" / f"{job.key}.log", dict(os.environ)
        log.parent.mkdir(parents=True, exist_ok=True)
        if arguments[0] == "train" and self.at_a_time > 1:  # they share the cores, and are not bound to the same ones
            environment.setdefault("OMP_NUM_THREADS", str(max(1, default_threads() // self.at_a_time)))
            environment.setdefault("OMP_PROC_BIND", "false")
        with log.open("ab") as file:
            file.write(f"\n$ edgeformer {' '.join(arguments)}\n".encode())
            file.flush()
            with self._lock:
                if self._stopping:
                    raise InterruptedRun("interrupted")
                # In a session of its own: Ctrl-C in the terminal reaches the study alone, which terminates it once.
                process = subprocess.Popen(
                    [sys.executable, "-m", "edgeformer", *arguments], stdin=subprocess.DEVNULL, stdout=file,
                    stderr=file, env=environment, start_new_session=sys.platform != "win32",
                )  # fmt: skip
                self._processes.add(process)
            code = process.wait()
        with self._lock:
            self._processes.discard(process)
        if code not in (0, 3):  # 3: an artifact was rejected, as its manifest says
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise EdgeformerError(f"{arguments[0]} ended with exit code {code}: {lines[-1]}; see {log}")

    def times(self, matches: Sequence[StudyRun], timing: Timing, *, measure: bool) -> StudyTimes | None:
        """Return the times of a study's graphs, kept or measured in turns (A B C A B C …); None: there are none."""
        runs = {run.key: run for run in matches if timed_artifacts(run)}  # some are trained for their scores alone
        graphs = [(run, artifact) for run in runs.values() for artifact in timed_artifacts(run)]
        sizes = {(run.key, artifact.id): artifact.size_bytes for run in runs.values() for artifact in run.artifacts}
        content = sorted((run.key, artifact, run.started, sizes[run.key, artifact]) for run, artifact in graphs)
        text = json.dumps([content, timing.batch, timing.seq, timing.rounds])
        key = hashlib.sha256(text.encode()).hexdigest()
        if (kept := self.results.times(key)) is not None or not measure or not runs:
            return kept
        bundles = {run.key: self.artifacts / run.run / BUNDLE_FOLDER for run in runs.values()}
        exported = {path: {artifact.id for artifact in Bundle.open(path).artifacts} if path.is_dir() else set[str]()
                    for path in bundles.values()}  # fmt: skip
        if absent := [str(bundles[run.key]) for run, artifact in graphs if artifact not in exported[bundles[run.key]]]:
            self.progress.message(f"no times: {', '.join(absent)} lack graphs, and all are measured in turns")
            return None
        turns: dict[tuple[str, str], list[Row | None]] = {(run.key, artifact): [] for run, artifact in graphs}
        budget = Budget(batch=timing.batch, seq=timing.seq)  # so that this shape alone is measured
        budgets = dict.fromkeys(("classification", "language-modeling"), budget)
        device = load_profile("host", own_profiles(self.artifacts)).model_copy(update={"budgets": budgets})
        start, started = time.monotonic(), now()
        with bar(self.progress, f"Measuring {len(graphs)} graphs in turns", timing.rounds * len(graphs), "turns"):
            for run, artifact in graphs * timing.rounds:
                options = ProfileOptions((timing.batch,), (timing.seq,), artifacts=(artifact,), allow_leak=run.leaks)
                location = Location(self.artifacts / run.run, bundles[run.key])
                bundle = location.open_bundle()
                shape = bundle.task.fit_shape(bundle.data, timing.batch, timing.seq)
                rows = profile_bundle(location, device, options).rows
                steady = (
                    row for row in rows if (row.batch, row.seq, row.where, row.phase) == (*shape, "host", "steady")
                )
                row = next((row for row in steady if row.latency_ms.p50 is not None), None)
                turns[run.key, artifact].append(row)
                self.progress.advance()
        entries = []
        for (run_key, artifact), turn_rows in turns.items():
            if measured := [row for row in turn_rows if row is not None]:
                entries.append(
                    TimedArtifact(
                        run=run_key, artifact=artifact, provider=measured[-1].provider,
                        p50_ms=tuple(row.latency_ms.p50 if row is not None else None for row in rows),
                        stable=all(bool(row.latency_ms.stable) for row in measured),
                    )
                )  # fmt: skip
        times = StudyTimes(
            key=key, batch=timing.batch, seq=timing.seq, threads=default_threads(), entries=tuple(entries),
            host=describe_host(), versions=library_versions(), code_version=code_version(), started=started,
            seconds=round(time.monotonic() - start, 1),
        )  # fmt: skip
        write_json(self.results.folder / f"times-{key}.json", times)
        return times


def timed_artifacts(run: StudyRun) -> list[str]:
    """Return the graphs of a run that are measured: the whole model in each precision, and its exits in FP32."""
    kinds = (("exit", "fp32"), *(("full", artifact.precision) for artifact in run.artifacts))
    return [a.id for a in run.artifacts if a.status == "built" and (a.role, a.precision) in kinds]
