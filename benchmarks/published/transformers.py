"""Transformers as the column ``architecture`` of the published rows describes them, on the meta device."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer. ``gated``: SwiGLU or GeGLU; ``vocabulary``: of the head of a decoder, 0 without one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    gated: bool = False
    vocabulary: int = 0
    embeddings: bool = True
    patch: int = 0  # side of an image's patch; 0: the input is text
    mel: bool = False  # a Whisper encoder: 80 × 3000 bins

    @property
    def is_decoder(self) -> bool:
        """Whether it has a head that predicts the next token."""
        return self.vocabulary > 0


def parse_architecture(text: str) -> Architecture | None:
    """Return the sizes that a description states; None: it does not describe a plain transformer.

    Mixtures of experts, recurrent memory, convolutions in the layers and ternary weights are none.
    """
    if re.search(r"MoE|experts|Transformer-XL|conformer|SANM|MobileBERT|BitNet|MLA|ModernBERT|GPT-J|ALiBi", text):
        return None

    def number(pattern: str) -> int | None:
        match = re.search(pattern, text)
        return int(match[1].replace(",", "")) if match else None

    layers, hidden = number(r"(\d+) (?:(?:post|pre)-LN |causal |encoder )*layers"), number(r"(?:hidden |d=)(\d+)")
    heads, ffn = number(r"(\d+) heads"), number(r"FFN (\d+)")
    if layers is None or hidden is None or heads is None or ffn is None:
        return None
    decodes = "decoder:" in text or ("Whisper" not in text and re.search(r"(?:Sw|Ge)i?GLU FFN", text) is not None)
    return Architecture(
        layers, hidden, heads, number(r"(\d+) KV heads?") or heads,
        number(r"head_dim (\d+)") or number(r"heads? x (\d+)") or hidden // heads, ffn,
        gated="GLU" in text, vocabulary=(number(r"vocab (\d+)") or 0) if decodes else 0,
        embeddings="no embeddings" not in text and "hidden states" not in text,
        patch=number(r"(?:conv|ViT-\w+/)\s?(\d+)") or 0 if "ViT" in text else 0, mel="log-mel" in text,
    )  # fmt: skip


class _Layer(nn.Module):
    """Attention and feed-forward block, with the products of a layer and its element-wise operators."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        bias = not sizes.is_decoder
        norm = nn.RMSNorm if sizes.is_decoder else nn.LayerNorm
        self.norms = nn.ModuleList([norm(sizes.hidden), norm(sizes.hidden)])
        self.projections = nn.ModuleList(nn.Linear(sizes.hidden, width, bias) for width in (queries, keys, keys))
        self.output = nn.Linear(queries, sizes.hidden, bias)
        self.up = nn.ModuleList(nn.Linear(sizes.hidden, sizes.ffn, bias) for _ in range(1 + sizes.gated))
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias)

    def forward(self, states: Tensor, past: int) -> Tensor:
        """Return the states [B, S, d] of the next layer; ``past``: earlier tokens, whose keys are cached."""
        sizes, (batch, seq) = self.sizes, states.shape[:2]
        queries, keys, values = (
            projection(states).view(batch, seq, -1, sizes.head_size).transpose(1, 2) for projection in self.projections
        )
        if past:
            cache = states.new_empty(batch, sizes.kv_heads, past, sizes.head_size)
            keys, values = torch.cat([cache, keys], 2), torch.cat([cache, values], 2)
        if sizes.is_decoder:  # rotary positions
            queries, keys = queries * 1.0, keys * 1.0
        groups = sizes.heads // sizes.kv_heads  # queries of a group share keys
        queries = queries.reshape(batch * sizes.kv_heads, groups * seq, sizes.head_size)
        keys, values = (each.reshape(batch * sizes.kv_heads, -1, sizes.head_size) for each in (keys, values))
        weights = F.softmax(torch.bmm(queries, keys.transpose(1, 2)) * 0.1, dim=-1)
        mixed = torch.bmm(weights, values).reshape(batch, sizes.heads, seq, sizes.head_size).transpose(1, 2)
        states = self.norms[0](states + self.output(mixed.reshape(batch, seq, -1)))
        inner = F.silu(self.up[0](states)) * self.up[1](states) if sizes.gated else F.gelu(self.up[0](states))
        return self.norms[1](states + self.down(inner))


class Transformer(nn.Module):
    """Encoder of text, image patches or sound, or decoder with a head for the last token.

    ``forward``: token numbers [B, S], images [B, 3, H, W] or log-mel bins [B, 80, frames]; ``past`` earlier tokens.
    """

    def __init__(self, sizes: Architecture, past: int = 0) -> None:
        super().__init__()
        self.sizes, self.past = sizes, past
        if sizes.patch:
            self.front: nn.Module = nn.Conv2d(3, sizes.hidden, sizes.patch, sizes.patch)
        elif sizes.mel:
            self.front = nn.Sequential(
                nn.Conv1d(80, sizes.hidden, 3, padding=1), nn.GELU(), nn.Conv1d(sizes.hidden, sizes.hidden, 3, 2, 1),
                nn.GELU(),
            )  # fmt: skip
        else:
            self.front = nn.Embedding(sizes.vocabulary or 30522, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if sizes.vocabulary else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        states: Tensor = self.front(inputs)
        if self.sizes.patch:
            states = states.flatten(2).transpose(1, 2)
        elif self.sizes.mel:
            states = states.transpose(1, 2)
        elif self.sizes.embeddings and not self.sizes.is_decoder:
            states = self.norm(states + 1.0)
        for layer in self.layers:
            states = layer(states, self.past)
        last: Tensor = self.head(states[:, -1:] if self.sizes.is_decoder else states)
        return last
