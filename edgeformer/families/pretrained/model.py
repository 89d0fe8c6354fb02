"""A pretrained text encoder in the parts that exits and step graphs are made of: embed, stages of layers, readout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.pretrained.anatomy import HeadParts, Parts

MASKED = -1e4
"""Added to the attention score of a token that is not seen: zero after softmax, and a number of every float type."""


def table_of(weight: Tensor) -> nn.Embedding:
    """A table with these rows [V, d], as parameters of its own."""
    rows, width = weight.shape
    table = nn.Embedding(rows, width, device="meta")
    table.weight = nn.Parameter(weight.detach().clone())
    return table


class Embeddings(nn.Module):
    """Sum of token, position and token-type vectors, normalised; perhaps made wider for the layers.

    Args:
        parts: of the source.
        pairs: tokens behind the first separator are of the second type; else all are of the first, whose vector is
            added to every position once and for all.
        separator: token between two texts.
        longest: positions beyond so many are left out of the table.
    """

    def __init__(self, parts: Parts, *, pairs: bool, separator: int | None, longest: int) -> None:
        super().__init__()
        self.words = table_of(parts.words.weight)
        self.positions: nn.Parameter | None = None
        self.types: nn.Embedding | None = None
        if parts.positions is not None:
            table = parts.positions.weight.detach()[:longest].clone()
            if parts.types is not None and not pairs:
                table += parts.types.weight.detach()[0]
            self.positions = nn.Parameter(table)
        if pairs and parts.types is not None:
            self.types = table_of(parts.types.weight)
        self.norm, self.dropout, self.project = parts.norm, nn.Dropout(parts.dropout), parts.project
        self.separator = separator

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, S] → [B, S, d]."""
        x = self.words(input_ids)
        if self.types is not None:
            ends = torch.eq(input_ids, self.separator if self.separator is not None else -1).long()
            second = (ends.cumsum(1) - ends).clamp(max=len(self.types.weight) - 1)
            x = x + self.types(second)
        if self.positions is not None:
            x = x + self.positions[: input_ids.shape[1]]
        x = self.dropout(self.norm(x))
        result: Tensor = x if self.project is None else self.project(x)
        return result


class Head(nn.Module):
    """States of a text → one vector: pooled, through a dense layer where there is one, then perhaps classes.

    Args:
        pooling: ``cls``, ``mean`` or ``max``.
        parts: of a classifier's head; None: none of it, the answer is the pooled vector.
        normalize: the answer gets length 1.
    """

    def __init__(self, pooling: str, parts: HeadParts | None, *, normalize: bool = False) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize
        self.activation: Callable[[Tensor], Tensor] | None = parts.activation if parts is not None else None
        self.drop_first = parts is not None and parts.drop_first
        self.dense = parts.dense if parts is not None else None
        self.norm = parts.norm if parts is not None else None
        self.dropout = nn.Dropout(parts.dropout if parts is not None else 0.0)
        self.out = parts.out if parts is not None else None

    def forward(self, h: Tensor, attention_mask: Tensor | None) -> Tensor:
        """h [B, S, d], attention_mask int64 [B, S] or None (all real) → float32 [B, classes or d]."""
        x = self._pool(h, attention_mask)
        if self.dense is not None and self.activation is not None:
            x = self.activation(self.dense(self.dropout(x) if self.drop_first else x))
            x = x if self.norm is None else self.norm(x)
        if self.out is not None:
            x = self.out(self.dropout(x))
        x = x.float()
        return F.normalize(x, dim=-1) if self.normalize else x

    def _pool(self, h: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.pooling == "cls":
            return h[:, 0]
        if attention_mask is None:
            return h.mean(1) if self.pooling == "mean" else h.amax(1)
        real = attention_mask[:, :, None]
        if self.pooling == "max":
            return h.masked_fill(real == 0, MASKED).amax(1)
        # Summed in float32: a long text's sum is beyond FP16.
        wide = h.float() * real
        return (wide.sum(1) / real.sum(1).clamp(min=1)).to(h.dtype)


class Turn:
    """Which application of the shared layers is being computed: from 0, or int64 [1] in a graph that is told."""

    def __init__(self) -> None:
        self.number: int | Tensor = 0

    def of(self, stacked: Tensor) -> Tensor:
        """This application's own part of [applications, …]."""
        if isinstance(self.number, Tensor):
            return stacked.index_select(0, self.number)[0]
        return stacked[self.number]


@dataclass(frozen=True)
class Looped:
    """Of a folded stack.

    Attributes:
        stage: applications of layers between two exits.
        turns: the how-manieth of its layer each application is, from 0.
        turn: what the layers look at.
    """

    stage: int
    turns: tuple[int, ...]
    turn: Turn


class PretrainedEncoder(nn.Module):
    """embed → stages of layers → readout, after each stage of which there can be an exit.

    Args:
        parts: of a transformers model, perhaps folded.
        head: as :class:`Head` wants it.
        embeddings: as :class:`Embeddings` has it.
        longest: tokens of a text.
        looped: of a folded stack; None: there can be an exit after every layer.

    Shapes: input_ids and attention_mask int64 [B, S] → float32 [B, classes], or [B, d] of an embedding.
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)

    def __init__(
        self,
        parts: Parts,
        head: Head,
        embeddings: Embeddings,
        *,
        longest: int,
        looped: Looped | None = None,
    ) -> None:
        super().__init__()
        self.embeddings, self.head, self.rotary = embeddings, head, parts.rotary
        self.layers = nn.ModuleList(parts.layers)
        self.final_norm = parts.final_norm if parts.final_norm is not None else nn.Identity()
        self.order, self.kinds, self.window = parts.order, parts.kinds, parts.window
        self.longest, self.looped, self.stage = longest, looped, looped.stage if looped is not None else 1

    @property
    def stages(self) -> int:
        """Exits, the last one the whole model's."""
        return len(self.order) // self.stage

    @property
    def loops_one_graph(self) -> bool:
        """Whether every stage applies the same layers in the same order, so that a host can loop one graph."""
        first = self.order[: self.stage]
        return not self.kinds and all(
            self.order[start : start + self.stage] == first for start in range(0, len(self.order), self.stage)
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, states: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """The answer; with ``states`` also the state after every stage, [B, S, d] each."""
        h, found = self.embed(input_ids), []
        for stage in range(self.stages):
            h = self.advance(h, attention_mask, stage)
            found.append(h)
        answer = self.readout(h, attention_mask)
        return (answer, found) if states else answer

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, S] → [B, S, d]."""
        result: Tensor = self.embeddings(input_ids)
        return result

    def advance(self, h: Tensor, attention_mask: Tensor | None, stage: int | Tensor) -> Tensor:
        """One stage of layers: [B, S, d] → [B, S, d].

        Args:
            stage: from 0; int64 [1] in the graph that a host loops.
        """
        mask = None if attention_mask is None else (1 - attention_mask.to(h.dtype))[:, None, None, :] * MASKED
        first = 0 if isinstance(stage, Tensor) else stage * self.stage
        for place in range(first, first + self.stage):
            if self.looped is not None:
                self.looped.turn.number = stage if isinstance(stage, Tensor) else self.looped.turns[place]
            h = self._through(self.order[place], h, mask)
        return h

    def _through(self, number: int, h: Tensor, mask: Tensor | None) -> Tensor:
        layer = self.layers[number]
        if self.rotary is None:
            result: Tensor = layer(h, mask)
            return result
        kind, length = self.kinds[number], h.shape[1]
        places = torch.arange(length, device=h.device)
        if kind == "sliding_attention":
            far = (places[:, None] - places[None, :]).abs() > self.window
            hidden = far.to(h.dtype)[None, None] * MASKED
            # One is enough: two together would be beyond FP16.
            mask = hidden if mask is None else torch.minimum(mask, hidden)
        angles = self.rotary(h, places[None], kind)
        seen: Tensor = layer(h, attention_mask=mask, position_embeddings=angles)
        return seen

    def readout(self, h: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """h [B, S, d] → float32 [B, classes or d]."""
        answer: Tensor = self.head(self.final_norm(h), attention_mask)
        return answer
