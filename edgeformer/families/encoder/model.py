"""The encoder classifier of paper A: N layers applied R times; the stacked baseline is R = 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeformer.families.encoder.layers import MASKED, Attention, EncoderLayer, rotary_angles, sdpa
from edgeformer.families.norms import RMSNorm

_INITIAL_STD = 0.02


class EncoderClassifier(nn.Module):
    """Token and type embeddings → R × (N shared layers, h ← F(h) + α·h) → RMSNorm → linear head on [CLS].

    The type embedding has two rows of which row 0 is used; with the final norm it accounts for the 3·d parameters
    that the paper's counts have beyond layers, table and head.

    Shapes: input_ids and attention_mask int64 [B, S] → logits float32 [B, classes].
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)

    def __init__(  # noqa: PLR0913 - one keyword per dimension; configurations stay outside model classes
        self,
        *,
        vocab_size: int,
        classes: int,
        hidden_size: int,
        layers: int,
        iterations: int,
        heads: int,
        ffn_size: int,
        residual_scale: float,
        dropout: float,
        max_positions: int,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
        attention: Attention = sdpa,
    ) -> None:
        super().__init__()
        self.iterations = iterations
        self.residual_scale = residual_scale
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.types = nn.Embedding(2, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(
                hidden_size,
                heads=heads,
                ffn_size=ffn_size,
                dropout=dropout,
                norm_eps=norm_eps,
                attention=attention,
            )
            for _ in range(layers)
        )
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = nn.Linear(hidden_size, classes)
        cos, sin = rotary_angles(max_positions, hidden_size // heads, rope_theta)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialise)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits float32 [B, classes]; without a mask every token is real."""
        h = self.embed(input_ids)
        for iteration in range(1, self.iterations + 1):
            h = self.iterate(h, attention_mask, answer=iteration == self.iterations)
        return self.readout(h)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, S] → [B, S, d]."""
        result: Tensor = self.dropout(self.tokens(input_ids) + self.types(torch.zeros_like(input_ids)))
        return result

    def iterate(self, h: Tensor, attention_mask: Tensor | None, *, answer: bool = False) -> Tensor:
        """One pass through the shared layers, h ← F(h) + α·h: [B, S, d] → [B, S, d].

        Args:
            answer: only the readout follows, which reads [CLS] alone, so the last layer computes its output for that
                position only: [B, 1, d], the same logits for about an eighth less work at six layers.
        """
        length = h.shape[1]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        mask = None if attention_mask is None else (1 - attention_mask.to(h.dtype))[:, None, None, :] * MASKED
        start, last = h, len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            h = layer(h, cos, sin, mask, 1 if answer and number == last else None)
        return h + self.residual_scale * start[:, : h.shape[1]] if self.residual_scale else h

    def readout(self, h: Tensor) -> Tensor:
        """h [B, S, d] → logits float32 [B, classes]."""
        logits: Tensor = self.head(self.norm(h[:, 0]))
        return logits.float()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
