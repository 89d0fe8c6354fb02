"""The torch half: module, exits, steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.models.adapter import Loss, ModelAdapter, Place, count_parameters
from edgeformer.models.distillation import classification_loss
from edgeformer.models.layers import RMSNorm
from edgeformer.models.tracing import Graphs, GraphSpec, export_graph, state_name, text_spec
from edgeformer.tasks import Prepared
from edgeformer.tasks.early_exit import exit_logits

_EPS = 1e-6
_ROWS = {0: "batch"}


class AveragingClassifier(nn.Module):
    """Mean of the real tokens' embeddings → R × (h ← h + MLP(RMSNorm(h))) → RMSNorm → linear head.

    Shapes: input_ids and attention_mask int64 [B, S] → logits float32 [B, classes].
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)

    def __init__(
        self,
        *,
        vocab_size: int,
        classes: int,
        width: int,
        inner_width: int,
        rounds: int,
        dropout: float,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.rounds, self.max_positions = rounds, max_positions
        self.tokens = nn.Embedding(vocab_size, width)
        self.before, self.after = RMSNorm(width, _EPS), RMSNorm(width, _EPS)
        self.widen, self.narrow = nn.Linear(width, inner_width), nn.Linear(inner_width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits; without a mask every token is real."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        state = self.embed(input_ids, mask)
        for _ in range(self.rounds):
            state = self.refine(state)
        return self.readout(state)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Average of the real tokens, summed up in float32: [B, S] twice → [B, d]."""
        h, real = self.tokens(input_ids), attention_mask[..., None].float()
        return ((h.float() * real).sum(1) / real.sum(1).clamp_min(1)).to(h.dtype)

    def refine(self, state: Tensor) -> Tensor:
        """One round: [B, d] → [B, d]."""
        result: Tensor = state + self.dropout(self.narrow(F.gelu(self.widen(self.before(state)))))
        return result

    def readout(self, state: Tensor) -> Tensor:
        """Logits float32 [B, classes] after any round."""
        logits: Tensor = self.head(self.after(state))
        return logits.float()


class AveragingExits(nn.Module):
    """The classifier with an exit after every round, through the one head it has."""

    def __init__(self, model: AveragingClassifier) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.rounds + 1))
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, classes] per exit, then the states [B, d]."""
        state = self.model.embed(input_ids, attention_mask)
        logits, states = [], []
        for _ in self.exits:
            state = self.model.refine(state)
            logits.append(self.model.readout(state))
            states.append(state.float())
        return (*logits, *states)


class AveragingEmbed(nn.Module):
    """input_ids, attention_mask int64 [B, S] → state [B, d]."""

    def __init__(self, model: AveragingClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """State in front of the first round."""
        return self.model.embed(input_ids, attention_mask)


class OfState(nn.Module):
    """A method of the model that takes a state [B, d]: a round, or the readout."""

    def __init__(self, model: AveragingClassifier, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, state: Tensor) -> Tensor:
        """What the method gives."""
        result: Tensor = getattr(self.model, self.method)(state)
        return result


class AveragingAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[AveragingClassifier, AttentionUse]:
        """There is no attention in it; what a manifest calls the plain one is said."""
        model = AveragingClassifier(classes=recipe.classes, **recipe.model.model_dump(exclude={"kind"}))
        return model, AttentionUse(requested="sdpa", used="sdpa")

    def loss(self, model: nn.Module, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy."""
        return classification_loss(recipe, prepared)

    def scorer(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def exits(self, model: nn.Module) -> AveragingExits:
        """See :meth:`Network.exits`."""
        return AveragingExits(_own(model))

    def needed(self, model: nn.Module) -> dict[int, int]:
        """Every round goes through the one block."""
        return dict.fromkeys(self.exits(model).exits, count_parameters(model))

    def trace(self, model: nn.Module, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """See :meth:`Network.trace`."""
        own, exits = _own(model), self.exits(model)
        full = text_spec(exits, inputs, own.max_positions, exits.outputs)
        parts = _step_specs(own, inputs) if steps else {}
        return Graphs(export_graph(full), {part: export_graph(spec) for part, spec in parts.items()})

    def trim(self, model: nn.Module, kept: Tensor) -> AveragingClassifier:
        """See :meth:`Network.trim`."""
        own = _own(model)
        trimmed = copy.deepcopy(own, {id(tensor): tensor for tensor in own.parameters()})
        trimmed.tokens = nn.Embedding(len(kept), own.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(own.tokens.weight.detach()[kept])
        return trimmed.train(own.training)


def _step_specs(model: AveragingClassifier, inputs: Sequence[str]) -> dict[str, GraphSpec]:
    state = model.tokens.weight.new_zeros(2, model.tokens.embedding_dim)
    return {
        "embed": text_spec(AveragingEmbed(model), inputs, model.max_positions, ("state",)),
        "loop": GraphSpec(OfState(model, "refine"), {"state": state}, {"state": _ROWS}, ("next_state",)),
        "readout": GraphSpec(OfState(model, "readout"), {"state": state}, {"state": _ROWS}),
    }


def _own(model: nn.Module) -> AveragingClassifier:
    assert isinstance(model, AveragingClassifier)
    return model


ADAPTER = AveragingAdapter()
