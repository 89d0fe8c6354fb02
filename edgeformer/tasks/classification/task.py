"""Classification: data, metric, scoring and golden inputs of models that put a text into one of several classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import Text
from edgeformer.formats.data_config import DataConfig
from edgeformer.formats.manifest import Precision
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import EvaluationRow, Score
from edgeformer.tasks.classification.prediction import LabelPrediction, label_predictions
from edgeformer.tasks.classification.recipe import ClassificationRecipe, ClassificationTraining
from edgeformer.tasks.classification.scoring import ClassificationMeter, ClassificationScore, score
from edgeformer.tasks.early_exit import Departures, ExitNotes
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn
from edgeformer.tasks.task import Float64s, Int64s
from edgeformer.tasks.text_labels import LOSS, TextLabels, most_lost


class Classification(TextLabels):
    """One label per text."""

    name: ClassVar[str] = "classification"
    noun: ClassVar[str] = "classifier"
    recipe_type: ClassVar[type[Recipe]] = ClassificationRecipe
    score_type: ClassVar[type[Score]] = ClassificationScore
    metric: ClassVar[Metric] = Metric("accuracy", True, 4, 0.0, 1.0, "--min-accuracy", is_share=True)
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "rows", None),
        ScoreColumn("accuracy", "accuracy", 4),
        ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4),
        ScoreColumn("f1", "F1", 4),
        ScoreColumn("loss", "loss", 4),
    )
    score_note: ClassVar[str] = (
        "Two classes: precision, recall and F1 are those of the second label. More: macro-averaged."
    )
    few: ClassVar[str] = f"{LOSS['int8']:.1%} of accuracy cannot be told from one row more or less there"

    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None, data: Any = None) -> ClassificationMeter:
        return ClassificationMeter(exits, notes)

    def row_figures(self, answers: Array, rows: Encoded, data: Any) -> Float64s:
        """1 for a right answer, else 0: [n, 1]."""
        right: NDArray[np.bool_] = answers.argmax(axis=-1) == rows.labels
        return right[:, None].astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        return float(figures.mean())

    def departures(self, found: Departures) -> dict[str, float | None]:
        return {"loss": found.loss, "accuracy": found.right}

    def criterion(self, score: ClassificationScore, training: ClassificationTraining) -> float:
        """Validation loss, or accuracy with ``training.select_by: accuracy``."""
        return score.loss if training.select_by == "loss" else -score.accuracy

    def record(self, score: ClassificationScore) -> dict[str, float]:
        return {"val_loss": score.loss, "val_accuracy": score.accuracy, "val_f1": score.f1}

    def describe(self, score: ClassificationScore) -> str:
        return f"validation loss {score.loss:.4f}, accuracy {score.accuracy:.4f}"

    def rows(
        self, artifact: str, split: str, score: ClassificationScore, *, leaks: bool = False
    ) -> list[EvaluationRow]:
        return [EvaluationRow(artifact=artifact, split=split, leaks=leaks, **score.model_dump())]

    def lost(
        self, found: ClassificationScore, reference: ClassificationScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """Accuracy; on ``n`` rows one more or less is no loss that could be told from chance, so much is allowed."""
        drop = reference.accuracy - found.accuracy
        bar = most_lost(precision, reference.n, trimmed=trimmed)
        if drop > bar:
            most = f"at most {bar:.4f} may be lost"
            return f"accuracy {found.accuracy:.4f} is {drop:.4f} below FP32's on {found.n:,} rows; {most}"
        return None

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> ClassificationScore:
        return score(logits, answers["labels"] if rows is None else answers["labels"][rows])

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: DataConfig
    ) -> list[LabelPrediction]:
        return label_predictions(texts, answers, cut, data.labels)
