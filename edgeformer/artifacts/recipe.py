"""Recipe: everything that decides what a training run computes. What ran is what is saved."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import (
    DataSection,
    Name,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    TokenizerConfig,
    stated,
)


class OptimizerConfig(Frozen):
    """AdamW. Weight decay acts on matrices only, not on biases and normalisation scales."""

    later: ClassVar[tuple[str, ...]] = ("kernels",)
    """Keys that recipes did not always have; a recipe's fingerprint leaves those out that say nothing new."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = Field(description="learning rate at its highest")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    kernels: Literal["fused", "foreach", "loop"] = Field(
        "fused",
        description="a step in one kernel, in one for each operation on all weights, or in one for each operation on "
        "each weight; the same result but for rounding. `fused` alone allocates nothing: where memory runs out inside "
        "a step of the others, some weights have changed, and the run ends",
    )


class ConstantSchedule(Frozen):
    """The learning rate stays as it is."""

    kind: Literal["constant"]


class PlateauSchedule(Frozen):
    """ReduceLROnPlateau on validation loss, stepped once per epoch."""

    kind: Literal["plateau"]
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    patience: Annotated[int, Field(ge=0)] = Field(
        2, description="bad epochs that are let pass, as torch counts: with 1 the second one in a row reduces the rate"
    )


class OneCycleSchedule(Frozen):
    """OneCycle over the whole run: ``warmup`` of it up to the optimizer's lr, then a cosine down."""

    kind: Literal["one-cycle"]
    warmup: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


class CosineSchedule(Frozen):
    """Linear warm-up over ``warmup`` of all steps, then a cosine down to ``final`` × lr."""

    kind: Literal["cosine"]
    warmup: Probability = 0.06
    final: Probability = 0.0


class LinearSchedule(Frozen):
    """Linear warm-up over ``warmup`` of all steps, then a line down to ``final`` × lr: how encoders are fine-tuned."""

    kind: Literal["linear"]
    warmup: Probability = 0.06
    final: Probability = 0.0


Schedule = Annotated[
    ConstantSchedule | PlateauSchedule | OneCycleSchedule | CosineSchedule | LinearSchedule,
    Field(discriminator="kind"),
]


class EarlyStopping(Frozen):
    """Stop after ``patience`` epochs without an improvement of validation loss by at least ``min_delta``."""

    patience: PositiveInt = 3
    min_delta: Annotated[float, Field(ge=0.0)] = 1e-3


class CompileConfig(Frozen):
    """torch.compile for the steps of training; what is scored is computed without it."""

    shapes: PositiveInt = Field(
        8, description="most shapes of a batch that are compiled: rows are padded to one of so many lengths, and a "
        "batch of fewer rows, as an epoch's last, is computed without"
    )  # fmt: skip


class TrainingConfig(Frozen):
    """How the weights are found: what every task has in common.

    An optimizer step sees ``batch_size`` × ``accumulation`` rows, ``batch_size`` at a time.
    """

    folders: ClassVar[tuple[str, ...]] = ()
    """Keys that may name a folder, which is then found from the recipe's own."""
    later: ClassVar[tuple[str, ...]] = ("tf32", "compile")
    """As of :class:`OptimizerConfig`."""

    epochs: PositiveInt = Field(description="times that every training row is seen")
    batch_size: PositiveInt = Field(description="rows at a time")
    accumulation: PositiveInt = Field(1, description="batches of an optimizer step")
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="auto: bf16 where this machine computes in it, fp16 on older CUDA cards, else fp32"
    )
    optimizer: OptimizerConfig
    schedule: Schedule
    clip_norm: PositiveFloat | None = Field(1.0, description="longer gradients are cut to this length")
    batching: Literal["shuffled", "bucketed"] = Field(
        "shuffled", description="bucketed: batches of similar length, in random order"
    )
    early_stopping: EarlyStopping | None = None
    log_every: PositiveInt = Field(50, description="steps between two lines of metrics.jsonl")
    checkpoint_minutes: PositiveFloat = Field(
        10.0, description="a state to resume from is saved this often within an epoch too; decides nothing else"
    )
    tf32: bool = Field(
        False,
        description="cut factors of float32 products to 10 bits of mantissa in the steps of training: faster on CUDA "
        "cards from compute capability 8.0 on; scores are computed in full",
    )
    pinned_memory: bool | None = Field(
        None,
        description="batches go to a CUDA card out of page-locked memory, while it computes; absent: they do on a card",
    )
    compile: CompileConfig | None = None

    @property
    def effective_batch(self) -> int:
        """Rows of an optimizer step."""
        return self.batch_size * self.accumulation


class ModelConfig(Frozen):
    """A recipe's ``model``: what every family's configuration has; ``kind`` names the family."""

    folders: ClassVar[tuple[str, ...]] = ()
    """Keys that may name a folder, which is then found from the recipe's own."""
    later: ClassVar[tuple[str, ...]] = ()
    """As of :class:`OptimizerConfig`."""

    kind: str
    vocab_size: PositiveInt = Field(description="tokens; a trained tokenizer learns at most so many")
    max_positions: PositiveInt = Field(description="the longest input in tokens")

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        """Whether the rest of a recipe fits this model. Raises ValueError where it does not."""


class Recipe(Frozen):
    """What every recipe has. A task narrows ``data`` and ``training``, a family ``model``."""

    name: Name = Field(description="runs are called so, with a number behind it")
    description: str = Field("", description="one line, for lists and model cards")
    task: str
    target: Name | None = Field(None, description="device profile that plan and profile use by default")
    seed: Seed = Field(42, description="of weights, order of rows and dropout")
    tokenizer: TokenizerConfig
    data: DataSection
    model: ModelConfig
    training: TrainingConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.data.tokens_at_once > self.model.max_positions:
            raise ValueError(
                f"data.{self.data.length_key} {self.data.tokens_at_once} is longer than model.max_positions "
                f"{self.model.max_positions}"
            )
        self.model.check_recipe(self.data, self.training)
        return self

    def with_vocabulary(self, size: int) -> Self:
        """Return the same recipe with ``model.vocab_size`` tokens."""
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab_size": size})})

    def to_yaml(self) -> str:
        """The resolved recipe as a recipe file: every default spelled out."""
        import yaml  # of everything that imports recipes, only this writes one

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """sha256 of the resolved recipe, less what decides nothing of the weights; equal recipes are the same run."""
        left_out = {
            "training": {"checkpoint_minutes", "pinned_memory", *_unsaid(self.training)},
            "data": {"thresholds", "expected_rows"},
            "model": _unsaid(self.model),
        }
        decisive = self.model_dump(mode="json", exclude=left_out)
        for key in _unsaid(self.training.optimizer):
            del decisive["training"]["optimizer"][key]
        text = json.dumps({**decisive, "data": stated(decisive["data"])}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _unsaid(section: OptimizerConfig | TrainingConfig | ModelConfig) -> set[str]:
    """Later keys of a section that are at their defaults."""
    fields = type(section).model_fields
    return {key for key in section.later if getattr(section, key) == fields[key].default}
