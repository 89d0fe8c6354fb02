"""What a model family is to the rest of the house, without torch: its configuration and what follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from edgeformer.artifacts.manifest import Precision, client_dtype
from edgeformer.artifacts.recipe import ModelConfig

if TYPE_CHECKING:
    from edgeformer.models.adapter import ModelAdapter


CLIENT_TYPE = "distilbert"
"""Clients only open a ``model_type`` that they know, and take from it which inputs to send. To them DistilBERT is any
text encoder that takes ``input_ids`` and ``attention_mask`` and nothing else, which is what our graphs are: the layers
themselves are in the graph, and no client of one looks at them."""


def text_client_config(config: Mapping[str, Any], precision: Precision, **sizes: int) -> dict[str, Any]:
    """A text encoder's config.json for clients (:data:`CLIENT_TYPE`); the true description is under ``edgeformer``.

    Args:
        config: the run's config.json.
        precision: of the graph that a client gets which does not ask for one.
        sizes: ``layers`` that a text goes through, ``heads``, ``hidden_size``, and ``iterations``: how often a host
            runs the loop graph of a step bundle.
    """
    known = ("id2label", "label2id", "thresholds")
    return {
        "model_type": CLIENT_TYPE,
        "architectures": config["architectures"],
        **({"problem_type": config.get("problem_type", "single_label_classification")} if "id2label" in config else {}),
        "vocab_size": config["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["layers"],
        "iterations": sizes["iterations"],
        "num_attention_heads": sizes["heads"],
        "max_position_embeddings": config["max_positions"],
        "pad_token_id": config["pad_token_id"],
        **{key: config[key] for key in known if key in config},
        # In a browser Transformers.js would otherwise look for a file that is not there (model_quantized.onnx).
        "transformers.js_config": {"dtype": client_dtype(precision)},
        "edgeformer": dict(config),
    }


class ModelSpec(ABC):
    """One model family. Where a method takes ``config`` it is of this family's own type.

    Attributes:
        kind: a recipe's ``model.kind``.
        tasks: names of the tasks that it can be trained for.
        config_type: its part of a recipe.
        model_type, architecture: what config.json calls it.
        network_module: where the torch half is, as ``ADAPTER``; imported when it is first needed.
        completed: keys that a recipe may leave out although they have no default: :meth:`complete` finds their values.
    """

    kind: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    config_type: ClassVar[type[ModelConfig]]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    adapter_module: ClassVar[str]
    completed: ClassVar[tuple[str, ...]] = ()

    @property
    def adapter(self) -> ModelAdapter:
        """The torch half. Raises ModuleNotFoundError where torch is not installed."""
        found: ModelAdapter = import_module(self.adapter_module).ADAPTER
        return found

    def complete(self, document: dict[str, Any]) -> None:  # noqa: B027 - most families leave nothing out
        """Fill in, in place, what a recipe leaves to the files that its model is made of.

        Args:
            document: a recipe as it was written, not validated yet; it may hold anything.

        Raises:
            InputError, ArtifactError: such a file is missing or cannot be used.
        """

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
