"""CRT-Deep (paper B): refined embeddings, one shared block applied L times, exits on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edgeformer.families.crt.layers import CausalAttention, DilatedConv, TRMCycle, document_mask
from edgeformer.families.norms import make_norm

Checkpointing = Literal["none", "loop", "cycles"]
CYCLE_GROUP = 2
"""TRM cycles that are recomputed together with ``checkpointing: cycles``."""

_INITIAL_STD = 0.02


class TRM(nn.Module):
    """A chain of TRM cycles whose dilations go round through ``dilations``."""

    def __init__(self, cycles: int, dilations: Sequence[int], make_cycle: Callable[[int], TRMCycle]) -> None:
        super().__init__()
        self.cycles = nn.ModuleList(make_cycle(dilations[i % len(dilations)]) for i in range(cycles))

    def forward(self, h: Tensor, positions: Tensor | None = None, *, regroup: bool = False) -> Tensor:
        """h [B, T, C] → [B, T, C]; ``regroup``: recompute every two cycles in the backward pass."""
        if not regroup:
            return self._some(h, positions, 0, len(self.cycles))
        for start in range(0, len(self.cycles), CYCLE_GROUP):
            h = _recomputed(self._some, h, positions, start, start + CYCLE_GROUP)
        return h

    def _some(self, h: Tensor, positions: Tensor | None, start: int, stop: int) -> Tensor:
        for number in range(start, min(stop, len(self.cycles))):
            h = self.cycles[number](h, None, positions)
        return h


class CRT(nn.Module):
    """A decoder whose single block is looped: x ← norm₁(x + e_l + attention), x ← norm₂(x + TRM(x)) (paper B, eq. 1–3).

    Post-norm, as released. The causal model never looks ahead; with ``causal=False`` its convolutions do, as published.
    A *loop* is counted from 1; an *exit* is a loop after which a head can answer, the last loop among them.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        embedding_size: int,
        embedding_projection: bool,
        embedding_cycles: int,
        attention_heads: int,
        ffn_size: int,
        loops: int,
        cycles: int,
        dilations: Sequence[int],
        exits: Sequence[int],
        heads: str,
        max_positions: int,
        dropout: float,
        norm: str,
        norm_eps: float,
        trm: str,
        causal: bool,
    ) -> None:
        super().__init__()
        self.loops, self.max_positions, self.causal = loops, max_positions, causal
        self.exits: tuple[int, ...] = (*exits, loops)
        self.checkpointing: Checkpointing = "none"

        def cycle(dilation: int) -> TRMCycle:
            conv = DilatedConv(hidden_size, dilation, causal=causal) if trm != "linear" else None
            fresh = make_norm(norm, hidden_size, norm_eps)
            return TRMCycle(hidden_size, ffn_size, kind=trm, conv=conv, norm=fresh, dropout=dropout)

        self.tokens = nn.Embedding(vocab_size, embedding_size)
        self.projection = nn.Linear(embedding_size, hidden_size) if embedding_projection else nn.Identity()
        self.refine = TRM(embedding_cycles, dilations, cycle)
        self.positions = nn.Embedding(max_positions, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.loop_encodings = nn.Parameter(torch.empty(loops, hidden_size))
        self.attention = CausalAttention(hidden_size, attention_heads, dropout)
        self.norm1 = make_norm(norm, hidden_size, norm_eps)
        self.trm = TRM(cycles, dilations, cycle)
        self.norm2 = make_norm(norm, hidden_size, norm_eps)
        names = {"shared": ["shared"], "separate": [str(loop) for loop in exits], "tied": []}[heads]
        self.exit_heads = nn.ModuleDict({name: nn.Linear(hidden_size, vocab_size, bias=False) for name in names})
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.loop_encodings, std=_INITIAL_STD)
        # A chain of n residual sums grows like √n; the last matrix of each link is smaller by that much.
        for trm in (self.refine, self.trm):
            for cycle in trm.cycles:
                last = cycle.lin2 if cycle.lin2 is not None else cycle.pointwise
                if isinstance(last, nn.Linear):
                    nn.init.normal_(last.weight, std=_INITIAL_STD / math.sqrt(len(trm.cycles)))

    def head_of(self, loop: int) -> nn.Linear:
        """The head that answers after ``loop``."""
        for name in ("shared", str(loop)):
            if loop != self.loops and name in self.exit_heads:
                chosen = self.exit_heads[name]
                assert isinstance(chosen, nn.Linear)
                return chosen
        return self.head

    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """TRM_refine(Linear(Embed(x))) + PosEmbed(p) (eq. 1). input_ids, positions int64 [B, T] → [B, T, C]."""
        h = self.refine(self.projection(self.tokens(input_ids)), positions)
        first = self.positions.weight[: input_ids.shape[1]]
        places = first if positions is None else self.positions(positions)
        result: Tensor = self.dropout(h + places)
        return result

    def block(
        self, x: Tensor, encoding: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """One pass through the shared block with a loop's encoding [C]: [B, T, C] → [B, T, C] (eq. 3)."""
        regroup = self.training and self.checkpointing == "cycles"
        x = x + encoding.to(x.dtype)
        x = _recomputed(self._attend, x, documents) if regroup else self._attend(x, documents)
        result: Tensor = self.norm2(x + self.trm(x, positions, regroup=regroup))
        return result

    def _attend(self, x: Tensor, documents: Tensor | None) -> Tensor:
        result: Tensor = self.norm1(x + self.attention(x, documents))
        return result

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        until: int | None = None,
        every: bool = False,
        documents: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Hidden states after every exit.

        Args:
            input_ids: int64 [B, T], T ≤ max_positions.
            positions: place of each token in its document, int64 [B, T]; None: each row is one document.
            until: the last loop to compute; None: all of them.
            every: those after every loop, and before the first one as loop 0.
            documents: where those of packed rows begin, int64 [n + 1], for attention without a mask (see
                :func:`~edgeformer.families.crt.kernels.apart`); None: a mask is made of ``positions``.

        Returns:
            loop → [B, T, C], in rising order; ``head_of(loop)`` makes logits of it.
        """
        if documents is None and positions is not None:
            documents = document_mask(positions)
        x = self.embed(input_ids, positions)
        states = {0: x} if every else {}
        for loop in range(1, (until or self.loops) + 1):
            encoding = self.loop_encodings[loop - 1]
            if self.training and self.checkpointing == "loop":
                x = _recomputed(self.block, x, encoding, positions, documents)
            else:
                x = self.block(x, encoding, positions, documents)
            if every or loop in self.exits:
                states[loop] = x
        return states

    def logits(self, input_ids: Tensor, loop: int | None = None) -> Tensor:
        """Next-token logits float32 [B, T, V] of the exit after ``loop`` (None: the last). input_ids int64 [B, T]."""
        loop = loop or self.loops
        result: Tensor = self.head_of(loop)(self(input_ids, until=loop)[loop])
        return result.float()


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False)
    return result
