"""Scores of a model on one set: base classes of the tasks' scores, and the rows of evaluation.json.

Each task defines its score in ``tasks/<task>.py``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny

from edgeformer.artifacts.base import Frozen, Recognised
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.workspace import read_manifest

EVALUATION_FILE = "evaluation.json"


class ExitScore(Frozen):
    """Score of one exit of a language model."""

    loss: float = Field(description="mean cross-entropy per predicted token, nats")
    perplexity: float = Field(description="exp(loss)")


class EarlyExitScore(ExitScore):
    """Score with early exit: a token leaves at the first exit whose confidence reaches its limit (paper B, eq. 6)."""

    mean_loops: float = Field(description="mean loops per token")
    share: dict[str, float] = Field(description="loop → share of the tokens that leave there; sums to 1")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a token leave")


class Score(Recognised):
    """Fields of every task's score. The task's own type is recognised by its fields once the task is imported."""

    n: int = Field(description="rows or predicted tokens that the loss is a mean over")
    loss: float = Field(description="mean cross-entropy, nats; embeddings: 1 − similarity; regression: squared error")

    called: ClassVar[str] = "scores"

    @property
    def by_exit(self) -> dict[int, ExitScore]:
        """Loop → score of the exit after it, in ascending order; empty if the task scores one output only."""
        return {}

    @property
    def leaving_early(self) -> EarlyExitScore | None:
        """Score with early exit; None if it was not computed."""
        return None


AnyScore = Annotated[SerializeAsAny[Score], BeforeValidator(Score.recognise)]  # score of any task, for manifests


class EvaluationRow(Frozen):
    """Scores and time of one artifact on one set. The task determines which are present, also under other names."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    artifact: str = Field(description="artifact id, or `torch` for the run's own weights")
    split: str
    exit: int | None = Field(None, description="loop of the exit; None: the last")
    n: int = Field(description="rows, or predicted tokens")
    loss: float = Field(
        description="mean cross-entropy per row or token, nats; embeddings: 1 − similarity; regression: squared error"
    )
    accuracy: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    macro_f1: float | None = Field(None, description="several labels per text: mean F1 of the labels")
    perplexity: float | None = None
    word_perplexity: float | None = None
    similarity: float | None = Field(None, description="embeddings: rank correlation of cosines with pair scores")
    spearman: float | None = Field(None, description="regression: rank correlation of scores with the numbers")
    pearson: float | None = None
    r2: float | None = Field(None, description="regression: share of the variance that is explained")
    rmse: float | None = None
    ndcg: float | None = Field(None, description="queries and documents: mean nDCG@10")
    mrr: float | None = Field(None, description="queries and documents: mean reciprocal rank, 0 beyond rank 10")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")
    ms_per_sample: float | None = Field(None, description="batched time in the model per row (paper A, Table 6)")
    batch: int | None = None
    provider: str | None = Field(None, description="execution provider, if known")
    host: str | None = Field(None, description="processor of the time measurement")


class EarlyExitRow(Frozen):
    """Result of early exit on one set: rows or tokens leave at the first exit that reaches its threshold."""

    artifact: str = Field(description="artifact id, or `torch` for the run's own weights")
    provider: str | None = Field(None, description="execution provider, if known")
    split: str
    n: int = Field(description="rows, or predicted tokens")
    rule: Literal["confidence", "cosine"] = Field(
        "confidence", description="top probability, or cosine of hidden states before and after a loop"
    )
    threshold: float | None = Field(description="smallest of all exits; None: the paper's falling schedule")
    thresholds: dict[str, float] = Field(description="loop → threshold of its exit")
    mean_loops: float = Field(description="mean loops per row or token; no time was measured")
    loss: float = Field(description="mean cross-entropy per row or token, nats")
    accuracy: float | None = None
    perplexity: float | None = None
    share: dict[str, float] = Field(description="loop → share of rows or tokens that leave there; sums to 1")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")


class Evaluation(Frozen):
    """All scores of a run."""

    rows: tuple[EvaluationRow, ...] = ()
    early_exit: tuple[EarlyExitRow, ...] = ()


def read_evaluation(run: Path) -> Evaluation:
    """Read all scores of a run; empty if it was never scored. Raises ArtifactError for a damaged file."""
    path = run / EVALUATION_FILE
    return read_manifest(Evaluation, path) if path.is_file() else Evaluation()


def merge_rows(run: Path, rows: Sequence[EvaluationRow], early_exit: Sequence[EarlyExitRow] = ()) -> None:
    """Add scores to the run's evaluation.json, and replace all rows of the same artifact and set."""
    try:
        stored = read_evaluation(run)
    except ArtifactError:
        stored = Evaluation()  # replace a file that cannot be read
    fresh = {(row.artifact, row.split) for row in rows}
    kept = [row for row in stored.rows if (row.artifact, row.split) not in fresh]
    kept_rows = [row for row in stored.early_exit if (row.artifact, row.split) not in fresh]
    write_json(run / EVALUATION_FILE, Evaluation(rows=(*kept, *rows), early_exit=(*kept_rows, *early_exit)))
