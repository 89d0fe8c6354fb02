"""The part of a recipe that is classification's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeformer.formats.data_config import DataConfig, Probability
from edgeformer.formats.recipe import Recipe, TrainingConfig


class ClassificationTraining(TrainingConfig):
    """What only classification has."""

    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )


class ClassificationRecipe(Recipe):
    """A recipe of paper A: an encoder that puts a text into one of several classes."""

    task: Literal["classification"]
    data: DataConfig
    training: ClassificationTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)
