"""Results of finished runs: kept as JSON files, looked up by key, collected from a run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.studies.jobs import Job, decisive, speed_sha256
from benchmarks.studies.results import TRAINING_REVISION, ExportedSize, StudyRun, StudyTimes
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle
from edgeformer.models import model_spec_of
from edgeformer.run import Run, find_bundle

COMMITTED = Path(__file__).resolve().parents[1] / "results" / "studies"
TRAINED = "trained here"
"""Origin of results that were made in this folder of artifacts."""
_CURVE = 200
"""Records of a curve that are kept."""


@dataclass(frozen=True)
class Match:
    """A run's results, and where they are from."""

    run: StudyRun
    origin: str


class Results:
    """Results of finished runs.

    Args:
        artifacts: the folder that holds the runs; new results are written to its ``studies/runs``.
        folders: further folders with results.
        committed: also use benchmarks/results/studies.
    """

    def __init__(self, artifacts: Path, folders: Sequence[Path], *, committed: bool = True) -> None:
        self.folder = artifacts / "studies" / "runs"
        self._origins = {self.folder: TRAINED}
        for folder in (*folders, *((COMMITTED,) if committed else ())):
            self._origins.setdefault(folder, f"results in {folder.name}")
        self._ambiguous: dict[str, str] = {}  # sha256 of a recipe → why none of its results is used

    def find(self, job: Job) -> Match | None:
        """Return the results of the same recipe, data and revision; of several files the one with most scores.

        Where the job's data cannot be read, results of any data count, unless :meth:`check_ambiguity` refused them.

        Raises:
            ArtifactError: a damaged file of that key.
        """
        if job.key is None:
            matches = [] if job.sha256 in self._ambiguous else self._of_any_data(job)
        else:
            paths = [(folder / f"{job.key}.json", origin) for folder, origin in self._origins.items()]
            matches = [Match(read_manifest(StudyRun, path), origin) for path, origin in paths if path.is_file()]

        def richness(match: Match) -> tuple[int, int, int]:
            artifacts, scores = match.run.artifacts, match.run.evaluation
            built = sum(artifact.status == "built" for artifact in artifacts)
            return built, len(artifacts), len(scores.rows) + len(scores.early_exit)

        return max(matches, key=richness, default=None)

    def _of_any_data(self, job: Job) -> list[Match]:
        fingerprint = job.data.summary.fingerprint if job.data.summary is not None else None
        return [
            Match(run, origin)
            for folder, origin in self._origins.items()
            for run in runs_in(folder)
            if (run.recipe_sha256, run.revision) == (job.sha256, TRAINING_REVISION)
            and fingerprint in (None, run.data.fingerprint)
        ]

    def check_ambiguity(self, jobs: Sequence[Job]) -> None:
        """Use no results of jobs whose data cannot be read where there are results of different data.

        Jobs that read the same data are checked together: no table mixes rows of a small sample and of all rows.
        """
        groups: dict[str, list[tuple[Job, Match]]] = {}
        for job in jobs:
            if job.key is None:
                reads = json.dumps(decisive(job.written)["data"], sort_keys=True)
                groups.setdefault(reads, []).extend((job, match) for match in self._of_any_data(job))
        for group in groups.values():
            by_data = {match.run.data.fingerprint: (match.run.data, match.origin) for _, match in group}
            for job, _ in group if len(by_data) > 1 else ():
                self._ambiguous[job.sha256] = _ambiguity([*by_data.values()])

    def ambiguity(self, job: Job) -> str:
        """Return why none of the job's results is used; empty: there is nothing to choose from."""
        return self._ambiguous.get(job.sha256, "") if job.key is None else ""

    def keep(self, run: StudyRun) -> Match:
        """Write results."""
        write_json(self.folder / f"{run.key}.json", run)
        runs_in.cache_clear()
        return Match(run, TRAINED)

    def data_of(self, job: Job) -> tuple[DataSummary, str] | None:
        """Return what a recipe's data is, and who counted it; None: not counted, or results disagree."""
        if job.data.summary is not None:
            return job.data.summary.model_copy(update={"findings": ()}), "counted here"
        summaries = {}
        for folder, origin in reversed(self._origins.items()):
            for path in sorted(folder.glob(f"data-{job.sha256}-*.json")):
                summary = read_manifest(DataSummary, path)
                summaries[summary.fingerprint] = (summary, origin)
        if len(summaries) > 1:
            self._ambiguous[job.sha256] = _ambiguity([*summaries.values()])
        return next(iter(summaries.values())) if len(summaries) == 1 else None

    def keep_data(self, job: Job) -> None:
        """Write what a recipe's data is; nothing where it cannot be read."""
        if job.data.summary is not None:
            path = self.folder / f"data-{job.sha256}-{job.data.summary.fingerprint[:16]}.json"
            write_json(path, job.data.summary.model_copy(update={"findings": ()}))

    def times(self, key: str) -> StudyTimes | None:
        """Return times by their key. Raises ArtifactError for a damaged file."""
        paths = [folder / f"times-{key}.json" for folder in self._origins]
        return next((read_manifest(StudyTimes, path) for path in paths if path.is_file()), None)

    def keep_times(self, times: StudyTimes) -> None:
        """Write times."""
        write_json(self.folder / f"times-{times.key}.json", times)


@cache
def runs_in(folder: Path) -> tuple[StudyRun, ...]:
    """Return the results of single runs in a folder."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        if not path.name.startswith(("times-", "data-")):
            try:
                runs.append(read_manifest(StudyRun, path))
            except ArtifactError:  # a table, or another version; :meth:`Results.find` reports a damaged file by its key
                continue
    return tuple(runs)


def _ambiguity(summaries: Sequence[tuple[DataSummary, str]]) -> str:
    texts = (f"{data.fingerprint[:8]} with {sum(data.rows.values()):,} rows ({origin})" for data, origin in summaries)
    return f"there are results of different data: {', '.join(texts)}; choose with --data, or move the others"


def collect(job: Job, folder: Path, previous: StudyRun | None, scoring_s: float, process_s: float | None) -> StudyRun:
    """Return the results of a finished run.

    Args:
        folder: of the run.
        previous: its results so far, whose times are kept where only scores were added.
        scoring_s: seconds that exporting and scoring took now.
        process_s: of the process that trained it; None: it was resumed, or trained earlier.

    Raises:
        ArtifactError: unfinished, damaged, or trained on other data.
    """
    run = Run.open(folder)
    run.require_finished()
    manifest = run.manifest
    if job.data.summary is not None and manifest.data.fingerprint != job.data.summary.fingerprint:
        raise ArtifactError(f"{folder}: was trained on other data than its name says; remove it to train it again")
    if manifest.tokenizer_fingerprint not in (None, job.origins.get("tokenizer", manifest.tokenizer_fingerprint)):
        raise ArtifactError(f"{folder}: was trained with another tokenizer; remove it to train it again")
    overhead_s = None if process_s is None else round(max(0.0, process_s - manifest.seconds), 1)
    if previous is not None and previous.started == manifest.started:
        overhead_s = previous.overhead_s if overhead_s is None else overhead_s
        scoring_s += previous.scoring_s
    bundle = find_bundle(folder)
    same = ("id", "precision", "role", "exit", "status", "reason", "size_bytes")
    copied = ("task", "tokenizer_fingerprint", "parameters", "steps", "epochs", "best_epoch", "seconds", "precision",
              "leaks", "versions", "code_version", "host", "started", "finished")  # fmt: skip
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError):  # an imported run has none
        records = []
    steps = [number for number, record in enumerate(records) if record.get("kind") == "step"]
    every = max(1, math.ceil(len(steps) / _CURVE))
    dropped = {*steps} - {*steps[every - 1 :: every]}
    return StudyRun(
        key=job.key or "",
        recipe_sha256=job.sha256,
        revision=TRAINING_REVISION,
        alike=speed_sha256(job.written),
        recipe=decisive(job.written),
        run=folder.name,
        data=manifest.data.model_copy(update={"findings": ()}),
        data_notes=job.notes,
        origins=job.origins,
        loops=model_spec_of(run.recipe).loops(run.recipe.model),
        planned_steps=round(manifest.steps / max(1, manifest.epochs) * run.recipe.training.epochs),
        rows_per_s=manifest.samples_per_second,
        scoring_s=round(scoring_s, 1),
        overhead_s=overhead_s,
        evaluation=read_evaluation(folder),
        artifacts=tuple(
            ExportedSize(
                **{name: getattr(artifact, name) for name in same},
                max_abs_error=getattr(artifact.parity, "max_abs_error", None),
            )
            for artifact in (Bundle.open(bundle).manifest.artifacts if bundle is not None else ())
        ),
        curve=tuple(record for number, record in enumerate(records) if number not in dropped),
        **{name: getattr(manifest, name) for name in copied},
    )
