"""The torch half of a model family: building it, its loss, and what training and export ask of it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import AttentionUse, Causality
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.models.tracing import Graphs
from edgeformer.tasks import Prepared

M = TypeVar("M", bound=nn.Module)

Batch = Mapping[str, Tensor]
"""Arrays of the same rows, int64 [B, …], and what a family added to them."""


@dataclass(frozen=True)
class Losses:
    """Sums over what counts in a micro-batch, in nats: the one to minimise, and named parts of it for the log."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[nn.Module, Batch], Losses]
"""A model, perhaps wrapped for a number format, and a micro-batch → summed losses, with gradients."""


@dataclass(frozen=True)
class Place:
    """Where a model will compute, and in what.

    Attributes:
        for_export: it will be traced, so that only operators that can be exported may be used.
    """

    device_type: str = "cpu"
    precision: str = "fp32"
    for_export: bool = False


@dataclass(frozen=True)
class Learning:
    """How a parameter is learned: with which share of the learning rate, and whether weight decay acts on it."""

    parameter: nn.Parameter
    rate: float = 1.0
    decays: bool = True


class ModelAdapter(ABC):
    """The torch half of a family. ``model`` is always the family's own module, as :meth:`build` made it."""

    @abstractmethod
    def build(self, recipe: Any, place: Place) -> tuple[nn.Module, AttentionUse]:
        """The model with fresh weights, from torch's global generator, and which attention it computes with."""

    def pinned(self, recipe: Any) -> Any:
        """The recipe, saying also which files its weights start from, so that training it again is the same run."""
        return recipe

    def start(self, model: Any, recipe: Any) -> tuple[str, ...]:
        """Give a new model the weights that training starts from; names of those that stay fresh.

        Most families start from nothing. Raises InputError, ArtifactError: the recipe names weights that are not there.
        """
        return ()

    def state_shape(self, recipe: Any) -> tuple[int, int] | None:
        """How many states ``model(…, states=True)`` returns beside its answer, and their width; None: it returns none.

        They are what distillation compares.
        """
        return None

    def learning(self, model: Any, training: TrainingConfig) -> Iterator[Learning]:
        """Every parameter, once, and how it is learned: weight decay acts on matrices only."""
        for parameter in model.parameters():
            yield Learning(parameter, decays=parameter.ndim >= 2)

    def batch(self, recipe: Any, arrays: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """A micro-batch of the task with what :meth:`loss` needs beside it, before it goes to the device."""
        return arrays

    @abstractmethod
    def loss(self, model: Any, recipe: Any, prepared: Prepared | None) -> Loss:
        """The loss that training minimises; settings of the recipe that act on the model are made.

        Args:
            prepared: the data; None where memory is planned, without any.
        """

    @abstractmethod
    def scorer(self, model: Any) -> nn.Module:
        """A module on the same weights that is scored: it answers with logits, or with losses by name.

        Its ``inputs`` are the arguments that it must be given, int64 [B, S] each; its ``optional`` those that it takes
        where they are given.
        """

    @abstractmethod
    def exits(self, model: Any) -> nn.Module:
        """A module on the same weights that takes the graph's inputs and returns logits of every exit, then states.

        Its ``exits`` are the loops that answer, in rising order, the last one the whole model; its ``outputs`` the
        names of what it returns: logits of every exit, then the state after every loop.
        """

    @abstractmethod
    def needed(self, model: Any) -> dict[int, int]:
        """Exit → parameters that its graph needs, each counted once."""

    @abstractmethod
    def trace(self, model: Any, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """The model as it is now (FP32, or made FP16 in place) as ONNX graphs.

        Args:
            inputs: names of what goes in, in the order of :meth:`exits`.
            steps: the parts that a host loops by itself, too.

        Raises:
            EdgeformerError: torch cannot export it.
        """

    def trace_half(self, model: Any, inputs: Sequence[str], whole: Graphs, *, steps: bool) -> Graphs:
        """As :meth:`trace`, of a model that was made FP16 in place.

        Args:
            whole: graphs of the same model in FP32, which those in FP16 can be made of.
        """
        return self.trace(model, inputs, steps=steps)

    def trace_trimmed(self, model: Any, inputs: Sequence[str], whole: Graphs | None) -> Graphs:
        """As :meth:`trace`, without steps, of a model that :meth:`trim` made.

        Args:
            whole: of the model that it was made of, as it is now; None: these could not be traced. The graphs are the
                same to the bit, whether something of them is used again or all is traced anew.
        """
        return self.trace(model, inputs, steps=False)

    def whole(self, model: Any) -> nn.Module:
        """The model as one module from inputs to the last exit's logits."""
        module: nn.Module = model
        return module

    def causality(self, model: Any, seed: int = 0) -> Causality | None:
        """What the probe for leaks finds; None for a model that is meant to see the whole text.

        Raises:
            ValueError: the probe could not have seen a leak.
        """
        return None

    def decoder(self, model: Any) -> Any:
        """The model as :class:`~edgeformer.runtimes.torch.session.CachedModel`. Raises InputError: it cannot write."""
        raise InputError("this model reads whole texts and writes none")

    def trim(self, model: Any, kept: Tensor) -> nn.Module:
        """A model with the rows ``kept`` (int64 [n]) of the token table, all else shared. Raises InputError."""
        raise InputError("--vocab-trim: the vocabulary of this model family cannot be trimmed")

    def as_on_cuda(self, model: Any) -> None:  # noqa: B027 - most models have nothing of the kind
        """Put in place, in the model, what takes other memory on a CUDA card than where memory is planned."""


def count_parameters(model: nn.Module) -> int:
    """Parameters, each shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def sharing_copy(model: M) -> M:
    """A copy whose modules can be changed; its parameters and buffers are the same tensors, not copies."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def run_scorer(scorer: Any, batch: Batch) -> dict[str, Tensor]:
    """Give what :meth:`Network.scorer` made what it takes of a batch; a single tensor becomes ``logits``."""
    answer = scorer(**{name: batch[name] for name in (*scorer.inputs, *scorer.optional) if name in batch})
    return dict(answer) if isinstance(answer, Mapping) else {"logits": answer}
