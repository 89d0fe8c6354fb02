"""The encoder's part of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.formats.data_config import PositiveFloat, PositiveInt, Probability
from edgeformer.formats.recipe import ModelConfig


class EncoderConfig(ModelConfig):
    """The encoder of paper A: ``layers`` shared layers, applied ``iterations`` times. Stacked is one iteration."""

    kind: Literal["encoder"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: PositiveInt
    iterations: PositiveInt
    heads: PositiveInt
    ffn_size: PositiveInt
    residual_scale: Annotated[float, Field(ge=0.0)] = Field(description="α in h ← F(h) + α·h; 0 for the stacked model")
    dropout: Probability = 0.1
    attention: Literal["sdpa", "flash"] = "sdpa"
    max_positions: PositiveInt = Field(512, description="rows of the rotary table: the longest input it takes")
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be heads ({self.heads}) × an even head size (rotary pairs)"
            )
        return self
