"""One job of a study that is being worked at, and what it may have to wait for."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.formats.study_result import StudyRun
from edgeformer.formats.workspace import BUNDLE_FOLDER
from edgeformer.machine.lock import LockedError, claiming
from edgeformer.studies.jobs import Job
from edgeformer.studies.needs import Step


@dataclass
class Lane:
    """One job that is being worked at.

    Attributes:
        held: the job's lock.
        before: its results as they were.
        pending: a step that waits until it may begin.
        tried: arguments of the steps so far.
        problems: what became of those that failed.
        kept: the results that were written; None: its training has not ended yet.
        seen: the optimizer step up to which the progress bar knows of it.
    """

    job: Job
    held: contextlib.ExitStack
    recipe: Path
    log: Path
    before: StudyRun | None = None
    process: subprocess.Popen[bytes] | None = None
    step: Step | None = None
    pending: Step | None = None
    tried: set[tuple[str, ...]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    kept: StudyRun | None = None
    step_began: float = 0.0
    scoring_s: float = 0.0
    training_s: float | None = None
    seen: int = 0
    waiting: bool = False

    @property
    def lives(self) -> bool:
        """Whether its process has not ended yet."""
        return self.process is not None and self.process.poll() is None


class Failure(Exception):
    """A job cannot be finished; the others go on."""


def exporter(folder: Path) -> str | None:
    """Which process writes the bundle of a run's folder now; None: nobody does. Raises ArtifactError."""
    try:
        with claiming(folder / BUNDLE_FOLDER):
            return None
    except LockedError as error:
        return str(error)


def nothing_came(step: Step, lane: Lane) -> str:
    """What is said of a step that ended well and left no trace."""
    return f"`edgeformer {' '.join(step.arguments)}` ended, and nothing came of it; see {lane.log}"
