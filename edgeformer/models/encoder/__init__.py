"""Encoder of paper A: N layers applied R times; the stacked baseline is R = 1."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataSection, PositiveFloat, PositiveInt, Probability
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import Attention, ModelConfig, TrainingConfig
from edgeformer.models import ModelSpec, text_client_config


class EncoderConfig(ModelConfig):
    """Encoder of paper A: ``layers`` shared layers, applied ``iterations`` times; stacked is one iteration."""

    kind: Literal["encoder"]
    hidden_size: PositiveInt = Field(description="width")
    layers: PositiveInt = Field(description="layers with distinct weights")
    iterations: PositiveInt = Field(description="applications of all layers")
    heads: PositiveInt = Field(description="attention heads, a divisor of hidden_size")
    ffn_size: PositiveInt = Field(description="inner width of the feed-forward network")
    residual_scale: Annotated[float, Field(ge=0.0)] = Field(description="α in h ← F(h) + α·h; 0 for the stacked model")
    dropout: Probability = Field(0.1, description="dropout in training")
    attention: Attention = "auto"
    max_positions: PositiveInt = Field(512, description="longest input in tokens: rows of the rotary table")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
    norm_eps: PositiveFloat = Field(1e-6, description="ε of the norms")

    @model_validator(mode="after")
    def _check_head_size(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be heads ({self.heads}) × an even number, for rotary positions"
            )
        return self

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        if getattr(training, "layer_decay", 1.0) != 1.0:
            raise ValueError(
                "training.layer_decay applies to pretrained encoders only; leave it out, or use model.kind: pretrained"
            )


class Encoder(ModelSpec):
    """Shared layers with RoPE, RMSNorm and SwiGLU."""

    kind = "encoder"
    tasks = ("classification", "multi-label-classification", "token-classification", "regression")
    config_type = EncoderConfig
    model_type = "edgeformer-encoder"
    architecture = "EncoderClassifier"
    adapter_module = "edgeformer.models.encoder.adapter"

    def loops(self, config: EncoderConfig) -> int:
        return config.iterations

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        return text_client_config(
            config, precision, layers=config["layers"] * config["iterations"], heads=config["heads"],
            hidden_size=config["hidden_size"], iterations=config["iterations"],
        )  # fmt: skip

    def card_line(self, config: EncoderConfig) -> str:
        layers = "1 layer" if config.layers == 1 else f"{config.layers} layers"
        return (
            f"{layers} × {config.iterations} iterations, width {config.hidden_size}, "
            f"{config.heads} heads, FFN {config.ffn_size}, α = {config.residual_scale}"
        )


MODEL = Encoder()
