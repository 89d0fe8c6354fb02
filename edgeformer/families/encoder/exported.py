"""The encoder as its graphs are traced: the same parameters, those of queries and keys in another order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.attention import written_out
from edgeformer.families.encoder.model import EncoderClassifier, EncoderLayer, SelfAttention, SwiGLU
from edgeformer.families.network import sharing_copy


def exported_form(model: EncoderClassifier) -> EncoderClassifier:
    """A model that computes the same in fewer and cheaper operators; ``model`` is left as it was.

    All parameters are the same numbers, but those of every layer's ``qkv`` and ``w12`` lie in several tensors, and the
    rows of queries and keys in another order.
    """
    made = sharing_copy(model)
    layers: Any = made.layers
    made.layers = nn.ModuleList(map(ExportedLayer, layers))
    return made


Asked = tuple[Tensor, Tensor, Tensor]
"""Positions that are computed: their state [B, Q, d], cos and sin [Q, 1, D / 2]."""


class ExportedLayer(nn.Module):
    """:class:`~edgeformer.families.encoder.model.EncoderLayer` for runtimes, which can be told its queries themselves:
    traced once with any number of them, it serves for all positions and for [CLS] alone."""

    def __init__(self, trained: EncoderLayer) -> None:
        super().__init__()
        self.norm1, self.norm2 = trained.norm1, trained.norm2
        self.attention, self.ffn = ExportedAttention(trained.attention), ExportedSwiGLU(trained.ffn)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, queries: int | Asked | None = None
    ) -> Tensor:
        """Arguments and result are those of :class:`~edgeformer.families.encoder.model.EncoderLayer`, but that
        ``queries`` may be the positions themselves."""
        given = queries if isinstance(queries, tuple) else (h[:, :queries], cos[:queries], sin[:queries])
        asked, *places = given
        asked = asked + self.attention((self.norm1(asked), *places), self.norm1(h), cos, sin, mask)
        result: Tensor = asked + self.ffn(self.norm2(asked))
        return result


class ExportedAttention(nn.Module):
    """:class:`~edgeformer.families.encoder.model.SelfAttention` for runtimes.

    There the two members of a rotary pair are neighbours: each is taken with a stride of two, which no runtime does
    fast. Here the rows of the product are so ordered that every query and key comes out with all first members before
    all second ones, as :func:`~edgeformer.families.encoder.model.rotate` leaves them anyhow. The heads stand before the
    positions when they are rotated, so that an angle's table lies as the numbers do that it is multiplied with.

    Queries, keys and values are three products: what comes out of a single one must be taken apart, which is a copy.
    """

    def __init__(self, trained: SelfAttention) -> None:
        super().__init__()
        self.heads, self.head_size, self.out = trained.heads, trained.head_size, trained.out
        self.rotate = HalvesRotation()
        query, key, self.value = _apart(trained.qkv, 3)
        rows = _halves_apart(trained.heads, trained.head_size)
        self.query, self.key = (_linear(one.weight[rows], one.bias[rows]) for one in (query, key))

    def forward(self, asked: Asked, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from the positions that are asked for to every real one of x → [B, Q, d]; other shapes are those of
        :class:`~edgeformer.families.encoder.model.SelfAttention`."""
        q, k, v = self._heads(self.query(asked[0])), self._heads(self.key(x)), self._heads(self.value(x))
        q, k = self.rotate(q, asked[1][:, 0], asked[2][:, 0]), self.rotate(k, cos[:, 0], sin[:, 0])
        result: Tensor = self.out(written_out(q, k, v, mask).transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, H · D] → [B, H, S, D]."""
        parts: Tensor = x.unflatten(-1, (self.heads, self.head_size))  # type: ignore[no-untyped-call]
        return parts.transpose(1, 2)


class ExportedSwiGLU(nn.Module):
    """:class:`~edgeformer.families.encoder.model.SwiGLU` with a product each for W1 and W2."""

    def __init__(self, trained: SwiGLU) -> None:
        super().__init__()
        self.gate, self.value = _apart(trained.w12, 2)
        self.w3 = trained.w3

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → the same shape."""
        result: Tensor = self.w3(F.silu(self.gate(x)) * self.value(x))
        return result


class HalvesRotation(nn.Module):
    """Turn each pair (x_i, x_{i + D/2}); a module, so that a traced graph shows which nodes compute in float32."""

    keeps_float32 = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., S, D], cos and sin [S, D / 2] in float32 → as x, of its type."""
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


def _halves_apart(heads: int, head_size: int) -> Tensor:
    """Which row of queries or keys each row of the exported ones is, int64 [heads · head_size]."""
    row = torch.arange(heads * head_size).view(heads, head_size)
    return torch.cat((row[:, 0::2], row[:, 1::2]), -1).flatten()


def _apart(packed: nn.Linear, parts: int) -> tuple[nn.Linear, ...]:
    """Products that give what ``packed`` gives one after the other; their weights are views of its own."""
    return tuple(map(_linear, packed.weight.chunk(parts), packed.bias.chunk(parts)))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    return made
