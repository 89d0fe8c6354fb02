"""The part of a recipe that is multi-label classification's own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.data.labelled import MOST_LABELS
from edgeformer.formats.data_config import DataConfig, Probability
from edgeformer.formats.recipe import Recipe, TrainingConfig

USUAL = 0.5
Threshold = Annotated[float, Field(gt=0.0, lt=1.0)]


class MultiLabelData(DataConfig):
    """As a classifier's, but a row has none, one or several of the labels: a list in JSON Lines and Parquet, one text
    in tables, where an empty cell is a row without any."""

    label_separator: Annotated[str, Field(min_length=1)] = Field(
        description="what stands between the labels of a row in a table's cell; spaces around it do not count"
    )
    thresholds: dict[str, Threshold] | None = Field(
        None,
        description="label → probability from which on it is given; left out: found on the validation set at the end "
        "of training, and kept in run.json",
    )

    @property
    def separator(self) -> str | None:
        return self.label_separator

    @property
    def limits(self) -> dict[str, float]:
        """Label → probability from which on it is given, also where none was found or stated."""
        return {**self.thresholds} if self.thresholds is not None else dict.fromkeys(self.labels, USUAL)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.stream:
            raise ValueError("stream: is not possible with several labels per text; leave it out")
        if self.balance in ("label", "label-and-source"):
            raise ValueError("balance: a text with several labels counts for each of them; balance: source is possible")
        if len(self.labels) > MOST_LABELS:
            raise ValueError(f"labels: at most {MOST_LABELS} where a text can have several, not {len(self.labels)}")
        if self.thresholds is not None and set(self.thresholds) != set(self.labels):
            raise ValueError(f"thresholds: needs one for each of the labels {', '.join(self.labels)}, or leave it out")
        torn = next((label for label in self.labels if self.label_separator in label), None)
        if torn is not None:
            raise ValueError(f"label_separator: is in the label {torn!r}; choose another one")
        return self


class MultiLabelTraining(TrainingConfig):
    """What only multi-label classification has."""

    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: each layer learns at this share of the rate of the one behind it"
    )
    select_by: Literal["loss", "f1"] = Field(
        "loss",
        description="the validation metric that picks the epoch whose weights are kept; F1 at the thresholds that are "
        "best there",
    )


class MultiLabelRecipe(Recipe):
    """A recipe for an encoder that gives a text any number of labels."""

    task: Literal["multi-label-classification"]
    data: MultiLabelData
    training: MultiLabelTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)
