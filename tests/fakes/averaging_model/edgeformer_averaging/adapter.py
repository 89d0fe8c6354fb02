"""The torch half: module, exits, steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.models.adapter import ModelAdapter, sharing_copy
from edgeformer.models.blocks.layers import RMSNorm
from edgeformer.models.blocks.tracing import Exits, Graphs, GraphSpec, Piece, export_graph, text_spec
from edgeformer_averaging import AveragingConfig

_EPS = 1e-6


class AveragingClassifier(nn.Module):
    """Mean of the real tokens' embeddings → R × (h ← h + MLP(RMSNorm(h))) → RMSNorm → linear head.

    Shapes: input_ids and attention_mask int64 [B, S] → logits float32 [B, classes].
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)

    def __init__(self, config: AveragingConfig, classes: int) -> None:
        super().__init__()
        width, inner_width, self.rounds = config.width, config.inner_width, config.rounds
        self.max_positions, self.exits = config.max_positions, range(1, config.rounds + 1)
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.norm1, self.norm2 = RMSNorm(width, _EPS), RMSNorm(width, _EPS)
        self.widen, self.narrow = nn.Linear(width, inner_width), nn.Linear(inner_width, width)
        self.dropout, self.head = nn.Dropout(config.dropout), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits; without a mask every token is real."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        state = self.embed(input_ids, mask)
        for _ in range(self.rounds):
            state = self.refine(state)
        return self.readout(state)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Average the real tokens, summed in float32: [B, S] twice → [B, d]."""
        h, real = self.tokens(input_ids), attention_mask[..., None].float()
        return ((h.float() * real).sum(1) / real.sum(1).clamp_min(1)).to(h.dtype)

    def refine(self, state: Tensor) -> Tensor:
        """Apply one round: [B, d] → [B, d]."""
        result: Tensor = state + self.dropout(self.narrow(F.gelu(self.widen(self.norm1(state)))))
        return result

    def readout(self, state: Tensor) -> Tensor:
        """[B, d] after any round → logits float32 [B, classes]."""
        logits: Tensor = self.head(self.norm2(state))
        return logits.float()

    def every_exit(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return logits [B, classes] after every round, through the only head, then the states [B, d]."""
        state = self.embed(input_ids, attention_mask)
        logits, states = [], []
        for _ in range(self.rounds):
            state = self.refine(state)
            logits.append(self.readout(state))
            states.append(state.float())
        return (*logits, *states)


class AveragingAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any) -> AveragingClassifier:
        return AveragingClassifier(recipe.model, recipe.classes)

    def trace(
        self, model: AveragingClassifier, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None
    ) -> Graphs:
        exits = Exits(model)
        specs = {"exits": text_spec(exits, inputs, model.max_positions, exits.outputs)}
        if steps:
            state = {"state": model.tokens.weight.new_zeros(2, model.tokens.embedding_dim)}
            axes = {"state": {0: "batch"}}
            specs["embed"] = text_spec(Piece(model, model.embed), inputs, model.max_positions, ("state",))
            specs["loop"] = GraphSpec(Piece(model, model.refine), state, axes, ("next_state",))
            specs["readout"] = GraphSpec(Piece(model, model.readout), state, axes)
        graphs = {name: export_graph(spec) for name, spec in specs.items()}
        return Graphs(graphs.pop("exits"), graphs)

    def trim(self, model: AveragingClassifier, kept: Tensor) -> AveragingClassifier:
        trimmed = sharing_copy(model)
        trimmed.tokens = nn.Embedding(len(kept), model.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(model.tokens.weight.detach()[kept])
        return trimmed.train(model.training)


ADAPTER = AveragingAdapter()
