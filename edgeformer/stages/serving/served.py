"""What is served: an artifact of a bundle that answers whole texts. Never torch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.tasks.answering import Answering
from edgeformer.tasks.calls import Run
from edgeformer.tasks.validation import in_pieces, most_rows


@dataclass(frozen=True)
class Served:
    """An opened artifact.

    Attributes:
        name: of the run.
        artifact: its id.
        labels: the labels; empty: it has none.
        answering: how it answers.
        run: its session's, for any number of rows.
    """

    name: str
    artifact: str
    labels: tuple[str, ...]
    answering: Answering
    run: Run


@contextmanager
def served(bundle: Bundle, wanted: str | None) -> Generator[Served]:
    """Open an artifact.

    Args:
        bundle: of a classifier or an embedding model.
        wanted: an artifact's id; None: the first that runs here.

    Raises:
        InputError: a model without labels or vectors, an unknown artifact, or one that takes a text token by token.
        ArtifactError: none can run here, or a file is damaged.
    """
    task = bundle.task
    if task.predicts is None or not task.reads_text:
        why = "which has no labels" if task.reads_text else "which reads no text"
        raise InputError(
            f"{bundle.name}: is a {task.noun}, {why}, so there is nothing to serve; use edgeformer {task.use}"
        )
    entry = _entry(bundle, wanted)
    answering = Answering(task, bundle.reader(entry), bundle.data)
    labels = tuple(map(str, bundle.manifest.labels or ()))
    with bundle.session(entry) as session:
        run = in_pieces(session.run, most_rows(entry))
        example = answering.read(["a text"])  # the first call pays for every allocation, before anybody waits
        answering.run(run, example)
        yield Served(bundle.name, entry.id, labels, answering, run)


def _entry(bundle: Bundle, wanted: str | None) -> ArtifactManifest:
    whole = bundle.built("full", "exit", "step")
    if wanted is not None:
        entry = bundle.artifact(wanted)
        if entry not in whole:
            raise InputError(f"--artifact {wanted}: {entry.role}, {entry.status}; it does not answer whole texts")
        return entry
    reasons = [f"{entry.id}: {reason}" for entry in whole if (reason := bundle.cannot_run(entry)) is not None]
    found = next((entry for entry in whole if bundle.cannot_run(entry) is None), None)
    if found is None:
        raise ArtifactError(f"{bundle.folder}: no artifact can run here ({'; '.join(reasons) or 'none was built'})")
    return found
