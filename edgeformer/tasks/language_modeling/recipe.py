"""The part of a recipe that is language modelling's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.formats.data_config import Probability, TextConfig
from edgeformer.formats.recipe import Recipe, TrainingConfig


class LanguageTraining(TrainingConfig):
    """What only language modelling has; the checkpoint of the best validation loss is kept."""

    exit_weight: Probability = Field(
        0.3, description="λ of paper B, eq. 5: loss = (1 − λ) · final + λ · mean over the exits"
    )
    checkpointing: Literal["none", "loop", "cycles"] = Field(
        "none",
        description="recompute activations in the backward pass: loop keeps the input of each loop, "
        "cycles those of the attention and of every two TRM cycles (a little more kept, far less recomputed at once)",
    )
    chunked_loss: bool = Field(
        True, description="compute the vocabulary-sized logits a few hundred tokens at a time, never all at once"
    )
    score_padding: bool = Field(
        False, description="count padding as tokens to predict, as the published code does; reproduces its defect only"
    )


class LanguageRecipe(Recipe):
    """A recipe of paper B: a looped decoder that predicts the next token."""

    task: Literal["language-modeling"]
    data: TextConfig
    training: LanguageTraining
    allow_leak: bool = Field(
        False,
        description="train although the model sees the tokens it is asked to predict; everything made of it says so",
    )

    @model_validator(mode="after")
    def _padding_exists(self) -> Self:
        if self.training.score_padding and self.data.mode == "packed":
            raise ValueError("training.score_padding: packed rows have no padding; use data.mode: paragraphs")
        return self
