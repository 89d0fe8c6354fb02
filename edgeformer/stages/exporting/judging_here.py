"""What a builder made, compared and scored like any other artifact, where this machine can run it."""

from __future__ import annotations

from edgeformer.backends import ArtifactFiles, OpenOptions, cannot_run, opener_of
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.target_record import lacks_parity
from edgeformer.stages.exporting.judging import Judge
from edgeformer.tasks.validation import most_rows


def judged_here(entry: ArtifactManifest, judge: Judge, max_positions: int) -> ArtifactManifest:
    """The entry with parity and scores, rejected where it misses a bar; as it is where it cannot run on this machine.

    Args:
        entry: of a builder. One that the builder compared already is left as it is.
        judge: of its variant.
        max_positions: tokens that the model can take.
    """
    if not lacks_parity(entry) or cannot_run(entry) is not None:
        return entry
    parts = {part: judge.bundle / file for part, file in entry.parts.items()}
    loops = len(judge.subject.states) if entry.role == "step" else None
    files = ArtifactFiles(entry, judge.bundle / str(entry.file), parts, loops, max_positions)
    exit_ = judge.subject.last if entry.exit is None else entry.exit
    try:
        with opener_of(entry).open(files, OpenOptions()) as session:
            found = judge.of_session(exit_, session, most_rows(entry), whole=entry.role in ("full", "exit"))
    except EdgeformerError as error:
        return entry.model_copy(update={"status": "rejected", "reason": str(error)})
    return entry.model_copy(update={**found, "status": "rejected" if found["reason"] else "built"})
