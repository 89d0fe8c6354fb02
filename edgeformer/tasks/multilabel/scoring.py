"""Scores of a multi-label classifier from its logits, and the thresholds that are best for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.formats.scores import Score
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.metric import Meter
from edgeformer.tasks.multilabel.recipe import USUAL

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
