"""What a multi-label classifier answers to one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.rows import Text
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.multilabel.recipe import MultiLabelData
from edgeformer.tasks.multilabel.scoring import probabilities
from edgeformer.tasks.prediction import Prediction, said


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
