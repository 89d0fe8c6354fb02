"""Scores of a classifier from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.formats.scores import Score
from edgeformer.tasks.task import Meter


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


def cross_entropy(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Mean of −log p(label) in nats (paper A, "Loss Function"); logits [n, C], labels [n]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(wide - top).sum(axis=-1))
    return float((log_sum - wide[np.arange(len(labels)), labels]).mean())


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
        loss=cross_entropy(logits, labels),
    )


def _precision_recall_f1(predicted: NDArray[np.bool_], actual: NDArray[np.bool_]) -> tuple[float, float, float]:
    hits = float((predicted & actual).sum())
    claimed, present = float(predicted.sum()), float(actual.sum())
    precision = hits / claimed if claimed else 0.0
    recall = hits / present if present else 0.0
    f1 = 2 * hits / (claimed + present) if claimed + present else 0.0
    return precision, recall, f1


class ClassificationMeter(Meter):
    """Keeps logits and labels of every row: precision and recall are no sums over batches."""

    def __init__(self) -> None:
        self._logits: list[NDArray[Any]] = []
        self._labels: list[NDArray[np.int64]] = []

    def add(self, outputs: Mapping[str, NDArray[Any]], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch: ``logits`` [B, C] against ``labels`` [B]."""
        self._logits.append(outputs["logits"])
        self._labels.append(batch["labels"])

    def score(self, words: int | None = None) -> ClassificationScore:
        """The score of all rows so far. Raises ValueError where there is none."""
        if not self._logits:
            raise ValueError("cannot score an empty set")
        return score(np.concatenate(self._logits), np.concatenate(self._labels))
