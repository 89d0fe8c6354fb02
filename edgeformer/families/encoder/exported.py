"""The encoder as its graphs are traced: the same parameters, those of queries and keys in another order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.attention import written_out
from edgeformer.families.encoder.model import EncoderClassifier, SelfAttention, SwiGLU
from edgeformer.families.network import sharing_copy


def exported_form(model: EncoderClassifier) -> EncoderClassifier:
    """A model that computes the same in fewer and cheaper operators; ``model`` is left as it was.

    All parameters are the same tensors but ``qkv`` of every layer, whose copies have their rows in another order, and
    ``w12``, of which there are two halves.
    """
    made = sharing_copy(model)
    layer: Any
    for layer in made.layers:
        layer.attention = ExportedAttention(layer.attention)
        layer.ffn = ExportedSwiGLU(layer.ffn)
    return made


class ExportedAttention(nn.Module):
    """:class:`~edgeformer.families.encoder.model.SelfAttention` for runtimes.

    There the two members of a rotary pair are neighbours: each is taken with a stride of two, which no runtime does
    fast. Here the rows of the product are so ordered that every query and key comes out with all first members before
    all second ones, as :func:`~edgeformer.families.encoder.model.rotate` leaves them anyhow. The heads stand before the
    positions when they are rotated, so that an angle's table lies as the numbers do that it is multiplied with.
    """

    def __init__(self, trained: SelfAttention) -> None:
        super().__init__()
        self.heads, self.head_size, self.out = trained.heads, trained.head_size, trained.out
        self.rotate = HalvesRotation()
        rows = _halves_apart(trained.heads, trained.head_size)
        self.qkv = nn.Linear(trained.qkv.in_features, trained.qkv.out_features, device="meta")
        self.qkv.weight = nn.Parameter(trained.qkv.weight.detach()[rows])
        self.qkv.bias = nn.Parameter(trained.qkv.bias.detach()[rows])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        """Arguments and result are those of :class:`~edgeformer.families.encoder.model.SelfAttention`."""
        shape, (cos, sin) = (self.heads, self.head_size), (cos[:, 0], sin[:, 0])  # [S, D / 2]
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))  # [B, H, S, D]
        q, k = self.rotate(q[:, :, :queries], cos[:queries], sin[:queries]), self.rotate(k, cos, sin)
        result: Tensor = self.out(written_out(q, k, v, mask).transpose(1, 2).flatten(2))
        return result


class ExportedSwiGLU(nn.Module):
    """:class:`~edgeformer.families.encoder.model.SwiGLU` with a product each for W1 and W2, whose weights are views of
    its own: what comes out of a single one must be taken apart, which is a copy. Of queries, keys and values it would
    be quicker, too, but TensorRT joins these again, in each loop others, and stores their weights twice.
    """

    def __init__(self, trained: SwiGLU) -> None:
        super().__init__()
        weights, biases = trained.w12.weight.detach().chunk(2), trained.w12.bias.detach().chunk(2)
        self.gate, self.value = (nn.Linear(trained.w12.in_features, len(bias), device="meta") for bias in biases)
        for half, weight, bias in zip((self.gate, self.value), weights, biases, strict=True):
            half.weight, half.bias = nn.Parameter(weight), nn.Parameter(bias)
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
    """Which row of ``qkv`` each row of the exported one is, int64 [3 · heads · head_size]."""
    row = torch.arange(3 * heads * head_size).view(3, heads, head_size)
    return torch.cat((torch.cat((row[:2, :, 0::2], row[:2, :, 1::2]), -1), row[2:])).flatten()
