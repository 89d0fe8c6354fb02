"""Multi-label classification: none, one or several labels per text, each with its own threshold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import IN_MEMORY, DataConfig
from edgeformer.artifacts.recipe import Recipe, TextTraining
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.units import markdown
from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import MAX_LABELS, Text
from edgeformer.tasks.arrays import Array, Arrays, Bools, Float64s, Floats
from edgeformer.tasks.metric import Metric, ScoreColumn, ratio
from edgeformer.tasks.task import MAX_SCORE_DROP, Prediction
from edgeformer.tasks.texts import TextTask

DEFAULT_THRESHOLD = 0.5
Threshold = Annotated[float, Field(gt=0.0, lt=1.0)]


class MultiLabelData(DataConfig):
    """Data of a classifier whose rows have none, one or several labels.

    Labels are a list in JSON Lines and Parquet, and one text in tables, where an empty cell is a row without labels.
    """

    label_separator: Annotated[str, Field(min_length=1)] = Field(
        description="separator of a row's labels in a table cell; surrounding spaces are ignored"
    )
    thresholds: dict[str, Threshold] | None = Field(
        None,
        description="label → smallest probability; absent: selected on the validation set at the end "
        "of training and stored in run.json",
    )

    @property
    def separator(self) -> str | None:
        return self.label_separator

    @property
    def effective_thresholds(self) -> dict[str, float]:
        """Label → threshold, with the default for data without thresholds."""
        return {**self.thresholds} if self.thresholds is not None else dict.fromkeys(self.labels, DEFAULT_THRESHOLD)

    @model_validator(mode="after")
    def _settings_fit_label_sets(self) -> Self:
        if self.stream:
            raise ValueError(f"stream: true is not possible with several labels per text; {IN_MEMORY}")
        if self.balance in ("label", "label-and-source"):
            raise ValueError("balance: only source is possible with several labels per text")
        if len(self.labels) > MAX_LABELS:
            raise ValueError(
                f"labels: at most {MAX_LABELS} are possible with several labels per text, not {len(self.labels)}"
            )
        if self.thresholds is not None and set(self.thresholds) != set(self.labels):
            raise ValueError(f"thresholds: give one for each of the labels {', '.join(self.labels)}, or leave it out")
        ambiguous = next((label for label in self.labels if self.label_separator in label), None)
        if ambiguous is not None:
            raise ValueError(f"label_separator: also occurs in the label {ambiguous!r}; choose another separator")
        return self


class MultiLabelTraining(TextTraining):
    """Training settings of multi-label classification."""

    select_by: Literal["loss", "f1"] = Field(
        "loss",
        description="validation metric that selects the epoch whose weights are kept; F1 at the thresholds "
        "that are best on that set",
    )


class MultiLabelRecipe(Recipe):
    """Recipe for an encoder that assigns any number of labels to a text."""

    task: Literal["multi-label-classification"]
    data: MultiLabelData
    training: MultiLabelTraining


class MultiLabelScore(Score):
    """Scores on one labelled set at the stated thresholds. Micro: over all labels of all rows."""

    n: int
    accuracy: float = Field(description="share of rows with all labels correct")
    precision: float = Field(description="micro")
    recall: float = Field(description="micro")
    f1: float = Field(description="micro")
    macro_f1: float = Field(description="mean F1 of the labels that occur")
    label_f1: dict[str, float] = Field(description="label → F1")
    thresholds: dict[str, float] = Field(description="label → smallest probability")
    loss: float = Field(description="mean binary cross-entropy over rows and labels, nats")


def probabilities(logits: Floats) -> Float64s:
    """Return the independent probability of every label, float64 [n, C]; logits [n, C]."""
    wide = logits.astype(np.float64)
    result: Float64s = 0.5 * (1 + np.tanh(wide / 2))
    return result


def best_thresholds(confidence: Float64s, actual: Bools) -> list[float]:
    """Return the threshold with the highest F1 for each label; ties: the nearest to 0.5.

    ``confidence``, ``actual``: probabilities and right labels, [n, C]. Labels with fewer than 5 positive or 5 negative
    rows keep 0.5: a threshold from so few rows would be noise.
    """
    thresholds = []
    for column, present in zip(confidence.T, actual.T, strict=True):
        if min(present.sum(), (~present).sum()) < 5:
            thresholds.append(DEFAULT_THRESHOLD)
            continue
        values, places = np.unique(column, return_inverse=True)
        candidates = np.append((values[1:] + values[:-1]) / 2, DEFAULT_THRESHOLD)
        candidates = candidates[(candidates > 0) & (candidates < 1)]
        # Rows at or above each value, and right rows among them: cumulative sums from the highest value down.
        rows = np.bincount(places, minlength=len(values))[::-1].cumsum()[::-1]
        right = np.bincount(places, weights=present, minlength=len(values))[::-1].cumsum()[::-1]
        first = np.searchsorted(values, candidates, side="left")
        predicted, hits = (np.append(counts, 0)[first] for counts in (rows, right))
        f1 = 2 * hits / (predicted + present.sum())
        best = np.flatnonzero(f1 >= f1.max() - 1e-12)
        thresholds.append(float(candidates[best[np.abs(candidates[best] - DEFAULT_THRESHOLD).argmin()]]))
    return thresholds


def score(logits: Floats, labels: NDArray[np.integer], data: Any) -> MultiLabelScore:
    """Compute micro and macro figures and the loss of logits and labels (0 or 1) [n, C]. Raises ValueError: n is 0.

    Without ``data.thresholds``, the thresholds are those that are best on these rows.
    """
    if not len(labels):
        raise ValueError("cannot score an empty set")
    confidence, actual = probabilities(logits), labels.astype(bool)
    names, thresholds = data.labels, data.thresholds
    limits = best_thresholds(confidence, actual) if thresholds is None else [thresholds[name] for name in names]
    predicted = confidence >= np.array(limits)
    hits, positives, present = (predicted & actual).sum(0), predicted.sum(0), actual.sum(0)
    label_f1 = np.divide(2 * hits, positives + present, out=np.zeros(len(names)), where=positives + present > 0)
    wide = logits.astype(np.float64)
    losses = np.logaddexp(0, wide) - wide * actual
    return MultiLabelScore(
        n=len(actual), accuracy=float((predicted == actual).all(1).mean()),
        precision=ratio(hits.sum(), positives.sum()), recall=ratio(hits.sum(), present.sum()),
        f1=ratio(2 * hits.sum(), positives.sum() + present.sum()),
        macro_f1=float(label_f1[present > 0].mean()) if present.any() else 0.0,
        label_f1=dict(zip(names, label_f1.tolist(), strict=True)),
        thresholds=dict(zip(names, map(float, limits), strict=True)), loss=float(losses.mean()),
    )  # fmt: skip


@dataclass(frozen=True)
class LabelsPrediction(Prediction):
    """The labels of one text or pair whose probability reaches their threshold, likeliest first.

    ``probabilities`` are independent, and ``probability`` is the highest. There is no early exit: ``loops`` is None.
    """

    keys = ("label", "labels", "probability", "probabilities", "truncated", "loops")

    label: str
    labels: tuple[str, ...]
    probability: float
    probabilities: dict[str, float]
    loops: None = None


class MultiLabel(TextTask):
    """Any number of labels per text. Labels of a set are int64 [n, C] of 0 and 1."""

    name = "multi-label-classification"
    noun = "multi-label classifier"
    recipe_type = MultiLabelRecipe
    score_type = MultiLabelScore
    metric = Metric("f1", "F1", 4)
    columns = (
        ScoreColumn("n", "rows", None), metric, ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4), ScoreColumn("macro_f1", "macro F1", 4),
        ScoreColumn("accuracy", "all right", 4), ScoreColumn("loss", "loss", 4),
    )  # fmt: skip
    recorded = ("macro_f1",)
    score_note = (
        "F1, precision and recall over all labels of all rows (micro), at the thresholds that are best on the "
        "validation set. All right: rows with all labels correct."
    )
    golden_note = f"too few to detect a loss of {MAX_SCORE_DROP['int8']:.1%}"

    score_rows = staticmethod(score)

    def settled(self, recipe: MultiLabelRecipe, validation: MultiLabelScore) -> MultiLabelRecipe:
        """Return the recipe with the label thresholds that were best on the validation set, if it states none."""
        if recipe.data.thresholds is not None:
            return recipe
        data = recipe.data.model_copy(update={"thresholds": validation.thresholds})
        return recipe.model_copy(update={"data": data})

    def answer_config(self, data: MultiLabelData) -> dict[str, object]:
        return {"problem_type": "multi_label_classification", "thresholds": data.effective_thresholds}

    def card_lines(self, recipe: MultiLabelRecipe) -> list[str]:
        thresholds = recipe.data.effective_thresholds.items()
        limits = ", ".join(f"{markdown(label)} {threshold:.3f}" for label, threshold in thresholds)
        return [*super().card_lines(recipe), f"**Assigned from probability:** {limits}"]

    def with_answers(self, rows: Encoded, logits: Array, data: MultiLabelData) -> Encoded:
        return replace(rows, labels=(logits > 0).astype(np.int64))  # a probability above 0.5

    def row_figures(self, answers: Array, rows: Encoded, data: MultiLabelData) -> Float64s:
        """Return twice the true positives, and predicted plus actual labels, whose sums give micro F1: [n, 2]."""
        thresholds = np.array([data.effective_thresholds[label] for label in data.labels])
        predicted, actual = probabilities(answers) >= thresholds, rows.labels.astype(bool)
        return np.stack([2 * (predicted & actual).sum(1), predicted.sum(1) + actual.sum(1)], axis=1).astype(np.float64)

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: Bools, data: MultiLabelData
    ) -> list[LabelsPrediction]:
        thresholds, predictions = data.effective_thresholds, []
        for text, row, truncated in zip(texts, probabilities(answers["logits"]).tolist(), cut.tolist(), strict=True):
            by_label = dict(zip(data.labels, row, strict=True))
            labels = sorted((name for name in by_label if by_label[name] >= thresholds[name]), key=by_label.__getitem__)
            names = tuple(reversed(labels))
            predictions.append(LabelsPrediction(text, truncated, ", ".join(names), names, max(row), by_label))
        return predictions


TASK = MultiLabel()
