"""Layers that several models share: norms that compute in float32, attention for export, FP16 weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED = -1e4
"""Added to the attention score of a hidden token: zero after softmax, and representable in every float type."""


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · γ over the last dimension (paper A, "RMS Normalization").

    Computed in float32 for every input type: x² overflows FP16 from |x| = 256 on.
    """

    keeps_float32 = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → [..., size] of the same type."""
        exact = to_float32(x)
        # Division by the root, not multiplication with rsqrt: runtimes recognise and fuse this form.
        scaled = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in float32; the result has the input's type."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [..., size] → [..., size] of the same type."""
        exact = to_float32(input)
        return F.layer_norm(exact, self.normalized_shape, self.weight, self.bias, self.eps).to(input.dtype)


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of every channel over all tokens of a batch; running statistics in evaluation."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [B, T, C] → [B, T, C] of the same type."""
        flat = input.reshape(-1, input.shape[-1])  # [B·T, C]
        return super().forward(to_float32(flat)).to(input.dtype).view_as(input)


def to_float32(x: Tensor) -> Tensor:
    """Convert to float32; float64, which tests compute in, stays."""
    return x if x.dtype == torch.float64 else x.float()


NORMS: dict[str, Callable[..., nn.Module]]
NORMS = {"layer": LayerNorm, "rms": RMSNorm, "batch": TokenBatchNorm, "none": nn.Identity}
"""Constructors by name, of (size, eps=…) (paper B, normalisation ablation)."""


def convert_weights_to_fp16(model: nn.Module) -> nn.Module:
    """Convert matrices and biases to FP16, in place: half the bytes.

    Modules with ``keeps_float32`` (norms), running statistics and rotary tables keep float32.
    """
    for module in model.modules():
        if not getattr(module, "keeps_float32", False):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model


def padding_mask(h: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return what is added to attention scores, 0 or MASKED, in h's type: attention_mask [B, S] → [B, 1, 1, S]."""
    return None if attention_mask is None else (1 - attention_mask.to(h.dtype))[:, None, None, :] * MASKED


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v for export: q [B, H, Q, D], k and v [B, H, S, D] → [B, H, Q, D].

    The exporter turns torch's function into a copy of all keys, scaled and transposed. Scaling only the queries, before
    the product, avoids that, and the product cannot overflow FP16. ``scale`` is D^-0.5 by default.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    return (scores if mask is None else scores + mask).softmax(-1) @ v
