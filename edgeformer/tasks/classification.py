"""Classification (paper A): one label per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataConfig, PositiveFloat, Probability
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import Text
from edgeformer.tasks.early_exit import Departures, ExitNotes, exit_logits
from edgeformer.tasks.labels import LOSS, TextLabels, most_lost
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, ScoreColumn, token_losses, top_probability
from edgeformer.tasks.task import Float64s, Int64s, Prediction, said

# The part of a recipe that is classification's own.


class Distillation(Frozen):
    """What a student learns of its teacher beside the labels; losses are sums over the rows, in nats."""

    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.7, description="of the teacher's answers (KL divergence × temperature²); the labels get the rest"
    )
    temperature: PositiveFloat = Field(2.0, description="answers of both are divided by it first")
    states: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="of the squared distance between both models' states after every iteration"
    )


class ClassificationTraining(TrainingConfig):
    """What only classification has."""

    folders: ClassVar[tuple[str, ...]] = ("teacher",)

    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: each layer learns at this share of the rate of the one behind it"
    )
    teacher: str | None = Field(None, description="a finished run, or its folder, whose answers are learned, too")
    teacher_sha256: str | None = Field(None, description="of its weights; filled in when training starts")
    distillation: Distillation = Distillation()
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )

    @model_validator(mode="after")
    def _somebody_teaches(self) -> Self:
        if self.teacher is None and self.distillation != Distillation():
            raise ValueError(
                "distillation: does nothing without a teacher; set teacher: to the folder of a finished run"
            )
        return self


class ClassificationRecipe(Recipe):
    """A recipe of paper A: an encoder that puts a text into one of several classes."""

    task: Literal["classification"]
    data: DataConfig
    training: ClassificationTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)


# Scores of a classifier from its logits.


class ClassificationScore(Score):
    """Scores on one labelled set. Two classes: of the second label; more: macro-averaged."""

    n: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    loss: float = Field(description="mean cross-entropy, nats")


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probabilities float64 [n, C] of logits [n, C]."""
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def score(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> ClassificationScore:
    """Accuracy, precision, recall, F1 and loss.

    With two classes, precision, recall and F1 are those of the second label (SST-2: positive); with more they are
    macro-averaged. A ratio whose denominator is zero counts as 0.

    Args:
        logits: [n, C], n ≥ 1.
        labels: int64 [n] in 0…C−1.

    Raises:
        ValueError: n is 0.
    """
    if len(labels) == 0:
        raise ValueError("cannot score an empty set")
    predicted = logits.argmax(axis=-1)
    classes = range(logits.shape[-1])
    judged = (1,) if len(classes) == 2 else tuple(classes)
    per_class = [_precision_recall_f1(predicted == c, labels == c) for c in judged]
    precision, recall, f1 = np.mean(per_class, axis=0)
    return ClassificationScore(
        n=len(labels),
        accuracy=float((predicted == labels).mean()),
        precision=float(precision),
        recall=float(recall),
        f1=float(f1),
        loss=float(token_losses(logits, labels).mean()),  # paper A, "Loss Function"
    )


def _precision_recall_f1(predicted: NDArray[np.bool_], actual: NDArray[np.bool_]) -> tuple[float, float, float]:
    hits = float((predicted & actual).sum())
    claimed, present = float(predicted.sum()), float(actual.sum())
    precision = hits / claimed if claimed else 0.0
    recall = hits / present if present else 0.0
    f1 = 2 * hits / (claimed + present) if claimed + present else 0.0
    return precision, recall, f1


class ClassificationMeter(Meter):
    """Keeps logits and labels of every row: precision and recall are no sums over batches.

    Args:
        exits: loops that answer, in rising order; fewer than two: there is one answer.
        notes: is told of every answer at every exit; None: nobody asks for early exit.
    """

    def __init__(self, exits: Sequence[int] = (), notes: ExitNotes | None = None) -> None:
        self._names = {exit_logits(loop): loop for loop in exits} if len(exits) > 1 else {"logits": 0}
        self._logits: dict[str, list[NDArray[Any]]] = {name: [] for name in self._names}
        self._labels: list[NDArray[np.int64]] = []
        self._notes = notes

    def add(self, outputs: Mapping[str, NDArray[Any]], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch: ``logits`` [B, C] (with several exits ``logits_exitN``) against ``labels`` [B]."""
        labels = batch["labels"]
        self._labels.append(labels)
        for name, loop in self._names.items():
            logits = outputs[name]
            self._logits[name].append(logits)
            if self._notes is not None:
                right = logits.argmax(axis=-1) == labels
                self._notes.add(loop, token_losses(logits, labels), top_probability(logits), right)

    def score(self, words: int | None = None) -> ClassificationScore:
        """The last exit's score of all rows so far. Raises ValueError where there is none."""
        return self._score(list(self._names)[-1])

    def earlier(self) -> dict[int, Score]:
        return {loop: self._score(name) for name, loop in list(self._names.items())[:-1]}

    def _score(self, name: str) -> ClassificationScore:
        if not self._labels:
            raise ValueError("cannot score an empty set")
        return score(np.concatenate(self._logits[name]), np.concatenate(self._labels))


# What a classifier answers to one text.


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The most likely label of one text, or of a pair.

    Attributes:
        probabilities: of every label.
        loops: after which it answered; None: not asked for.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    loops: int | None = None

    def as_dict(self) -> dict[str, object]:
        names = ("label", "probability", "probabilities", "truncated", "loops")
        return {**said(self.text), **{name: getattr(self, name) for name in names}}


def label_predictions(
    texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], labels: Sequence[str]
) -> list[LabelPrediction]:
    """One prediction per text.

    Args:
        texts: as they were given.
        answers: ``logits`` [n, C], and ``loops`` [n] where rows could leave early.
        cut: texts that were longer than the model reads, bool [n].
        labels: of the classes, C names.
    """
    probabilities = softmax(answers["logits"]).tolist()
    loops = answers["loops"].tolist() if "loops" in answers else [None] * len(texts)
    predictions = []
    for text, found, truncated, after in zip(texts, probabilities, cut.tolist(), loops, strict=True):
        by_label = dict(zip(labels, found, strict=True))
        best = max(by_label, key=by_label.__getitem__)
        predictions.append(LabelPrediction(text, truncated, best, by_label[best], by_label, after))
    return predictions


# Classification: data, metric, scoring and golden inputs of models that put a text into one of several classes.


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


TASK = Classification()
