"""What a model family is to the rest of the house, without torch: its configuration and what follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from edgeformer.formats.manifest import Precision
from edgeformer.formats.recipe import ModelConfig

if TYPE_CHECKING:
    from edgeformer.families.network import Network


class Family(ABC):
    """One model family. Where a method takes ``config`` it is of this family's own type.

    Attributes:
        kind: a recipe's ``model.kind``.
        tasks: names of the tasks that it can be trained for.
        config_type: its part of a recipe.
        model_type, architecture: what config.json calls it.
        network_module: where the torch half is, as ``NETWORK``; imported when it is first needed.
    """

    kind: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    config_type: ClassVar[type[ModelConfig]]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    network_module: ClassVar[str]

    @property
    def network(self) -> Network:
        """The torch half. Raises ModuleNotFoundError where torch is not installed."""
        found: Network = import_module(self.network_module).NETWORK
        return found

    @abstractmethod
    def loops(self, config: Any) -> int:
        """How often the shared part is applied; 1 for a model without recurrence."""

    def trained_exits(self, config: Any) -> tuple[int, ...]:
        """Loops after which a head of the model was trained to answer, the last loop last; empty: only at the end."""
        return ()

    def leaks(self, config: Any) -> bool:
        """Whether the architecture itself sees what it is asked to predict."""
        return False

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        """A bundle's config.json from the run's, as clients of Hugging Face repositories can open it.

        For a classifier with a step bundle it has ``iterations``: how often a host runs the loop graph.

        Args:
            config: the run's config.json; with the vocabulary's new size where that was trimmed.
            precision: of the graph that a client gets which does not ask for one.
        """
        return dict(config)

    @abstractmethod
    def card_line(self, config: Any) -> str:
        """What the model is, for its card: layers, loops, widths."""

    def tags(self) -> tuple[str, ...]:
        """What model hubs file it under."""
        return ("weight-sharing", "recurrent-depth", "edge", "onnx")
