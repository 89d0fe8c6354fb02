"""The recipe of a language model (paper B): text, CRT-Deep, training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from edgeformer.formats.base import Frozen
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.sources import Name, PositiveFloat, PositiveInt, Probability, Source
from edgeformer.formats.training_config import LanguageTraining


class TextConfig(Frozen):
    """Running text, one paragraph per line or row, and how it becomes rows of tokens.

    ``paragraphs``  one row per paragraph: boundary token, text, boundary token; longer ones are cut; padding is masked
    ``packed``      the same documents end to end in rows of exactly ``sequence_length``, without padding; attention
                    and convolutions do not look across the boundary of a document, positions start again behind it
    """

    parts: dict[Name, Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]] = Field(
        description="train, validation, and any number of test sets by name"
    )
    mode: Literal["paragraphs", "packed"]
    sequence_length: Annotated[int, Field(ge=8)] = Field(description="tokens that the model reads at once")
    min_characters: Annotated[int, Field(ge=0)] = Field(50, description="only paragraphs with more characters are used")
    first_n: PositiveInt | None = Field(None, description="train on the first n paragraphs only")

    @field_validator("parts")
    @classmethod
    def _has_both(cls, parts: dict[str, tuple[Source, ...]]) -> dict[str, tuple[Source, ...]]:
        missing = [part for part in ("train", "validation") if part not in parts]
        if missing:
            raise ValueError(f"needs the parts train and validation; missing: {', '.join(missing)}")
        return parts


class CRTConfig(Frozen):
    """CRT-Deep (paper B, section 3.1): one shared block, applied ``loops`` times, with exits on the way."""

    kind: Literal["crt"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt = 512
    embedding_size: PositiveInt = Field(256, description="width of the token table, before its projection")
    embedding_cycles: Annotated[int, Field(ge=0)] = Field(3, description="TRM cycles that refine the embeddings")
    attention_heads: PositiveInt = 8
    ffn_size: PositiveInt = Field(2048, description="inner width of the MLP of a TRM cycle")
    loops: PositiveInt = 8
    cycles: PositiveInt = Field(8, description="TRM cycles in the shared block")
    dilations: Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)] = (1, 2, 4, 8)
    exits: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (2, 4, 6), description="loops after which the model can answer; the last loop always can"
    )
    heads: Literal["shared", "separate", "tied"] = Field(
        "shared", description="exit heads: one for all exits, one for each, or the final head itself"
    )
    max_positions: PositiveInt = Field(1024, description="rows of the position table: the longest input it takes")
    dropout: Probability = 0.1
    norm: Literal["layer", "rms", "batch", "none"] = Field(
        "layer", description="batch: its statistics mix all tokens of a batch in training, later ones too"
    )
    norm_eps: PositiveFloat = 1e-5
    trm: Literal["conv_linear", "conv", "linear", "depthwise"] = Field(
        "conv_linear", description="what a TRM cycle computes (paper B, Table 3)"
    )
    causal: bool = Field(True, description="false: convolutions look ahead, as published; such a model cheats")

    @model_validator(mode="after")
    def _consistent(self) -> CRTConfig:
        if self.hidden_size % self.attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of attention_heads")
        if list(self.exits) != sorted(set(self.exits)) or any(exit_ >= self.loops for exit_ in self.exits):
            raise ValueError(f"exits must rise and lie before the last loop ({self.loops}), not {list(self.exits)}")
        return self


class LanguageRecipe(Recipe):
    """A recipe of paper B: a looped decoder that predicts the next token."""

    task: Literal["language-modeling"]
    data: TextConfig
    model: CRTConfig
    training: LanguageTraining
    allow_leak: bool = Field(
        False,
        description="train although the model sees the tokens it is asked to predict; everything made of it says so",
    )

    @model_validator(mode="after")
    def _lengths_fit(self) -> LanguageRecipe:
        if self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than model.max_positions "
                f"{self.model.max_positions}"
            )
        if self.training.exit_weight and not self.model.exits:
            raise ValueError("training.exit_weight needs model.exits; without exits set it to 0")
        if self.training.score_padding and self.data.mode == "packed":
            raise ValueError("training.score_padding: packed rows have no padding; use data.mode: paragraphs")
        if self.model.norm == "batch" and self.training.checkpointing != "none":
            raise ValueError("training.checkpointing: model.norm: batch would count every batch twice; use none")
        if not self.model.causal and self.data.mode == "packed":
            raise ValueError("model.causal: false exists for data.mode: paragraphs only (the published protocol)")
        return self
