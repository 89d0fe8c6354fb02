"""How good a model is on one set: what the scores of every task have in common, and evaluation.json, which lists them.

The scores themselves are each task's own (``tasks/<task>/``); a manifest holds whichever its task gave it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny

from edgeformer.formats.base import Frozen, Recognised
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import write_json
from edgeformer.formats.workspace import read_manifest

EVALUATION_FILE = "evaluation.json"


class ExitScore(Frozen):
    """What one exit of a language model predicts."""

    loss: float = Field(description="nats per predicted token: the sum over all of them divided by their number")
    perplexity: float = Field(description="exp(loss)")


class EarlyExitScore(ExitScore):
    """Every token answered at the first exit whose confidence reaches the threshold (paper B, eq. 6)."""

    mean_loops: float = Field(description="loops that a token takes on average")
    share: dict[str, float] = Field(description="loop → share of the tokens that leave there; sums to 1")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a token leave")


class Score(Recognised):
    """What every task's scores have. A task's own type is known by its fields once the task was imported."""

    n: int = Field(description="what the loss is a mean over: rows, or predicted tokens")
    loss: float = Field(description="mean cross-entropy, nats")

    called: ClassVar[str] = "scores"

    @property
    def by_exit(self) -> dict[int, ExitScore]:
        """Loop → score of the exit after it, in rising order; empty where the task scores one answer only."""
        return {}

    @property
    def leaving_early(self) -> EarlyExitScore | None:
        """The score with early exit; None where that was not scored."""
        return None


AnyScore = Annotated[SerializeAsAny[Score], BeforeValidator(Score.recognise)]
"""A score of any task, in a manifest."""


class EvaluationRow(Frozen):
    """Scores of one artifact on one set, and what they cost in time. Which scores there are depends on the task."""

    artifact: str = Field(description="artifact id, or `torch` for the run's own weights")
    split: str
    exit: int | None = Field(None, description="language models: the loop whose head answered; None: the last")
    n: int = Field(description="rows, or predicted tokens")
    loss: float = Field(description="mean cross-entropy per row or token, nats")
    accuracy: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    perplexity: float | None = None
    word_perplexity: float | None = None
    leaks: bool = Field(False, description="the model sees what it is asked to predict: the scores are void")
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


def read_evaluation(run: Path) -> Evaluation:
    """What is known of a run's scores; nothing where it was never scored. Raises ArtifactError for a damaged file."""
    path = run / EVALUATION_FILE
    return read_manifest(Evaluation, path) if path.is_file() else Evaluation()


def merge_rows(run: Path, rows: list[EvaluationRow]) -> None:
    """Add ``rows`` to the run's evaluation.json; a row for the same artifact, set and exit replaces the old one."""
    try:
        known = read_evaluation(run).rows
    except ArtifactError:
        known = ()  # a file that cannot be read holds nothing worth keeping
    fresh = {(row.artifact, row.split, row.exit) for row in rows}
    kept = [row for row in known if (row.artifact, row.split, row.exit) not in fresh]
    write_json(run / EVALUATION_FILE, Evaluation(rows=(*kept, *rows)))
