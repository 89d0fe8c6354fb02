"""Multi-label classification: any number of labels per text, each with a threshold of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataConfig, Probability
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.artifacts.units import markdown
from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.rows import MOST_LABELS, LabelledTexts, Text, label_sets
from edgeformer.data.sources import Columns
from edgeformer.tasks.early_exit import Departures, ExitNotes, exit_logits
from edgeformer.tasks.labels import LOSS, TextLabels, most_lost
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, ScoreColumn
from edgeformer.tasks.task import Float64s, Int64s, Origin, Prediction, TextReader, said

# The part of a recipe that is multi-label classification's own.


USUAL = 0.5
Threshold = Annotated[float, Field(gt=0.0, lt=1.0)]


class MultiLabelData(DataConfig):
    """As a classifier's, but a row has none, one or several of the labels: a list in JSON Lines and Parquet, one text
    in tables, where an empty cell is a row without any."""

    label_separator: Annotated[str, Field(min_length=1)] = Field(
        description="what stands between the labels of a row in a table's cell; spaces around it do not count"
    )
    thresholds: dict[str, Threshold] | None = Field(
        None,
        description="label → probability from which on it is given; left out: found on the validation set at the end "
        "of training, and kept in run.json",
    )

    @property
    def separator(self) -> str | None:
        return self.label_separator

    @property
    def limits(self) -> dict[str, float]:
        """Label → probability from which on it is given, also where none was found or stated."""
        return {**self.thresholds} if self.thresholds is not None else dict.fromkeys(self.labels, USUAL)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.stream:
            raise ValueError("stream: is not possible with several labels per text; leave it out")
        if self.balance in ("label", "label-and-source"):
            raise ValueError("balance: a text with several labels counts for each of them; balance: source is possible")
        if len(self.labels) > MOST_LABELS:
            raise ValueError(f"labels: at most {MOST_LABELS} where a text can have several, not {len(self.labels)}")
        if self.thresholds is not None and set(self.thresholds) != set(self.labels):
            raise ValueError(f"thresholds: needs one for each of the labels {', '.join(self.labels)}, or leave it out")
        torn = next((label for label in self.labels if self.label_separator in label), None)
        if torn is not None:
            raise ValueError(f"label_separator: is in the label {torn!r}; choose another one")
        return self


class MultiLabelTraining(TrainingConfig):
    """What only multi-label classification has."""

    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: each layer learns at this share of the rate of the one behind it"
    )
    select_by: Literal["loss", "f1"] = Field(
        "loss",
        description="the validation metric that picks the epoch whose weights are kept; F1 at the thresholds that are "
        "best there",
    )


class MultiLabelRecipe(Recipe):
    """A recipe for an encoder that gives a text any number of labels."""

    task: Literal["multi-label-classification"]
    data: MultiLabelData
    training: MultiLabelTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)


# Scores of a multi-label classifier from its logits, and the thresholds that are best for them.


FEWEST = 5
"""Rows with a label, and without it, that a threshold is found by; of fewer it would be chance."""

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


class MultiLabelScore(Score):
    """Scores on one labelled set, with the thresholds that they were taken at. Micro: over all labels of all rows."""

    n: int
    accuracy: float = Field(description="share of rows whose labels are all right")
    precision: float = Field(description="micro")
    recall: float = Field(description="micro")
    f1: float = Field(description="micro")
    macro_f1: float = Field(description="mean of the labels' own F1, of those that some row has")
    label_f1: dict[str, float] = Field(description="label → F1")
    thresholds: dict[str, float] = Field(description="label → probability from which on it is given")
    loss: float = Field(description="mean binary cross-entropy over rows and labels, nats")


def probabilities(logits: Floats) -> NDArray[np.float64]:
    """Of every label by itself, float64 [n, C]; logits [n, C]."""
    wide = logits.astype(np.float64)
    result: NDArray[np.float64] = 0.5 * (1 + np.tanh(wide / 2))
    return result


def best_thresholds(found: NDArray[np.float64], actual: Bools) -> list[float]:
    """For each label the threshold of its highest F1; where several are as good, the one nearest to 0.5.

    Args:
        found: probabilities [n, C].
        actual: the right labels, bool [n, C]. Labels of fewer than 5 rows, or of all but 5, keep 0.5.
    """
    return [_best(found[:, label], actual[:, label]) for label in range(found.shape[1])]


def _best(found: NDArray[np.float64], actual: Bools) -> float:
    if min(actual.sum(), (~actual).sum()) < FEWEST:
        return USUAL
    values, place = np.unique(found, return_inverse=True)
    between = (values[1:] + values[:-1]) / 2
    candidates = np.concatenate([between, [USUAL]])
    candidates = candidates[(candidates > 0) & (candidates < 1)]
    # Rows at or above a threshold, and how many of them have the label: from the highest value down.
    rows = np.bincount(place, minlength=len(values))[::-1].cumsum()[::-1]
    right = np.bincount(place, weights=actual, minlength=len(values))[::-1].cumsum()[::-1]
    first = np.searchsorted(values, candidates, side="left")
    given, hits = (np.append(counts, 0)[first] for counts in (rows, right))
    f1 = 2 * hits / (given + actual.sum())
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    return float(candidates[best[np.abs(candidates[best] - USUAL).argmin()]])


def score(
    logits: Floats, actual: NDArray[np.integer], labels: Sequence[str], thresholds: Mapping[str, float] | None
) -> MultiLabelScore:
    """Micro and macro figures, and the loss.

    Args:
        logits: [n, C], n ≥ 1.
        actual: 0 or 1 [n, C].
        labels: C names.
        thresholds: of every label; None: those that are best on these very rows.

    Raises:
        ValueError: n is 0.
    """
    if not len(actual):
        raise ValueError("cannot score an empty set")
    found, wanted = probabilities(logits), actual.astype(bool)
    limits = best_thresholds(found, wanted) if thresholds is None else [thresholds[label] for label in labels]
    given = found >= np.array(limits)
    hits, claimed, present = (given & wanted).sum(0), given.sum(0), wanted.sum(0)
    of_labels = np.divide(2 * hits, claimed + present, out=np.zeros(len(labels)), where=claimed + present > 0)
    wide = logits.astype(np.float64)
    losses = np.logaddexp(0, wide) - wide * wanted
    return MultiLabelScore(
        n=len(actual),
        accuracy=float((given == wanted).all(1).mean()),
        precision=_ratio(hits.sum(), claimed.sum()),
        recall=_ratio(hits.sum(), present.sum()),
        f1=_ratio(2 * hits.sum(), claimed.sum() + present.sum()),
        macro_f1=float(of_labels[present > 0].mean()) if present.any() else 0.0,
        label_f1=dict(zip(labels, of_labels.tolist(), strict=True)),
        thresholds=dict(zip(labels, map(float, limits), strict=True)),
        loss=float(losses.mean()),
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


class MultiLabelMeter(Meter):
    """Keeps logits and labels of every row.

    Args:
        labels: C names.
        thresholds: see :func:`score`.
        exits: loops that answer, in rising order; fewer than two: there is one answer.
    """

    def __init__(
        self, labels: Sequence[str], thresholds: Mapping[str, float] | None, exits: Sequence[int] = ()
    ) -> None:
        self._names = {exit_logits(loop): loop for loop in exits} if len(exits) > 1 else {"logits": 0}
        self._logits: dict[str, list[NDArray[Any]]] = {name: [] for name in self._names}
        self._actual: list[NDArray[np.int64]] = []
        self._labels, self._thresholds = labels, thresholds

    def add(self, outputs: Mapping[str, NDArray[Any]], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch: ``logits`` [B, C] (with several exits ``logits_exitN``) against ``labels`` [B, C]."""
        self._actual.append(batch["labels"])
        for name in self._names:
            self._logits[name].append(outputs[name])

    def score(self, words: int | None = None) -> MultiLabelScore:
        """The last exit's score of all rows so far. Raises ValueError where there is none."""
        return self._score(list(self._names)[-1])

    def earlier(self) -> dict[int, Score]:
        return {loop: self._score(name) for name, loop in list(self._names.items())[:-1]}

    def _score(self, name: str) -> MultiLabelScore:
        if not self._actual:
            raise ValueError("cannot score an empty set")
        return score(np.concatenate(self._logits[name]), np.concatenate(self._actual), self._labels, self._thresholds)


# What a multi-label classifier answers to one text.


@dataclass(frozen=True)
class LabelsPrediction(Prediction):
    """The labels of one text, or of a pair: those whose probability reaches their threshold, likeliest first.

    Attributes:
        probabilities: of every label by itself; they do not sum to 1. JSON's ``probability`` is the highest of them.
    """

    labels: tuple[str, ...]
    probabilities: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        names = ("probabilities", "truncated")
        return {
            **said(self.text),
            "label": ", ".join(self.labels),
            "labels": list(self.labels),
            "probability": max(self.probabilities.values()),
            **{name: getattr(self, name) for name in names},
            "loops": None,  # nobody leaves early: there is no top probability to leave by
        }


def labels_predictions(
    texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: MultiLabelData
) -> list[LabelsPrediction]:
    """One prediction per text; the arguments are those of :meth:`Task.predictions`."""
    thresholds = data.limits
    predictions = []
    for text, found, truncated in zip(texts, probabilities(answers["logits"]).tolist(), cut.tolist(), strict=True):
        by_label = dict(zip(data.labels, found, strict=True))
        given = sorted((name for name in by_label if by_label[name] >= thresholds[name]), key=by_label.__getitem__)
        predictions.append(LabelsPrediction(text, truncated, tuple(reversed(given)), by_label))
    return predictions


# Multi-label classification: as classification, but each label is a question of its own.


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


TASK = MultiLabel()
