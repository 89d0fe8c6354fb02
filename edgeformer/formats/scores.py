"""How good a model is on one set: the scores of each task."""

from __future__ import annotations

from pydantic import Field

from edgeformer.formats.base import Frozen


class ClassificationScore(Frozen):
    """Scores on one labelled set. Two classes: of the second label; more: macro-averaged."""

    n: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    loss: float = Field(description="mean cross-entropy, nats")


class ExitScore(Frozen):
    """What one exit of a language model predicts."""

    loss: float = Field(description="nats per predicted token: the sum over all of them divided by their number")
    perplexity: float = Field(description="exp(loss)")


class EarlyExitScore(ExitScore):
    """Every token answered at the first exit whose confidence reaches the threshold (paper B, eq. 6)."""

    mean_loops: float = Field(description="loops that a token takes on average")
    share: dict[str, float] = Field(description="loop → share of the tokens that leave there; sums to 1")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a token leave")


class LanguageScore(ExitScore):
    """Scores of a language model on one set; loss and perplexity are those of the final head, per token."""

    n: int = Field(description="tokens predicted")
    words: int | None = Field(None, description="words of the text, each paragraph's end counted as one")
    word_perplexity: float | None = Field(
        None, description="exp(total nats / words): comparable across tokenizers and with published tables"
    )
    exits: dict[str, ExitScore] = Field(description="loop → score of the exit after it; the last loop included")
    early_exit: EarlyExitScore | None = None
