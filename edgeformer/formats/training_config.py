"""How weights are found: optimizer, learning-rate schedule, batches, and what each task adds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.sources import PositiveFloat, PositiveInt, Probability


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


Schedule = Annotated[
    ConstantSchedule | PlateauSchedule | OneCycleSchedule | CosineSchedule, Field(discriminator="kind")
]


class EarlyStopping(Frozen):
    """Stop after ``patience`` epochs without an improvement of validation loss by at least ``min_delta``."""

    patience: PositiveInt = 3
    min_delta: Annotated[float, Field(ge=0.0)] = 1e-3


class TrainingConfig(Frozen):
    """How the weights are found: what every task has in common.

    An optimizer step sees ``batch_size`` × ``accumulation`` rows (the effective batch), ``batch_size`` at a time.
    """

    epochs: PositiveInt
    batch_size: PositiveInt
    accumulation: PositiveInt = 1
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="auto: bf16 where this machine computes in it, fp16 on older CUDA cards, else fp32"
    )
    optimizer: OptimizerConfig
    schedule: Schedule
    clip_norm: PositiveFloat | None = 1.0
    batching: Literal["shuffled", "bucketed"] = Field(
        "shuffled", description="bucketed: batches of similar length, in random order"
    )
    early_stopping: EarlyStopping | None = None
    log_every: PositiveInt = 50


class ClassificationTraining(TrainingConfig):
    """What only classification has."""

    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )


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
