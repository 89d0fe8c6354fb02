"""evaluation.json: scores of a run's model and artifacts, one row per artifact and labelled set."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from edgeformer.schema.base import Frozen
from edgeformer.schema.errors import ArtifactError
from edgeformer.schema.files import write_json
from edgeformer.schema.manifest import ClassificationScore
from edgeformer.schema.workspace import read_manifest

EVALUATION_FILE = "evaluation.json"


class EvaluationRow(ClassificationScore):
    """Scores of one artifact on one set, and what they cost in time."""

    artifact: str = Field(description="artifact id, or `torch` for the run's own weights")
    split: str
    perplexity: float | None = None
    ms_per_sample: float | None = Field(
        None,
        description="time in the model over the whole set, batched, divided by its rows (paper A, Table 6)",
    )
    batch: int | None = None
    provider: str | None = Field(None, description="what computed, when a time is given")
    host: str | None = Field(None, description="the processor that the time was taken on")


class Evaluation(Frozen):
    """All rows that are known of a run."""

    rows: tuple[EvaluationRow, ...] = Field((), strict=False)


def row_of(artifact: str, split: str, score: ClassificationScore) -> EvaluationRow:
    """A row without a time."""
    return EvaluationRow(artifact=artifact, split=split, **score.model_dump())


def merge_rows(run: Path, rows: list[EvaluationRow]) -> None:
    """Add ``rows`` to the run's evaluation.json; a row for the same artifact and set replaces the old one."""
    path = run / EVALUATION_FILE
    try:
        known = read_manifest(Evaluation, path).rows if path.is_file() else ()
    except ArtifactError:
        known = ()  # a file that cannot be read holds nothing worth keeping
    fresh = {(row.artifact, row.split) for row in rows}
    kept = [row for row in known if (row.artifact, row.split) not in fresh]
    write_json(path, Evaluation(rows=(*kept, *rows)))
