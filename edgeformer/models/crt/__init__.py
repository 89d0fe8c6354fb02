"""CRT-Deep (paper B): a decoder with one looped block and exits on the way."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataSection, PositiveFloat, PositiveInt, Probability
from edgeformer.artifacts.recipe import Attention, ModelConfig, TrainingConfig
from edgeformer.models import ModelSpec


class CRTConfig(ModelConfig):
    """CRT-Deep (paper B, section 3.1): one shared block, applied ``loops`` times."""

    derived: ClassVar[tuple[str, ...]] = ("attention",)

    kind: Literal["crt"]
    hidden_size: PositiveInt = Field(512, description="width")
    embedding_size: PositiveInt = Field(
        256, description="width of the token table before its projection to hidden_size"
    )
    embedding_projection: bool = Field(
        True,
        description="false: the token table has the width of the model, as in the released code",
    )
    embedding_cycles: Annotated[int, Field(ge=0)] = Field(3, description="TRM cycles that refine the embeddings")
    attention_heads: PositiveInt = Field(8, description="number of heads, a divisor of hidden_size")
    ffn_size: PositiveInt = Field(2048, description="inner width of the MLP of a TRM cycle")
    loops: PositiveInt = Field(8, description="applications of the shared block")
    cycles: PositiveInt = Field(8, description="TRM cycles in the shared block")
    dilations: Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)] = Field(
        (1, 2, 4, 8), description="dilations of the convolutions of the TRM cycles, in turn"
    )
    exits: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (2, 4, 6), description="loops after which the model can answer, besides the last loop"
    )
    heads: Literal["shared", "separate", "tied"] = Field(
        "shared", description="heads of the exits: one for all exits, one per exit, or the final head"
    )
    max_positions: PositiveInt = Field(1024, description="longest input in tokens: rows of the position table")
    dropout: Probability = Field(0.1, description="dropout in training")
    norm: Literal["layer", "rms", "batch", "none"] = Field(
        "layer", description="batch: the model sees future tokens in training, because batch statistics mix all tokens"
    )
    norm_eps: PositiveFloat = Field(1e-5, description="ε of the norms")
    trm: Literal["conv_linear", "conv", "linear", "depthwise"] = Field(
        "conv_linear", description="what a TRM cycle computes (paper B, Table 3)"
    )
    causal: bool = Field(
        True, description="false: convolutions see future tokens, as in the published code; such scores are void"
    )
    attention: Attention = "sdpa"

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.hidden_size % self.attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of attention_heads ({self.attention_heads})"
            )
        if list(self.exits) != sorted(set(self.exits)) or any(exit_ >= self.loops for exit_ in self.exits):
            raise ValueError(
                f"exits must be increasing loops before the last one ({self.loops}), not {list(self.exits)}"
            )
        if self.attention != "sdpa" and (self.norm == "batch" or not self.causal):
            raise ValueError("attention must be sdpa with norm: batch or causal: false, which read padding")
        if not self.embedding_projection and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"embedding_projection: false needs embedding_size {self.hidden_size} (hidden_size), not "
                f"{self.embedding_size}"
            )
        return self

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        if getattr(training, "exit_weight", 0) and not self.exits:
            raise ValueError("training.exit_weight has no effect without model.exits; set it to 0, or add exits")
        if self.norm == "batch" and getattr(training, "checkpointing", "none") != "none":
            raise ValueError(
                "training.checkpointing is not possible with model.norm: batch, which counts batches twice; use none"
            )
        if not self.causal and getattr(data, "mode", None) == "packed":
            raise ValueError(
                "model.causal: false is not possible with data.mode: packed; use paragraphs, as the published code does"
            )


class CRTDeep(ModelSpec):
    """One shared block of attention and dilated convolutions, applied L times."""

    kind = "crt"
    tasks = ("language-modeling",)
    config_type = CRTConfig
    model_type = "edgeformer-crt"
    architecture = "CRT"
    adapter_module = "edgeformer.models.crt.adapter"
    tags = ("weight-sharing", "recurrent-depth", "early-exit", "edge", "onnx")

    def loops(self, config: CRTConfig) -> int:
        return config.loops

    def trained_exits(self, config: CRTConfig) -> tuple[int, ...]:
        return (*config.exits, config.loops)

    def leaks(self, config: CRTConfig) -> bool:
        return not config.causal

    def card_line(self, config: CRTConfig) -> str:
        loops = ", ".join(map(str, config.exits))
        exits = f"exits after {loops} ({config.heads} heads)" if config.exits else "no early exit"
        return (
            f"one shared block × {config.loops} loops, {config.cycles} TRM cycles ({config.trm}), "
            f"{exits}; width {config.hidden_size}, {config.attention_heads} heads, "
            f"FFN {config.ffn_size}, {config.norm} norm; {config.vocab_size:,} tokens"
        )


MODEL = CRTDeep()
