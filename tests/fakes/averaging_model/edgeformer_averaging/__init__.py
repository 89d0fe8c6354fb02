"""Example of a package that adds a model: averaged embeddings of a text, refined by one shared block.

It consists of a module with ``MODEL``, a module with ``ADAPTER``, and an entry point in the ``dist-info`` folder. It is
installed by putting the folder that holds both on the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from edgeformer.artifacts.data_config import PositiveInt, Probability
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import ModelConfig
from edgeformer.models import ModelSpec


class AveragingConfig(ModelConfig):
    """One residual block, applied ``rounds`` times to the average of a text's embeddings. It has no positions."""

    kind: Literal["averaging"]
    width: PositiveInt
    inner_width: PositiveInt
    rounds: PositiveInt
    dropout: Probability = 0.1
    max_positions: PositiveInt = Field(512, description="longest input in tokens")


class Averaging(ModelSpec):
    """Averaged embeddings with a looped block."""

    kind: ClassVar[str] = "averaging"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    config_type: ClassVar[type[ModelConfig]] = AveragingConfig
    model_type: ClassVar[str] = "averaging"
    architecture: ClassVar[str] = "AveragingClassifier"
    adapter_module: ClassVar[str] = "edgeformer_averaging.adapter"

    def loops(self, config: AveragingConfig) -> int:
        return config.rounds

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        return {**config, "iterations": config["rounds"]}

    def card_line(self, config: AveragingConfig) -> str:
        return f"averaged embeddings of width {config.width}, one block ({config.inner_width}) × {config.rounds} rounds"


MODEL = Averaging()

TINY = {"width": 16, "inner_width": 24, "rounds": 2}
"""A small ``model`` section for the conformance suite."""
