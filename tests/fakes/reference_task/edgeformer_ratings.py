"""Example of a package that adds tasks: classes in an order, such as stars, and vectors of passages.

It consists of this file and entry points in the ``dist-info`` folder. No file of edgeformer knows the tasks: because
one extends classification, every model that classifies texts learns it, and the other extends embeddings.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from edgeformer.artifacts.data_config import DataConfig, PairsConfig
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import DistilledTraining, Recipe, TextTraining, TrainingConfig
from edgeformer.artifacts.scores import Score
from edgeformer.data.encoding import Encoded
from edgeformer.tasks.arrays import Array, Float64s
from edgeformer.tasks.classification import Classification
from edgeformer.tasks.embedding import Embedding
from edgeformer.tasks.metric import Metric, ScoreColumn, token_losses


class RatingTraining(DistilledTraining, TextTraining):
    """Training settings. The epoch with the smallest loss is kept."""


class RatingRecipe(Recipe):
    """Recipe for an encoder that rates a text; ``data.labels`` are in their order."""

    task: Literal["ratings"]
    data: DataConfig
    training: RatingTraining

    @property
    def classes(self) -> int:
        """Number of ratings."""
        return len(self.data.labels)


class RatingScore(Score):
    """Scores on one labelled set."""

    n: int
    distance: float = Field(description="mean number of places between the answer and the right rating")
    loss: float = Field(description="mean cross-entropy, nats")


def distances(logits: Array, labels: Array) -> Float64s:
    """Return the places between answers [n, C] and labels [n], float64 [n]."""
    return np.abs(logits.argmax(axis=-1) - labels).astype(np.float64)


class Ratings(Classification):
    """One of several ordered ratings per text."""

    name = "ratings"
    noun = "rating model"
    recipe_type = RatingRecipe
    score_type = RatingScore
    metric = Metric("distance", "distance", 3, higher_is_better=False, highest=None)
    columns = (ScoreColumn("n", "rows", None), metric, ScoreColumn("loss", "loss", 4))
    recorded = ()
    score_note = "Distance: mean number of places between the answer and the right rating."
    golden_note = "too few to compare distances"

    def score_rows(self, logits: Array, labels: Array, data: Any = None, /) -> RatingScore:
        if not len(labels):
            raise ValueError("cannot score an empty set")
        loss, distance = token_losses(logits, labels).mean(), distances(logits, labels).mean()
        return RatingScore(n=len(labels), distance=float(distance), loss=float(loss))

    def row_figures(self, answers: Array, rows: Encoded, data: Any) -> Float64s:
        """Return the distance of every row, and 1: [n, 2]."""
        return np.stack([distances(answers, rows.labels), np.ones(len(rows))], axis=1)

    def metric_of(self, figures: Float64s) -> float:
        return float(figures[:, 0].mean())

    def lost(self, score: RatingScore, reference: RatingScore, precision: Precision, *, trimmed: bool) -> str | None:
        rise = score.distance - reference.distance
        return None if rise <= 0.05 else f"distance {score.distance:.3f} is {rise:.3f} above FP32; the limit is 0.05"


TASK = Ratings()


class PassageRecipe(Recipe):
    """Recipe of an imported encoder of passages."""

    task: Literal["passages"]
    data: PairsConfig
    training: TrainingConfig


class Passages(Embedding):
    """One vector per passage."""

    name = "passages"
    noun = "passage model"
    recipe_type = PassageRecipe


PASSAGES = Passages()
