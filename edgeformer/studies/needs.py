"""What a job still lacks: training, exported graphs, scores of them; each is a command of a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeformer.families import family_of
from edgeformer.formats.manifest import RunStatus
from edgeformer.formats.study_result import StudyRun
from edgeformer.formats.workspace import RECIPE_FILE, RUN_FILE
from edgeformer.run import TORCH, Run
from edgeformer.studies.jobs import Job
from edgeformer.tasks import task_named

SWEPT = 0.85
"""The first threshold of the released code's sweep, beside those that are always tried."""


@dataclass(frozen=True)
class Step:
    """One command."""

    kind: Literal["train", "resume", "export", "score"]
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """What is started."""
        return [sys.executable, "-m", "edgeformer", *self.arguments]


def status_of(folder: Path) -> RunStatus | None:
    """How far the run in a folder is; None: there is none. Raises ArtifactError where it is damaged."""
    return Run.open(folder).status if (folder / RUN_FILE).is_file() else None


def steps_of(folder: Path) -> int:
    """Optimizer steps that the run in a folder has behind it. Raises ArtifactError where it is damaged."""
    return Run.open(folder).manifest.steps if (folder / RUN_FILE).is_file() else 0


def training_step(job: Job, folder: Path, recipe: Path) -> Step:
    """Train the job's run, or go on with it.

    Args:
        folder: of the run.
        recipe: where the job's recipe was written.
    """
    there = (folder / RUN_FILE).is_file()
    named = ("--name", folder.name, "--artifacts", str(folder.parent))
    if there:
        return Step("resume", ("train", str(folder / RECIPE_FILE), "--resume", *named))
    return Step("train", ("train", str(recipe), *named))


def lacking(
    job: Job, run: StudyRun, folder: Path, splits: Sequence[str], tried: Container[tuple[str, ...]] = ()
) -> Step | None:
    """What a finished run must still be put through for the study; None: nothing.

    Args:
        run: what is known of it.
        folder: where it lies, or would.
        splits: on which its graphs are scored.
        tried: arguments of steps that are not asked for again.
    """
    steps = (*_export(job, run, folder), *_scores(job, run, folder, splits))
    return next((step for step in steps if step.arguments not in tried), None)


def asked_exits(job: Job) -> set[int]:
    """Exits of which the study wants graphs, after so many loops; the whole model is none of them."""
    family, config = family_of(job.written), job.written.model
    exits = family.trained_exits(config) or range(1, family.loops(config) + 1)
    return set(exits[:-1]) if job.spec.exits else set()


def _export(job: Job, run: StudyRun, folder: Path) -> Iterator[Step]:
    spec = job.spec
    if not (spec.export or spec.exits):
        return
    have = {artifact.precision for artifact in run.artifacts if artifact.role == "full"}
    exits = {artifact.exit for artifact in run.artifacts if artifact.role == "exit"}
    asked, wanted = asked_exits(job), {"fp32", *spec.export}
    if wanted <= have and asked <= exits:
        return
    options = [f"--{precision}" for precision in sorted(wanted - {"fp32"})]
    options += ["--exit", ",".join(map(str, sorted(asked)))] if asked else []
    options += ["--keep-going", *(["--allow-leak"] if run.leaks else [])]
    yield Step("export", ("export", str(folder), *options, "--artifacts", str(folder.parent)))


def _scores(job: Job, run: StudyRun, folder: Path, splits: Sequence[str]) -> Iterator[Step]:
    task = task_named(run.task)
    built = [artifact.id for artifact in run.artifacts if artifact.role == "full" and artifact.status == "built"]
    scored = {(row.artifact, row.split) for row in run.evaluation.rows}
    swept = {row.split for row in run.evaluation.early_exit if row.artifact == TORCH and row.threshold == SWEPT}
    sets = {row.split for row in run.evaluation.rows if row.artifact == TORCH}
    for split in splits:
        name = split if split in sets else task.set_name(job.written.data, split) if split == "test" else None
        if name is None:  # another row's test set
            continue
        where = ("--split", split, "--artifacts", str(folder.parent))
        for artifact in built if job.spec.export else []:
            if (artifact, name) not in scored:
                yield Step("score", ("evaluate", str(folder), "--artifact", artifact, *where))
        if job.spec.sweep and name not in swept:
            threshold = ("--threshold", str(SWEPT))
            yield Step("score", ("evaluate", str(folder), "--artifact", TORCH, *threshold, *where))
