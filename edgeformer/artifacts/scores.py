"""Scores of a model on one set: base classes of every task's score, and the rows of evaluation.json.

Each task defines its score in ``tasks/<task>.py``. A figure of its :class:`ScoreColumn` also needs a field in
:class:`EvaluationRow`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from edgeformer.artifacts.base import Frozen, Recognised
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.workspace import read_manifest

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
    loss: float = Field(description="mean cross-entropy, nats; embeddings: 1 − similarity")

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
    exit: int | None = Field(None, description="the loop that answered; None: the last")
    n: int = Field(description="rows, or predicted tokens")
    loss: float = Field(description="mean cross-entropy per row or token, nats; embeddings: 1 − similarity")
    accuracy: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    macro_f1: float | None = Field(None, description="several labels per text: mean of the labels' own F1")
    perplexity: float | None = None
    word_perplexity: float | None = None
    similarity: float | None = Field(None, description="embeddings: rank correlation of cosines with scores of pairs")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")
    ms_per_sample: float | None = Field(None, description="batched time in the model per row (paper A, Table 6)")
    batch: int | None = None
    provider: str | None = Field(None, description="what computed, where it is known")
    host: str | None = Field(None, description="the processor that the time was taken on")


class EarlyExitRow(Frozen):
    """What comes of letting rows or tokens of a set leave an artifact at the first exit that is sure enough of them."""

    artifact: str = Field(description="artifact id, or `torch` for the run's own weights")
    provider: str | None = Field(None, description="what computed, where it is known")
    split: str
    n: int = Field(description="rows, or predicted tokens")
    rule: Literal["confidence", "cosine"] = Field(
        "confidence", description="top probability, or cosine of hidden states before and after a loop"
    )
    threshold: float | None = Field(description="smallest at any exit; None: the paper's falling schedule")
    thresholds: dict[str, float] = Field(description="the same for each exit: loop → threshold")
    mean_loops: float = Field(description="loops that each takes on average; no time was measured")
    loss: float = Field(description="mean cross-entropy per row or token, nats")
    accuracy: float | None = None
    perplexity: float | None = None
    share: dict[str, float] = Field(description="loop → share of those that leave there; sums to 1")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")


class Evaluation(Frozen):
    """All that is known of a run's scores."""

    rows: tuple[EvaluationRow, ...] = ()
    early_exit: tuple[EarlyExitRow, ...] = ()


def read_evaluation(run: Path) -> Evaluation:
    """What is known of a run's scores; nothing where it was never scored. Raises ArtifactError for a damaged file."""
    path = run / EVALUATION_FILE
    return read_manifest(Evaluation, path) if path.is_file() else Evaluation()


def merge_rows(run: Path, rows: Sequence[EvaluationRow], early_exit: Sequence[EarlyExitRow] = ()) -> None:
    """Add scores to the run's evaluation.json; all rows of the same artifact and set replace the old ones."""
    try:
        stored = read_evaluation(run)
    except ArtifactError:
        stored = Evaluation()  # a file that cannot be read holds nothing worth keeping
    fresh = {(row.artifact, row.split) for row in rows}
    kept = [row for row in stored.rows if (row.artifact, row.split) not in fresh]
    kept_rows = [row for row in stored.early_exit if (row.artifact, row.split) not in fresh]
    write_json(run / EVALUATION_FILE, Evaluation(rows=(*kept, *rows), early_exit=(*kept_rows, *early_exit)))
