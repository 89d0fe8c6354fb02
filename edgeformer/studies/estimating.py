"""How long a study will take: by finished runs of the same kind on this machine, else by a few timed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.study_result import StudyRun
from edgeformer.formats.workspace import RUN_FILE
from edgeformer.machine.host import cpu_name
from edgeformer.run import Run
from edgeformer.stages.training.timing import timed
from edgeformer.studies.jobs import Job, alike
from edgeformer.studies.needs import lacking
from edgeformer.studies.processes import environment, threads
from edgeformer.studies.results import Found

_STARTS = 2.0
"""Of a training's process: what it needs to begin, it needs once more to score, draw and write."""
_EXPORT_S = 20.0
"""To trace and write a graph; scoring it comes on top."""

State = Literal["done", "to score", "resumable", "missing", "shared", "unavailable"]
"""``shared``: another row's run, which is made for both."""


@dataclass(frozen=True)
class Estimate:
    """What is left to do of one run, and how long it will take.

    Attributes:
        steps: optimizer steps that are left.
        basis: where the time is from.
    """

    job: Job
    state: State
    seconds: float = 0.0
    steps: int = 0
    basis: str = ""


@dataclass(frozen=True)
class _Rate:
    """Seconds of a run of so many steps."""

    seconds: float
    steps: int
    per_text: float
    """Steps of an epoch over its texts, which packed rows are not as many as."""
    overhead_s: float
    scoring_s: float
    basis: str

    def steps_of(self, job: Job) -> int:
        """Of another run of the kind."""
        return round(self.per_text * _texts(job) * job.written.training.epochs)


def _texts(job: Job) -> int:
    return job.data.summary.rows["train"] if job.data.summary is not None else 0


def _as_here(run: StudyRun, threads: set[int]) -> bool:
    """Whether a run was trained as the next ones will be: on this processor, with as many threads unless on a card."""
    on_cpu = str(run.host.get("accelerator", "cpu")).startswith("cpu")
    return run.host.get("cpu") == cpu_name() and (not on_cpu or run.host.get("threads") in threads)


class Estimator:
    """Estimates every run of a study; a probe is made once for runs that take as long.

    Args:
        artifacts: the folder that holds the runs.
        known: finished runs of this machine.
        jobs: how many will run at a time.
        splits: on which graphs will be scored.
    """

    def __init__(self, artifacts: Path, known: Sequence[StudyRun], jobs: int, splits: Sequence[str]) -> None:
        self._artifacts, self._jobs, self._splits = artifacts, jobs, splits
        self._known = [run for run in known if _as_here(run, threads(jobs))]
        self._probed: dict[str, _Rate] = {}

    def of(self, job: Job, found: Found | None, progress: Progress) -> Estimate:
        """What is left of one run. ``found``: its results, if there are any."""
        folder = self._artifacts / job.folder_name
        if found is not None:
            step = lacking(job, found.run, folder, self._splits)
            there = (folder / RUN_FILE).is_file()
            if step is None or not (there or job.key):
                return Estimate(job, "done", basis=found.origin)
            if there:
                graphs = self._graphs_s(job, found.run.seconds / max(1, found.run.epochs) / 10)
                return Estimate(job, "to score", graphs, basis=f"guessed: {step.kind} of a finished run")
        if job.key is None:
            return Estimate(job, "unavailable", basis=job.data.reason)
        return self._unfinished(job, folder, progress)

    def _unfinished(self, job: Job, folder: Path, progress: Progress) -> Estimate:
        state: State = "missing"
        done = 0
        if (folder / RUN_FILE).is_file():
            run = Run.open(folder)
            state, done = ("to score" if run.status == "finished" else "resumable"), run.manifest.steps
        try:
            rate = self._rate(job, progress)
        except EdgeformerError as error:
            return Estimate(job, "unavailable", basis=str(error))
        total = rate.steps_of(job)
        left = 0 if state == "to score" else max(0, total - done)
        seconds = rate.seconds * left / max(1, rate.steps) + (rate.overhead_s if left else 0) + rate.scoring_s
        return Estimate(job, state, seconds, left, rate.basis)

    def _rate(self, job: Job, progress: Progress) -> _Rate:
        kind = alike(job.written)
        known = [run for run in self._known if run.alike == kind and run.steps and run.overhead_s is not None]
        if known:
            # Another run at the same time, or a stopped process, only ever makes a training take longer.
            run = min(known, key=lambda run: run.seconds / run.steps)
            graphs = run.scoring_s or (self._graphs_s(job, 0) if job.spec.export else 0.0)
            per_text = run.planned_steps / run.recipe["training"]["epochs"] / max(1, run.data.rows["train"])
            basis = f"by {run.run}, trained on this machine"
            return _Rate(run.seconds, run.steps, per_text, run.overhead_s or 0.0, graphs, basis)
        if kind not in self._probed:
            self._probed[kind] = self._probe(job, progress)
        return self._probed[kind]

    def _probe(self, job: Job, progress: Progress) -> _Rate:
        with bar(progress, f"Timing some steps of {job.row}", None, ""):
            found = timed(job.recipe, self._artifacts / ".cache" / "tokens", environment(self._jobs))
        seconds, epochs = found.training_s + found.scoring_s, job.written.training.epochs
        graphs = self._graphs_s(job, found.scoring_s / max(1, epochs))
        per_text = found.steps / epochs / max(1, _texts(job))
        basis = f"by {found.timed_steps} timed steps"
        return _Rate(seconds, found.steps, per_text, _STARTS * found.starting_s, graphs, basis)

    def _graphs_s(self, job: Job, scoring_s: float) -> float:
        """Exporting and scoring: each graph is traced, and scored on the validation set and on the test sets."""
        graphs = len({"fp32", *job.spec.export}) if job.spec.export or job.spec.exits else 0
        return graphs * (_EXPORT_S + scoring_s) + (2 * scoring_s if job.spec.sweep else 0.0)
