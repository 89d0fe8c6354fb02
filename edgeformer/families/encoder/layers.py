"""The encoder's building blocks (paper A, section Theory): RMSNorm, RoPE, SwiGLU, self-attention, pre-norm layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.norms import RMSNorm

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(q, k, v [B, H, S, D], additive mask [B, 1, 1, S] or None, dropout) → [B, H, S, D]"""

MASKED = -1e4
"""Added to the attention score of a padding token: zero after softmax, and representable in every float type."""


def rotary_angles(positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of m·θ_i, θ_i = theta^(−2i/head_size), each [positions, head_size / 2] in float32 (paper A, RoPE)."""
    pair = torch.arange(0, head_size, 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), theta ** (-pair / head_size))
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_2i, x_2i+1) by its position's angle (paper A, RoPE).

    Args:
        x: [..., S, H, D]; cos, sin: [S, 1, D / 2] in float32.

    Returns:
        [..., S, H, D] of x's type, all first members of the pairs before all second ones. Attention only takes
        products of two vectors that both went through here, so their common order does not matter, and leaving
        out the interleaving saves two operators per call on every device.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).to(x.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """torch's scaled-dot-product attention. Shapes as in :data:`Attention`; scale is D^-0.5."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


class SelfAttention(nn.Module):
    """Bidirectional multi-head self-attention with RoPE on queries and keys; q, k, v are one matrix product."""

    def __init__(self, size: int, heads: int, dropout: float, attention: Attention) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.dropout = dropout
        self.attention = attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        """Attend from the first ``queries`` positions (None: all of them) to every real one.

        x [B, S, d]; cos, sin [S, 1, D / 2]; mask [B, 1, 1, S]: 0 for a real token, MASKED for padding
        → [B, queries, d].
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size)).unbind(2)  # each [B, S, H, D]
        q, k = rotate(q[:, :queries], cos[:queries], sin[:queries]), rotate(k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        mixed = self.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, dropout)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class SwiGLU(nn.Module):
    """FFN(x) = W3 (SiLU(W1 x) ⊙ (W2 x)) (paper A, "SwiGLU"); W1 and W2 are stored as one matrix, W1 first."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(size, 2 * inner)
        self.w3 = nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → the same shape."""
        gate, value = self.w12(x).chunk(2, dim=-1)
        result: Tensor = self.w3(F.silu(gate) * value)
        return result


class EncoderLayer(nn.Module):
    """h' = h + MHA(Norm(h)); h'' = h' + FFN(Norm(h')) (paper A, "Transformer Layer Formulation")."""

    def __init__(
        self, size: int, *, heads: int, ffn_size: int, dropout: float, norm_eps: float, attention: Attention
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(size, norm_eps)
        self.attention = SelfAttention(size, heads, dropout, attention)
        self.norm2 = RMSNorm(size, norm_eps)
        self.ffn = SwiGLU(size, ffn_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        """h [B, S, d] → [B, queries, d]; arguments as in :class:`SelfAttention`."""
        mixed = self.attention(self.norm1(h), cos, sin, mask, queries)
        h = h[:, :queries] + self.dropout(mixed)
        result: Tensor = h + self.dropout(self.ffn(self.norm2(h)))
        return result
