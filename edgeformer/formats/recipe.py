"""Recipe: everything that decides what a training run computes. What ran is what is saved."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from edgeformer.formats.base import Frozen
from edgeformer.formats.sources import Name, PositiveFloat, PositiveInt, Probability, Seed, Source, TokenizerConfig
from edgeformer.formats.training_config import ClassificationTraining

SplitProtocol = Literal["random-split", "glue-dev", "sst-test", "given"]


class DataConfig(Frozen):
    """Where the text comes from and which protocol cuts it into train, validation and test.

    ``random-split``  parts ``train`` + ``validation`` pooled, shuffled by ``split_seed``, cut 80/10/10
    ``glue-dev``      trains on part ``train`` less a tenth held out as validation; tests on part ``validation``
    ``sst-test``      parts ``train``, ``validation``; tests on part ``sst-test``
    ``given``         parts ``train``, ``validation`` (else a tenth of train), ``test``

    A part that the protocol does not use is scored as a further test set under its own name.
    """

    parts: dict[Name, Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]]
    split: SplitProtocol
    split_seed: Seed = 42
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    cleaning: Literal["paper", "none"] = "paper"
    max_length: Annotated[int, Field(ge=4)] = Field(128, description="tokens, special tokens included")

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) != len(labels):
            raise ValueError("label names must differ from each other")
        return labels

    @model_validator(mode="after")
    def _protocol_has_its_parts(self) -> DataConfig:
        needs = {
            "random-split": ("train",),
            "glue-dev": ("train", "validation"),
            "sst-test": ("train", "validation", "sst-test"),
            "given": ("train", "test"),
        }[self.split]
        missing = [part for part in needs if part not in self.parts]
        if missing:
            raise ValueError(f"split {self.split!r} needs the parts {', '.join(needs)}; missing: {', '.join(missing)}")
        return self


class EncoderConfig(Frozen):
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
    def _heads_divide(self) -> EncoderConfig:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be heads ({self.heads}) × an even head size (rotary pairs)"
            )
        return self


class Recipe(Frozen):
    """What every recipe has; each task adds its own ``data``, ``model`` and ``training``."""

    name: Name
    description: str = ""
    task: str
    target: Name | None = Field(None, description="device profile that plan and profile use by default")
    seed: Seed = 42
    tokenizer: TokenizerConfig

    def to_yaml(self) -> str:
        """The resolved recipe as a recipe file: every default spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """sha256 of the resolved recipe; equal recipes are the same run."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class ClassificationRecipe(Recipe):
    """A recipe of paper A: an encoder that puts a text into one of several classes."""

    task: Literal["classification"]
    data: DataConfig
    model: EncoderConfig
    training: ClassificationTraining

    @model_validator(mode="after")
    def _lengths_fit(self) -> ClassificationRecipe:
        if self.data.max_length > self.model.max_positions:
            raise ValueError(
                f"data.max_length {self.data.max_length} is longer than model.max_positions {self.model.max_positions}"
            )
        return self

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)
