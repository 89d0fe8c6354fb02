"""What a classifier answers to one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.rows import Text
from edgeformer.tasks.classification.scoring import softmax
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.prediction import Prediction, said


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
