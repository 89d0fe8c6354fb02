"""The torch half of a model family: building it, its loss, and what training and export ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from edgeformer.families.tracing import Graphs
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import AttentionUse, Causality
from edgeformer.formats.recipe import TrainingConfig
from edgeformer.tasks import Prepared

Batch = Mapping[str, Tensor]
"""Arrays of the same rows, int64 [B, …]."""


@dataclass(frozen=True)
class Losses:
    """Sums over what counts in a micro-batch, in nats: the one to minimise, and named parts of it for the log."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[nn.Module, Batch], Losses]
"""A model, perhaps wrapped for several processes, and a micro-batch → summed losses, with gradients."""


@dataclass(frozen=True)
class Place:
    """Where a model will compute, and in what.

    Attributes:
        for_export: it will be traced, so that only operators that can be exported may be used.
    """

    device_type: str = "cpu"
    precision: str = "fp32"
    for_export: bool = False


class Exits(Protocol):
    """A module with all exits of a model: its arguments are the graph's inputs, its results are logits and states.

    Attributes:
        exits: loops that answer, in rising order; the last one is the whole model.
        outputs: names of the results: logits of every exit, then the state after every loop.
    """

    exits: tuple[int, ...]
    outputs: tuple[str, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...


class Scorer(Protocol):
    """A module that is scored: it answers with ``logits``, or with losses by name.

    Attributes:
        inputs: arguments that it must be given, int64 [B, S] each.
        optional: arguments that it takes where they are given.
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...]


class LoopedModel(Protocol):
    """A causal model that keeps what it computed for earlier tokens; who waits where is the decoder's business."""

    loops: int
    max_positions: int

    def embed(self, input_ids: Tensor, start: int, *, keep: bool) -> Tensor:
        """Embeddings [B, n, C] of the next tokens, int64 [B, n], the first of them at place ``start``."""

    def run_loop(self, number: int, x: Tensor, *, keep: bool) -> Tensor:
        """Tokens [B, n, C] through the loop ``number``, from 0."""

    def logits(self, state: Tensor, loop: int) -> Tensor:
        """Logits float32 [B, V] of ``state`` [B, C], a token's after ``loop``."""


class Network(ABC):
    """The torch half of a family. ``model`` is always a module that :meth:`build` made."""

    @abstractmethod
    def build(self, recipe: Any, place: Place) -> tuple[nn.Module, AttentionUse]:
        """The model with fresh weights, from torch's global generator, and which attention it computes with."""

    @abstractmethod
    def loss(self, model: nn.Module, recipe: Any, prepared: Prepared | None) -> Loss:
        """The loss that training minimises; settings of the recipe that act on the model are made.

        Args:
            prepared: the data; None where memory is planned, without any.
        """

    @abstractmethod
    def scorer(self, model: nn.Module) -> nn.Module:
        """A module that is a :class:`Scorer`, on the same weights."""

    @abstractmethod
    def exits(self, model: nn.Module) -> nn.Module:
        """A module that is :class:`Exits`, on the same weights."""

    @abstractmethod
    def needed(self, model: nn.Module) -> dict[int, int]:
        """Exit → parameters that its graph needs, each counted once."""

    @abstractmethod
    def trace(self, model: nn.Module, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """The model as it is now (FP32, or made FP16 in place) as ONNX graphs.

        Args:
            inputs: names of what goes in, in the order of :meth:`exits`.
            steps: the parts that a host loops by itself, too.

        Raises:
            EdgeformerError: torch cannot export it.
        """

    def whole(self, model: nn.Module) -> nn.Module:
        """The model as one module from inputs to the last exit's logits."""
        return model

    def causality(self, model: nn.Module, seed: int = 0) -> Causality | None:
        """What the probe for leaks finds; None for a model that is meant to see the whole text.

        Raises:
            ValueError: the probe could not have seen a leak.
        """
        return None

    def decoder(self, model: nn.Module) -> LoopedModel:
        """The model, ready to write a text. Raises InputError for a family that writes none, or a model that leaks."""
        raise InputError("this model reads whole texts and writes none")

    def trim(self, model: nn.Module, kept: Tensor) -> nn.Module:
        """A model whose token table has the rows ``kept`` (int64 [n]) only, all else shared with ``model``.

        Raises:
            InputError: this family's vocabulary cannot be trimmed.
        """
        raise InputError("--vocab-trim: the vocabulary of this model family cannot be trimmed")

    def as_on_cuda(self, model: nn.Module) -> nn.Module:
        """The model with what takes other memory on a CUDA card than where memory is planned put in place."""
        return model


def drop_tokens(ids: Tensor, share: float, unk_id: int, special: Tensor) -> Tensor:
    """``ids`` with about ``share`` of the ordinary tokens replaced by [UNK].

    Args:
        ids: int64 [B, S].
        share: 0 … 1.
        special: ids that are never replaced ([CLS], [SEP], [PAD], …).
    """
    chosen = (torch.rand(ids.shape, device=ids.device) < share) & ~torch.isin(ids, special.to(ids.device))
    return torch.where(chosen, unk_id, ids)


def classification_loss(training: TrainingConfig, prepared: Prepared | None) -> Loss:
    """Cross-entropy summed over the rows, for models from input_ids and attention_mask to logits [B, C].

    Args:
        training: with ``label_smoothing`` and ``token_dropout``.
        prepared: says which tokens are special; None: no token is dropped.
    """
    smoothing, dropout = float(getattr(training, "label_smoothing", 0)), float(getattr(training, "token_dropout", 0))
    summed = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    special, unk = torch.empty(0, dtype=torch.int64), 0
    if prepared is not None and prepared.special is not None:
        added = prepared.tokenizer.get_added_tokens_decoder()
        special = torch.tensor(sorted(number for number, token in added.items() if token.special))
        unk = prepared.special.unk

    def loss(model: nn.Module, batch: Batch) -> Losses:
        ids = batch["input_ids"]
        if dropout and prepared is not None:
            ids = drop_tokens(ids, dropout, unk, special)
        logits = model(ids, batch.get("attention_mask"))
        return Losses(summed(logits.float(), batch["labels"]))

    return loss


def run_scorer(scorer: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Call a :class:`Scorer` with what it takes of a batch; a single tensor becomes ``logits``."""
    optional: tuple[str, ...] = scorer.optional  # type: ignore[assignment]
    taken: tuple[str, ...] = (*scorer.inputs, *(name for name in optional if name in batch))  # type: ignore[misc]
    answer = scorer(**{name: batch[name] for name in taken})
    return dict(answer) if isinstance(answer, Mapping) else {"logits": answer}
