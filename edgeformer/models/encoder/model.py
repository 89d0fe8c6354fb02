"""Encoder classifier of paper A: N layers applied R times; the stacked baseline is R = 1.

Shapes: B rows, S tokens, d width, H heads, D = d / H.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.models.adapter import sharing_copy
from edgeformer.models.blocks.layers import (
    ExportedSwiGLU,
    RMSNorm,
    Rotation,
    SwiGLU,
    explicit_attention,
    initialize_weights,
    padding_mask,
    rotary_table,
)
from edgeformer.models.blocks.segments import Mask, Segments
from edgeformer.models.encoder import EncoderConfig

Queries = slice | Tensor  # positions that a layer computes
ALL: Queries = slice(None)
FIRST = slice(1)


class SelfAttention(nn.Module):
    """Bidirectional multi-head self-attention with RoPE on queries and keys; q, k, v are one matrix product."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.rotate = Rotation(has_neighbours=True)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, queries: Queries = ALL) -> Tensor:
        """Attend from the ``queries`` to every real token of their row: [B, S, d] → [B, queries, d].

        ``cos`` and ``sin`` are [S, 1, D / 2]; ``mask`` [B, 1, 1, S] is 0 for a real token and MASKED for padding.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size)).unbind(2)  # each [B, S, H, D]
        read = ALL if isinstance(mask, Segments) else queries
        q, k = self.rotate(q[:, read], cos[read], sin[read]), self.rotate(k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, S, D]
        if isinstance(mask, Segments):
            mixed = mask.attend(q, k, v, causal=False, dropout=dropout)[:, :, queries]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """h' = h + MHA(Norm(h)); h'' = h' + FFN(Norm(h')) (paper A, "Transformer Layer Formulation")."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config.hidden_size, config.heads, config.dropout)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = SwiGLU(config.hidden_size, config.ffn_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Mask, queries: Queries = ALL) -> Tensor:
        mixed = self.attention(self.norm1(h), cos, sin, mask, queries)
        h = h[:, queries] + self.dropout(mixed)
        return h + self.dropout(self.ffn(self.norm2(h)))


class EncoderClassifier(nn.Module):
    """Token and type embeddings → R × (N shared layers, h ← F(h) + α·h) → RMSNorm → linear head on [CLS], or on all.

    Row 0 of two type embeddings is used. With the final norm they are the 3·d parameters that the paper counts beyond
    layers, token table and head. input_ids and attention_mask int64 [B, S] → logits float32 [B, classes], or
    [B, S, classes] with an answer ``per_token``.
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)

    def __init__(self, config: EncoderConfig, classes: int, *, per_token: bool = False) -> None:
        super().__init__()
        self.per_token = per_token
        self.exits = range(1, config.iterations + 1)
        self.iterations, self.residual_scale = config.iterations, config.residual_scale
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.types = nn.Embedding(2, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, classes)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_table(config.max_positions, config.hidden_size // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize_weights(self)

    def forward(self, input_ids: Tensor, attention_mask: Mask = None) -> Tensor:
        """Return the logits in float32; without a mask every token is real. Segments are of input_ids [1, N]."""
        h = self.embed(input_ids)
        for iteration in range(1, self.iterations + 1):
            h = self.iterate(h, attention_mask, answer=iteration == self.iterations)
        return self.readout(h.transpose(0, 1) if isinstance(attention_mask, Segments) and not self.per_token else h)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, S] → [B, S, d]."""
        return self.dropout(self.tokens(input_ids) + self.types(torch.zeros_like(input_ids)))

    def iterate(self, h: Tensor, attention_mask: Mask, *, answer: bool = False) -> Tensor:
        """Apply the shared layers once, h ← F(h) + α·h: [B, S, d] → [B, S, d].

        For the ``answer`` the last layer computes only what is read: [CLS], [B, 1, d] or [1, B, d] of segments, or all.
        """
        cos, sin, mask = self.layer_arguments(h, attention_mask)
        start, last, queries = h, len(self.layers) - 1, ALL
        if answer and not self.per_token:
            queries = mask.ends[:-1] if isinstance(mask, Segments) else FIRST
        for number, layer in enumerate(self.layers):
            h = layer(h, cos, sin, mask, queries if number == last else ALL)
        return h + self.residual_scale * start[:, queries] if self.residual_scale else h

    def layer_arguments(self, h: Tensor, attention_mask: Mask) -> tuple[Tensor, Tensor, Mask]:
        """Return cos, sin and mask for every layer, see :meth:`SelfAttention.forward`."""
        if isinstance(attention_mask, Segments):
            return self.cos[attention_mask.positions, None], self.sin[attention_mask.positions, None], attention_mask
        length, mask = h.shape[1], padding_mask(h, attention_mask)
        return self.cos[:length, None], self.sin[:length, None], mask

    def readout(self, h: Tensor) -> Tensor:
        """h [B, S, d] → logits float32 [B, classes] or [B, S, classes]."""
        return self.head(self.norm(h if self.per_token else h[:, 0])).float()

    def every_exit(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the logits after every iteration, through the only head, then the float32 states.

        Only the last exit is trained. If the model reads [CLS], the last state is [B, 1, d]: only that is computed.
        """
        h = self.embed(input_ids)
        logits, states = [], []
        for iteration in range(1, self.iterations + 1):
            answer = self.iterate(h, attention_mask, answer=True)
            logits.append(self.readout(answer))
            h = answer if self.per_token or iteration == self.iterations else self.iterate(h, attention_mask)
            states.append(h.float())
        return (*logits, *states)


def exported_form(model: EncoderClassifier) -> EncoderClassifier:
    """Return a model that computes the same in fewer and cheaper operators; ``model`` is not changed.

    It shares all parameters but ``qkv`` of every layer, whose rows are reordered, and ``w12``, which is split.
    """
    exported = sharing_copy(model)
    layer: Any
    for layer in exported.layers:
        layer.attention = ExportedAttention(layer.attention)
        layer.ffn = ExportedSwiGLU(layer.ffn)
    return exported


class FirstRow(nn.Module):
    """The type embedding of zeros as one vector [d], which runtimes with fixed shapes store once, not per token."""

    def __init__(self, types: nn.Embedding) -> None:
        super().__init__()
        self.types = types

    def forward(self, zeros: Tensor) -> Tensor:
        return self.types.weight[0]


class ExportedAttention(nn.Module):
    """:class:`SelfAttention` without strided access.

    Taking every second number is slow in every runtime, so the rows of ``qkv`` have the order of a rotated vector.
    Rotation runs on [B, H, S, D], in which the tables of angles [S, D / 2] need no transposition.
    """

    def __init__(self, trained: SelfAttention) -> None:
        super().__init__()
        self.heads, self.head_size, self.out = trained.heads, trained.head_size, trained.out
        self.rotate = Rotation(has_neighbours=False)
        # Per head of queries and keys: the first members of all pairs, then the second ones.
        rows = torch.arange(3 * self.heads * self.head_size).view(3, self.heads, self.head_size)
        rows = torch.cat((torch.cat((rows[:2, :, 0::2], rows[:2, :, 1::2]), -1), rows[2:])).flatten()
        self.qkv = nn.Linear(trained.qkv.in_features, trained.qkv.out_features, device="meta")
        self.qkv.weight = nn.Parameter(trained.qkv.weight.detach()[rows])
        self.qkv.bias = nn.Parameter(trained.qkv.bias.detach()[rows])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, queries: Queries = ALL) -> Tensor:
        shape, (cos, sin) = (self.heads, self.head_size), (cos[:, 0], sin[:, 0])  # [S, D / 2]
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))  # [B, H, S, D]
        q, k = self.rotate(q[:, :, queries], cos[queries], sin[queries]), self.rotate(k, cos, sin)
        return self.out(explicit_attention(q, k, v, mask).transpose(1, 2).flatten(2))
