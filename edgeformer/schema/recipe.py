"""Recipe: everything that decides what a training run computes. What ran is what is saved."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from edgeformer.schema.base import Frozen

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class HubSource(Frozen):
    """A split of a hub data set, read with the ``datasets`` library (a local data set folder works too)."""

    kind: Literal["hub"]
    name: str = Field(description="hub name (nyu-mll/glue) or the folder of a local data set")
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    text: str = "text"
    label: str | None = "label"
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False


class FileSource(Frozen):
    """A local file: TSV, CSV, JSONL, Parquet or plain text, also as .xz, .gz or .bz2."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the folder edgeformer is started in")
    format: Literal["tsv", "csv", "jsonl", "parquet", "text"] | None = Field(
        None, description="read from the file's suffix when absent"
    )
    text: str = "text"
    label: str | None = "label"
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False


class SyntheticSource(Frozen):
    """The built-in generator of synthetic product reviews (seeded). Not real text; for trying things out."""

    kind: Literal["synthetic-reviews"]
    rows: PositiveInt
    seed: Seed = 0


Source = Annotated[HubSource | FileSource | SyntheticSource, Field(discriminator="kind")]
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


class HubTokenizer(Frozen):
    """A tokenizer by hub name."""

    kind: Literal["hub"]
    name: str
    revision: str | None = None


class FileTokenizer(Frozen):
    """A ``tokenizer.json`` on this machine."""

    kind: Literal["file"]
    path: str


class TrainedTokenizer(Frozen):
    """A tokenizer trained on the run's own training text; its size is ``model.vocab_size``."""

    kind: Literal["trained"]
    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"


TokenizerConfig = Annotated[HubTokenizer | FileTokenizer | TrainedTokenizer, Field(discriminator="kind")]


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


class OptimizerConfig(Frozen):
    """AdamW. Weight decay acts on matrices only, not on biases and normalisation scales."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01


class ConstantSchedule(Frozen):
    """The learning rate stays as it is."""

    kind: Literal["constant"]


class PlateauSchedule(Frozen):
    """ReduceLROnPlateau on validation loss, stepped once per epoch."""

    kind: Literal["plateau"]
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    patience: Annotated[int, Field(ge=0)] = 2


class OneCycleSchedule(Frozen):
    """OneCycle over the whole run: ``warmup`` of it up to the optimizer's lr, then a cosine down."""

    kind: Literal["one-cycle"]
    warmup: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


class CosineSchedule(Frozen):
    """Linear warm-up over ``warmup`` of all steps, then a cosine down to ``final`` × lr."""

    kind: Literal["cosine"]
    warmup: Probability = 0.06
    final: Probability = 0.0


Schedule = Annotated[
    ConstantSchedule | PlateauSchedule | OneCycleSchedule | CosineSchedule, Field(discriminator="kind")
]


class EarlyStopping(Frozen):
    """Stop after ``patience`` epochs without an improvement of validation loss by at least ``min_delta``."""

    patience: PositiveInt = 3
    min_delta: Annotated[float, Field(ge=0.0)] = 1e-3


class TrainingConfig(Frozen):
    """How the weights are found. ``batch_size`` × ``accumulation`` is the effective batch."""

    epochs: PositiveInt
    batch_size: PositiveInt
    accumulation: PositiveInt = 1
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="auto: bf16 where this machine computes in it, fp16 on older CUDA cards, else fp32"
    )
    optimizer: OptimizerConfig
    schedule: Schedule
    clip_norm: PositiveFloat | None = 1.0
    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    batching: Literal["shuffled", "bucketed"] = Field(
        "shuffled", description="bucketed: batches of similar length, in random order"
    )
    early_stopping: EarlyStopping | None = None
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )
    log_every: PositiveInt = 50


class Recipe(Frozen):
    """A validated recipe file."""

    name: Name
    description: str = ""
    task: Literal["classification"]
    target: Name | None = Field(None, description="device profile that plan and profile use by default")
    seed: Seed = 42
    data: DataConfig
    tokenizer: TokenizerConfig
    model: EncoderConfig
    training: TrainingConfig

    @model_validator(mode="after")
    def _lengths_fit(self) -> Recipe:
        if self.data.max_length > self.model.max_positions:
            raise ValueError(
                f"data.max_length {self.data.max_length} is longer than model.max_positions {self.model.max_positions}"
            )
        return self

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)

    def to_yaml(self) -> str:
        """The resolved recipe as a recipe file: every default spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """sha256 of the resolved recipe; equal recipes are the same run."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
