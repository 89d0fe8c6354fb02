"""The encoder in the pieces that export writes: all exits at once; embed, one iteration, readout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.families.tracing import GraphSpec, logits_name, state_name, text_spec

# Of the examples; a size of 0 or 1 would become a constant of the graph.
_BATCH, _NEW = 2, 3
_STATE = {0: "batch", 1: "sequence"}


class EncoderExits(nn.Module):
    """The classifier with an exit after every iteration, through the one head it has.

    Only the last exit was trained; the others show what fewer iterations of the same weights are worth.
    """

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.iterations + 1))
        self.outputs = (*map(logits_name, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """input_ids, attention_mask int64 [B, S] → logits [B, classes] per exit, then states.

        The states are [B, S, d]; the last one is [B, 1, d], for nothing else of it is ever computed.
        """
        h = self.model.embed(input_ids)
        logits, states = [], []
        for exit_ in self.exits:
            answer = self.model.iterate(h, attention_mask, answer=True)
            logits.append(self.model.readout(answer))
            h = answer if exit_ == self.exits[-1] else self.model.iterate(h, attention_mask)
            states.append(h.float())
        return (*logits, *states)


class EncoderEmbed(nn.Module):
    """input_ids int64 [B, S] → state [B, S, d]."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """State in front of the first iteration."""
        return self.model.embed(input_ids)


class EncoderLoop(nn.Module):
    """One iteration of all positions: state [B, S, d], attention_mask int64 [B, S] → next state."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor, attention_mask: Tensor) -> Tensor:
        """State after one more iteration."""
        return self.model.iterate(state, attention_mask)


class EncoderReadout(nn.Module):
    """State [B, S, d] after any iteration → logits float32 [B, classes]."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor) -> Tensor:
        """Logits."""
        return self.model.readout(state)


def step_specs(model: EncoderClassifier) -> dict[str, GraphSpec]:
    """Part → spec: ``embed``, ``loop``, ``readout``."""
    longest = {"sequence": len(model.cos)}
    weight = model.tokens.weight
    state = weight.new_zeros(_BATCH, _NEW, weight.shape[1])
    mask = torch.ones(_BATCH, _NEW, dtype=torch.int64)
    mask[1, 1:] = 0
    return {
        "embed": text_spec(EncoderEmbed(model), ("input_ids",), longest["sequence"], ("state",)),
        "loop": GraphSpec(
            EncoderLoop(model),
            {"state": state, "attention_mask": mask},
            {"state": _STATE, "attention_mask": _STATE},
            ("next_state",),
            longest,
        ),
        "readout": GraphSpec(EncoderReadout(model), {"state": state}, {"state": _STATE}, longest=longest),
    }
