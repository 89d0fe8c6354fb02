"""Results of finished runs: kept as JSON, found by key, collected from a run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.bundle import Bundle
from edgeformer.families import family_of
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import write_json
from edgeformer.formats.manifest import DataSummary, RunManifest
from edgeformer.formats.scores import read_evaluation
from edgeformer.formats.study_result import (
    RESULTS_FOLDER,
    TRAINING_REVISION,
    ExportedSize,
    StudyRun,
    StudyTimes,
)
from edgeformer.formats.workspace import read_manifest
from edgeformer.run import Run, bundle_in
from edgeformer.studies.jobs import Job, alike, decisive

COMMITTED = Path("benchmarks", "results", "studies")
"""In a checkout: results that came with it."""
_SOURCE = Path(__file__).resolve().parents[2]
"""The checkout, if the package is used from one."""
HERE = "trained here"
"""Where results are from that were made in this folder of artifacts."""
_TIMES, _DATA = "times-", "data-"
_CURVE = 200
"""Records of a curve that are kept."""


def checkout_results() -> Path | None:
    """Return the committed results of the checkout that the package is used from, else of that in the current folder.

    An installed package lies outside of the checkout, so that only the current folder can say where one is: a folder
    with the results and with the recipes of the studies. None where there is neither.
    """
    places = (_SOURCE, Path.cwd())
    return next(
        (
            place / COMMITTED
            for place in places
            if (place / COMMITTED).is_dir() and (place / "recipes" / "studies").is_dir()
        ),
        None,
    )


@dataclass(frozen=True)
class Found:
    """A run's results, and where they lie."""

    run: StudyRun
    origin: str


class Results:
    """The results of finished runs.

    Args:
        artifacts: the folder that holds the runs; new results are written below it.
        folders: where else results are looked for, in this order.
        committed: also take those that came with a checkout; see :func:`checkout_results`.
    """

    def __init__(self, artifacts: Path, folders: Sequence[Path], *, committed: bool = True) -> None:
        self.folder = artifacts / RESULTS_FOLDER
        self._places = [(self.folder, HERE)]
        shipped = checkout_results() if committed else None
        others = [*folders, *([shipped] if shipped is not None else [])]
        self._places += [(folder, f"results in {folder.name}") for folder in others]
        self._doubts: dict[str, str] = {}  # sha256 of a recipe → why its results are not taken

    def of(self, job: Job) -> Found | None:
        """The results of a job: of the same recipe, data and revision; the richest, of equal ones the first.

        Where its data is not at hand they are of any data, if all that there are agree; see :meth:`settle`.

        Raises:
            ArtifactError: a damaged file of that key.
        """
        if job.key is None:
            found = [] if job.sha256 in self._doubts else self._of_any_data(job)
        else:
            paths = [(folder / f"{job.key}.json", origin) for folder, origin in self._places]
            found = [Found(read_manifest(StudyRun, path), origin) for path, origin in paths if path.is_file()]
        return max(found, key=_richness, default=None)

    def _of_any_data(self, job: Job) -> list[Found]:
        known = job.data.summary.fingerprint if job.data.summary is not None else None
        return [
            Found(run, origin)
            for folder, origin in self._places
            for run in self._all(folder)
            if run.recipe_sha256 == job.sha256 and run.revision == TRAINING_REVISION
            and known in (None, run.data.fingerprint)
        ]  # fmt: skip

    def settle(self, jobs: Sequence[Job]) -> None:
        """Doubt the results of jobs whose data is not at hand, and of which there are results of different data.

        Jobs that read the same data are looked at together, so that no table has some rows of a small sample and
        others of all rows. Nothing is taken then: nobody said which is meant.
        """
        groups: dict[str, list[tuple[Job, Found]]] = {}
        for job in jobs:
            if job.key is None:
                reads = json.dumps(decisive(job.written)["data"], sort_keys=True)
                groups.setdefault(reads, []).extend((job, found) for found in self._of_any_data(job))
        for group in groups.values():
            told = {found.run.data.fingerprint: found for _, found in group}
            if len(told) > 1:
                self._doubts |= {
                    job.sha256: _choice([(f.run.data, f.origin) for f in told.values()]) for job, _ in group
                }
            for sha256 in {job.sha256 for job, _ in group} - {*self._doubts}:
                if len({json.dumps(found.run.origins) for job, found in group if job.sha256 == sha256}) > 1:
                    self._doubts[sha256] = "there are results of different tokenizers, starting weights or teachers"

    def doubt(self, job: Job) -> str:
        """Why none of the results that there are is taken; empty: there is nothing to choose from."""
        return self._doubts.get(job.sha256, "") if job.key is None else ""

    def known(self) -> list[StudyRun]:
        """All results that were trained here, for the time that others will take."""
        return self._all(self.folder)

    def _all(self, folder: Path) -> list[StudyRun]:
        found = []
        for path in sorted(folder.glob("*.json")):
            if path.name.startswith((_TIMES, _DATA)):
                continue
            try:
                found.append(read_manifest(StudyRun, path))
            except ArtifactError:  # of another version; whoever asks for it by its key is told
                continue
        return found

    def keep(self, run: StudyRun) -> Found:
        """Write results down."""
        write_json(self.folder / f"{run.key}.json", run)
        return Found(run, HERE)

    def data_of(self, job: Job) -> tuple[DataSummary, str] | None:
        """What a recipe's data is, and who counted it: this machine, or results. Raises ArtifactError.

        None: nobody did, or results disagree, which :meth:`doubt` says from then on.
        """
        if job.data.summary is not None:
            return _without_texts(job.data.summary), "counted here"
        found = {}
        for folder, origin in reversed(self._places):
            for path in sorted(folder.glob(f"{_DATA}{job.sha256}-*.json")):
                summary = read_manifest(DataSummary, path)
                found[summary.fingerprint] = (summary, origin)
        if len(found) > 1:
            self._doubts[job.sha256] = _choice([*found.values()])
        return next(iter(found.values())) if len(found) == 1 else None

    def keep_data(self, job: Job) -> None:
        """Write down what a recipe's data turned out to be here; nothing where it cannot be read."""
        summary = job.data.summary
        if summary is not None:
            name = f"{_DATA}{job.sha256}-{summary.fingerprint[:16]}.json"
            write_json(self.folder / name, _without_texts(summary))

    def times(self, key: str) -> StudyTimes | None:
        """Times by their key. Raises ArtifactError for a damaged file."""
        for folder, _ in self._places:
            path = folder / f"{_TIMES}{key}.json"
            if path.is_file():
                return read_manifest(StudyTimes, path)
        return None

    def keep_times(self, times: StudyTimes) -> None:
        """Write times down."""
        write_json(self.folder / f"{_TIMES}{times.key}.json", times)


def _richness(found: Found) -> tuple[int, int, int]:
    """Of two files of one key the one with more graphs and scores knows more."""
    run = found.run
    built = sum(artifact.status == "built" for artifact in run.artifacts)
    return built, len(run.artifacts), len(run.evaluation.rows) + len(run.evaluation.early_exit)


def _choice(known: Sequence[tuple[DataSummary, str]]) -> str:
    told = (f"{data.fingerprint[:8]} with {sum(data.rows.values()):,} rows ({origin})" for data, origin in known)
    return f"there are results of different data: {', '.join(told)}; say which is meant with --data, or move the others"


def collect(job: Job, folder: Path, scoring_s: float = 0.0, training_s: float | None = None) -> StudyRun:
    """The results of a finished run.

    Args:
        scoring_s: seconds of exporting and scoring it.
        training_s: of the process that trained it, from the beginning to the end; None: it was resumed, or is older.

    Raises:
        ArtifactError: unfinished or damaged.
    """
    run = Run.open(folder)
    run.require_finished()
    manifest = run.manifest
    if job.data.summary is not None and manifest.data.fingerprint != job.data.summary.fingerprint:
        raise ArtifactError(f"{folder}: was trained on other data than its name says; remove it, and it is made again")
    if manifest.tokenizer_fingerprint not in (None, job.origins.get("tokenizer", manifest.tokenizer_fingerprint)):
        raise ArtifactError(f"{folder}: was trained with another tokenizer; remove it, and it is made again")
    steps = round(manifest.steps / max(1, manifest.epochs) * run.recipe.training.epochs)
    return StudyRun(
        key=job.key or "",
        recipe_sha256=job.sha256,
        revision=TRAINING_REVISION,
        alike=alike(job.written),
        recipe=decisive(job.written),
        run=folder.name,
        data=_without_texts(manifest.data),
        data_notes=job.notes,
        origins=job.origins,
        loops=family_of(run.recipe).loops(run.recipe.model),
        planned_steps=steps,
        rows_per_s=manifest.samples_per_second,
        scoring_s=round(scoring_s, 1),
        overhead_s=None if training_s is None else round(max(0.0, training_s - manifest.seconds), 1),
        evaluation=read_evaluation(folder),
        artifacts=_artifacts(folder),
        curve=_curve(folder / "metrics.jsonl"),
        **_told_by(manifest),
    )


def _told_by(manifest: RunManifest) -> dict[str, Any]:
    same = ("task", "tokenizer_fingerprint", "parameters", "steps", "epochs", "best_epoch", "seconds", "precision",
            "leaks", "versions", "code_version", "host", "started", "finished")  # fmt: skip
    return {name: getattr(manifest, name) for name in same}


def _without_texts(data: DataSummary) -> DataSummary:
    return data.model_copy(update={"findings": ()})


def _artifacts(folder: Path) -> tuple[ExportedSize, ...]:
    bundle = bundle_in(folder)
    if bundle is None:
        return ()
    same = ("id", "precision", "role", "exit", "status", "reason", "size_bytes")
    return tuple(
        ExportedSize(
            **{name: getattr(artifact, name) for name in same},
            max_abs_error=getattr(artifact.parity, "max_abs_error", None),
        )
        for artifact in Bundle.open(bundle).manifest.artifacts
    )


def _curve(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):  # an imported run has none; nothing but curves is drawn of it
        return ()
    steps = [line for line in lines if line.get("kind") == "step"]
    every = max(1, math.ceil(len(steps) / _CURVE))
    kept = {id(line) for line in steps[every - 1 :: every]}
    return tuple(line for line in lines if line.get("kind") != "step" or id(line) in kept)
