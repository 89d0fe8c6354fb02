"""Multi-label classification: as classification, but each label is a question of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.labelled import LabelledTexts, label_sets
from edgeformer.data.rows import Text
from edgeformer.data.sources import Columns
from edgeformer.formats.escaping import markdown
from edgeformer.formats.manifest import Precision
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import EvaluationRow, Score
from edgeformer.tasks.early_exit import Departures, ExitNotes
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn
from edgeformer.tasks.multilabel.prediction import LabelsPrediction, labels_predictions
from edgeformer.tasks.multilabel.recipe import MultiLabelData, MultiLabelRecipe, MultiLabelTraining
from edgeformer.tasks.multilabel.scoring import MultiLabelMeter, MultiLabelScore, probabilities, score
from edgeformer.tasks.task import Float64s, Int64s, Origin, TextReader
from edgeformer.tasks.text_labels import LOSS, TextLabels, most_lost


class MultiLabel(TextLabels):
    """Any number of labels per text."""

    name: ClassVar[str] = "multi-label-classification"
    noun: ClassVar[str] = "multi-label classifier"
    recipe_type: ClassVar[type[Recipe]] = MultiLabelRecipe
    score_type: ClassVar[type[Score]] = MultiLabelScore
    metric: ClassVar[Metric] = Metric("f1", True, 4, 0.0, 1.0, "--min-f1")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "rows", None),
        ScoreColumn("f1", "F1", 4),
        ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4),
        ScoreColumn("macro_f1", "macro F1", 4),
        ScoreColumn("accuracy", "all right", 4),
        ScoreColumn("loss", "loss", 4),
    )
    has_confidence: ClassVar[bool] = False
    score_note: ClassVar[str] = (
        "F1, precision and recall over all labels of all rows (micro), at the thresholds that were best on the "
        "validation set. All right: rows whose labels are all right."
    )
    few: ClassVar[str] = f"{LOSS['int8']:.1%} of F1 cannot be told from one row more or less there"

    # Data: sets of labels are numbers there, and rows of 0 and 1 here.

    def prepare(self, recipe: MultiLabelRecipe, cache: Path, progress: Progress) -> Prepared[Encoded]:
        found = super().prepare(recipe, cache, progress)
        train, _ = found.train.loaded(np.empty(0, np.int64))
        return replace(
            found,
            train=_spread(train, recipe.data),
            validation=_spread(found.validation, recipe.data),
            tests={name: _spread(rows, recipe.data) for name, rows in found.tests.items()},
        )

    def read_set(self, data: MultiLabelData, reader: TextReader, split: str, origin: Origin) -> Encoded:
        return _spread(super().read_set(data, reader, split, origin), data)

    def read_file(
        self,
        data: MultiLabelData,
        reader: TextReader,
        path: Path,
        columns: Columns | None = None,
        *,
        as_trained: bool = False,
    ) -> Encoded:
        return _spread(super().read_file(data, reader, path, columns, as_trained=as_trained), data)

    def encode_rows(self, data: MultiLabelData, reader: TextReader, texts: LabelledTexts) -> Encoded:
        return _spread(super().encode_rows(data, reader, texts), data)

    def example(self, recipe: MultiLabelRecipe, rows: int) -> dict[str, Int64s]:
        return {**super().example(recipe, rows), "labels": np.zeros((rows, recipe.classes), dtype=np.int64)}

    # Scores

    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None, data: Any = None) -> MultiLabelMeter:
        return MultiLabelMeter(data.labels, data.thresholds, exits)

    def row_figures(self, answers: Array, rows: Encoded, data: MultiLabelData) -> Float64s:
        """Twice the true positives, and predicted plus actual labels, whose sums make micro F1: [n, 2]."""
        predicted = probabilities(answers) >= np.array([data.limits[label] for label in data.labels])
        actual = rows.labels.astype(bool)
        return np.stack([2 * (predicted & actual).sum(1), predicted.sum(1) + actual.sum(1)], axis=1).astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        hits, labels = figures.sum(axis=0)
        return float(hits / labels) if labels else 0.0

    def settled(self, recipe: MultiLabelRecipe, validation: MultiLabelScore) -> MultiLabelRecipe:
        """With the thresholds that were the best ones on the validation set, where the recipe had none."""
        if recipe.data.thresholds is not None:
            return recipe
        data = recipe.data.model_copy(update={"thresholds": validation.thresholds})
        return recipe.model_copy(update={"data": data})

    def departures(self, found: Departures) -> dict[str, float | None]:
        return {"loss": found.loss, "f1": None}

    def criterion(self, score: MultiLabelScore, training: MultiLabelTraining) -> float:
        """Validation loss, or F1 with ``training.select_by: f1``."""
        return score.loss if training.select_by == "loss" else -score.f1

    def record(self, score: MultiLabelScore) -> dict[str, float]:
        return {"val_loss": score.loss, "val_f1": score.f1, "val_macro_f1": score.macro_f1}

    def describe(self, score: MultiLabelScore) -> str:
        return f"validation loss {score.loss:.4f}, F1 {score.f1:.4f}"

    def rows(self, artifact: str, split: str, score: MultiLabelScore, *, leaks: bool = False) -> list[EvaluationRow]:
        shown = score.model_dump(exclude={"thresholds", "label_f1"})
        return [EvaluationRow(artifact=artifact, split=split, leaks=leaks, **shown)]

    def lost(
        self, found: MultiLabelScore, reference: MultiLabelScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """F1; on ``n`` rows one more or less is no loss that could be told from chance, so much is allowed."""
        drop = reference.f1 - found.f1
        bar = most_lost(precision, reference.n, trimmed=trimmed)
        if drop > bar:
            most = f"at most {bar:.4f} may be lost"
            return f"F1 {found.f1:.4f} is {drop:.4f} below FP32's on {found.n:,} rows; {most}"
        return None

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> MultiLabelScore:
        actual = answers["labels"] if rows is None else answers["labels"][rows]
        return score(logits, actual, data.labels, data.thresholds)

    # What it says

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: MultiLabelData
    ) -> list[LabelsPrediction]:
        return labels_predictions(texts, answers, cut, data)

    def client_config(self, prepared: Prepared[Encoded], recipe: MultiLabelRecipe) -> dict[str, object]:
        return {
            **super().client_config(prepared, recipe),
            "problem_type": "multi_label_classification",
            **self.answer_config(recipe.data),
        }

    def answer_config(self, data: MultiLabelData) -> dict[str, object]:
        """Label → probability from which on it is given."""
        return {"thresholds": data.limits}

    def card_lines(self, recipe: MultiLabelRecipe) -> list[str]:
        thresholds = recipe.data.limits
        told = (f"{markdown(label)} from {thresholds[label]:.3f} on" for label in thresholds)
        return [*super().card_lines(recipe), f"**Given at a probability:** {', '.join(told)}"]


def _spread(rows: Encoded, data: MultiLabelData) -> Encoded:
    """With labels [n, C] instead of sets."""
    return replace(rows, labels=label_sets(rows.labels, len(data.labels)))
