"""Classification (paper A): one label per text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.artifacts.data_config import DataConfig, Probability
from edgeformer.artifacts.recipe import DistilledTraining, Recipe, TextTraining
from edgeformer.artifacts.scores import Score
from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import Text
from edgeformer.tasks.arrays import Array, Arrays, Bools, Float64s, Floats
from edgeformer.tasks.metric import Metric, ScoreColumn, ratio, token_losses, top_probability
from edgeformer.tasks.task import MAX_SCORE_DROP, Prediction
from edgeformer.tasks.texts import TextTask


class ClassificationTraining(DistilledTraining, TextTraining):
    """Training settings of classification."""

    label_smoothing: Probability = Field(0.0, description="as label_smoothing of torch's cross_entropy")
    select_by: Literal["loss", "accuracy", "f1"] = Field(
        "loss",
        description="validation metric that selects the epoch whose weights are kept, ties by loss; f1 suits uneven "
        "labels",
    )


class ClassificationRecipe(Recipe):
    """Recipe of paper A: an encoder that assigns one of several classes to a text."""

    task: Literal["classification"]
    data: DataConfig
    training: ClassificationTraining


class ClassificationScore(Score):
    """Scores on one labelled set. Two classes: figures of the second label; more: macro-averaged."""

    n: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    loss: float = Field(description="mean cross-entropy, nats")


def softmax(logits: Floats) -> Float64s:
    """Return the probabilities float64 [n, C] of logits [n, C]."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True).astype(np.float64))
    result: Float64s = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def score(logits: Floats, labels: NDArray[np.int64], data: Any = None) -> ClassificationScore:
    """Compute accuracy, precision, recall, F1 and loss (paper A, "Loss Function").

    With two classes, precision, recall and F1 are those of the second label (SST-2: positive); with more they are
    macro-averaged over the labels that occur in the rows or the answers, as in scikit-learn. A ratio whose denominator
    is zero counts as 0. Logits [n, C], labels [n]. Raises ValueError: n is 0.
    """
    if len(labels) == 0:
        raise ValueError("cannot score an empty set")
    predicted = logits.argmax(axis=-1)
    classes = logits.shape[-1]
    per_class = []
    for label in (1,) if classes == 2 else np.union1d(predicted, labels):
        hits = float(((predicted == label) & (labels == label)).sum())
        positives, actual = float((predicted == label).sum()), float((labels == label).sum())
        per_class.append((ratio(hits, positives), ratio(hits, actual), ratio(2 * hits, positives + actual)))
    precision, recall, f1 = np.mean(per_class, axis=0)
    return ClassificationScore(
        n=len(labels), accuracy=float((predicted == labels).mean()), precision=float(precision), recall=float(recall),
        f1=float(f1), loss=float(token_losses(logits, labels).mean()),
    )  # fmt: skip


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The likeliest label of one text or pair. ``loops``: loop at which the row exited; None: no early exit."""

    keys = ("label", "probability", "probabilities", "truncated", "loops")

    label: str
    probability: float
    probabilities: dict[str, float]
    loops: int | None = None


class Classification(TextTask):
    """One label per text."""

    name = "classification"
    noun = "classifier"
    recipe_type = ClassificationRecipe
    score_type = ClassificationScore
    metric = Metric("accuracy", "accuracy", 4, is_share=True)
    columns = (
        ScoreColumn("n", "rows", None), metric, ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4), ScoreColumn("f1", "F1", 4), ScoreColumn("loss", "loss", 4),
    )  # fmt: skip
    recorded = ("f1",)
    confidence = staticmethod(top_probability)
    score_note = "Two classes: precision, recall and F1 are those of the second label. More: macro-averaged."
    golden_note = f"too few to detect a loss of {MAX_SCORE_DROP['int8']:.1%}"

    score_rows = staticmethod(score)

    def row_figures(self, answers: Array, rows: Encoded, data: Any) -> Float64s:
        """Return 1 for a right answer, else 0: [n, 1]."""
        right: Bools = answers.argmax(axis=-1) == rows.labels
        return right[:, None].astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        return float(figures.mean())

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: Bools, data: DataConfig
    ) -> list[LabelPrediction]:
        loops = answers["loops"].tolist() if "loops" in answers else [None] * len(texts)
        rows = zip(texts, softmax(answers["logits"]).tolist(), cut.tolist(), loops, strict=True)
        predictions = []
        for text, probabilities, truncated, exit_loop in rows:
            by_label = dict(zip(data.labels, probabilities, strict=True))
            best = max(by_label, key=by_label.__getitem__)
            predictions.append(LabelPrediction(text, truncated, best, by_label[best], by_label, exit_loop))
        return predictions


TASK = Classification()
