"""The part of a recipe that is classification's own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.formats.base import Frozen
from edgeformer.formats.data_config import DataConfig, PositiveFloat, Probability
from edgeformer.formats.recipe import Recipe, TrainingConfig


class Distillation(Frozen):
    """What a student learns of its teacher beside the labels; losses are sums over the rows, in nats."""

    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.7, description="of the teacher's answers (KL divergence × temperature²); the labels get the rest"
    )
    temperature: PositiveFloat = Field(2.0, description="answers of both are divided by it first")
    states: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="of the squared distance between both models' states after every iteration"
    )


class ClassificationTraining(TrainingConfig):
    """What only classification has."""

    folders: ClassVar[tuple[str, ...]] = ("teacher",)

    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: each layer learns at this share of the rate of the one behind it"
    )
    teacher: str | None = Field(None, description="a finished run, or its folder, whose answers are learned, too")
    teacher_sha256: str | None = Field(None, description="of its weights; filled in when training starts")
    distillation: Distillation = Distillation()
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )

    @model_validator(mode="after")
    def _somebody_teaches(self) -> Self:
        if self.teacher is None and self.distillation != Distillation():
            raise ValueError(
                "distillation: does nothing without a teacher; set teacher: to the folder of a finished run"
            )
        return self


class ClassificationRecipe(Recipe):
    """A recipe of paper A: an encoder that puts a text into one of several classes."""

    task: Literal["classification"]
    data: DataConfig
    training: ClassificationTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)
