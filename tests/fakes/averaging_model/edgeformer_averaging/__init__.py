"""A second family of classifiers, complete: the average of a text's embeddings, refined by one shared block.

This folder is what a package brings that adds a family to edgeformer: a module with a ``MODEL``, its torch half, and
its entry point (in the ``dist-info`` folder beside it). Put the folder that holds both on the path to install it.
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
    max_positions: PositiveInt = Field(512, description="the longest input it takes")


class Averaging(ModelSpec):
    """See this module."""

    kind: ClassVar[str] = "averaging"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    config_type: ClassVar[type[ModelConfig]] = AveragingConfig
    model_type: ClassVar[str] = "averaging"
    architecture: ClassVar[str] = "AveragingClassifier"
    adapter_module: ClassVar[str] = "edgeformer_averaging.network"

    def loops(self, config: AveragingConfig) -> int:
        """Rounds."""
        return config.rounds

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        """The run's, and how often a host runs the loop graph."""
        return {**config, "iterations": config["rounds"]}

    def card_line(self, config: AveragingConfig) -> str:
        """See :meth:`Family.card_line`."""
        return f"averaged embeddings of width {config.width}, one block ({config.inner_width}) × {config.rounds} rounds"


MODEL = Averaging()

TINY = {"width": 16, "inner_width": 24, "rounds": 2}
"""The smallest ``model`` section that means something, for the conformance suite."""
