"""Looped decoder: Llama's layers, all of them applied ``iterations`` times; one iteration is an ordinary decoder."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataSection, PositiveFloat, PositiveInt, Probability
from edgeformer.artifacts.recipe import Attention, ModelConfig, TrainingConfig
from edgeformer.models import ModelSpec

LOOPED = "nanbeige"
"""llama.cpp's architecture whose layers are applied ``num_loops`` times, with keys and values for each loop and layer
(llama.cpp#25994)."""


class DecoderConfig(ModelConfig):
    """Causal decoder of ``layers`` layers with RMSNorm, RoPE, grouped queries and SwiGLU, looped as a whole.

    The final norm follows every iteration, as in Nanbeige's looped models, which llama.cpp runs.
    """

    kind: Literal["decoder"]
    hidden_size: PositiveInt = Field(description="width")
    layers: PositiveInt = Field(description="layers with distinct weights")
    iterations: PositiveInt = Field(1, description="applications of all layers")
    heads: PositiveInt = Field(description="heads of the queries")
    kv_heads: PositiveInt = Field(description="heads of keys and values, a divisor of heads")
    head_size: PositiveInt | None = Field(None, description="width of a head, even; null: hidden_size / heads")
    ffn_size: PositiveInt = Field(description="inner width of the feed-forward network")
    exits: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False)] = Field(
        None, description="iterations after which the model can answer, besides the last one; null: all"
    )
    fold: Literal["stepwise", "average"] | None = Field(
        None,
        description="begin with layers of training.teacher, a decoder without iterations: every n-th one, or the mean "
        "of those that a layer replaces; null: random weights",
    )
    tied: bool = Field(True, description="the head is the token table")
    qkv_bias: bool = Field(False, description="biases of queries, keys and values, as in Qwen2")
    qk_norm: bool = Field(False, description="RMSNorm of every query and key, as in Qwen3")
    max_positions: PositiveInt = Field(2048, description="longest input in tokens: rows of the rotary table")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
    norm_eps: PositiveFloat = Field(1e-5, description="ε of the norms")
    dropout: Probability = Field(0.0, description="dropout in training")
    attention: Attention = "sdpa"

    @property
    def head_width(self) -> int:
        return self.head_size or self.hidden_size // self.heads

    @property
    def all_exits(self) -> tuple[int, ...]:
        """Iterations after which the model can answer, the last one last."""
        exits = range(1, self.iterations) if self.exits is None else self.exits
        return (*exits, self.iterations)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of heads ({self.heads})")
        if self.head_width % 2:
            raise ValueError(f"head_size must be even for rotary positions, not {self.head_width}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must be a divisor of heads ({self.heads}), not {self.kv_heads}")
        if list(self.all_exits) != sorted(set(self.all_exits)):
            raise ValueError(
                f"exits must be increasing iterations before the last one ({self.iterations}), not "
                f"{list(self.exits or ())}"
            )
        return self

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        if getattr(training, "exit_weight", 0) and len(self.all_exits) == 1:
            raise ValueError("training.exit_weight has no effect without early exits; set it to 0")
        if self.fold is not None and getattr(training, "teacher", None) is None:
            raise ValueError("model.fold needs training.teacher, the decoder whose layers are folded")
        if getattr(training, "checkpointing", "none") == "cycles":
            raise ValueError("training.checkpointing: cycles exists for model.kind: crt only; use loop")


class LoopedDecoder(ModelSpec):
    """Llama's layers, applied several times."""

    kind = "decoder"
    tasks = ("language-modeling",)
    config_type = DecoderConfig
    model_type = "edgeformer-decoder"
    architecture = "LoopedDecoder"
    adapter_module = "edgeformer.models.decoder.adapter"
    tags = ("weight-sharing", "recurrent-depth", "early-exit", "edge", "onnx", "llama-cpp")

    def loops(self, config: DecoderConfig) -> int:
        return config.iterations

    def trained_exits(self, config: DecoderConfig) -> tuple[int, ...]:
        return config.all_exits

    def card_line(self, config: DecoderConfig) -> str:
        times = f" × {config.iterations} iterations" if config.iterations > 1 else ""
        return (
            f"{config.layers} layers{times}; width {config.hidden_size}, {config.heads} heads ({config.kv_heads} for "
            f"keys and values), FFN {config.ffn_size}; {config.vocab_size:,} tokens"
        )


MODEL = LoopedDecoder()
