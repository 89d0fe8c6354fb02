"""Scores of a classifier from its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.formats.scores import Score
from edgeformer.tasks.early_exit import ExitNotes, exit_logits
from edgeformer.tasks.metric import Meter, token_losses, top_probability


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
