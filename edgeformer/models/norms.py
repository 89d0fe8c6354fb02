"""Normalisation layers that compute in float32 whatever they are given, and a model's weights in FP16 around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · γ over the last dimension (paper A, "RMS Normalization").

    Computed in float32 whatever the input's type: x² overflows FP16 from |x| = 256 on.
    """

    keeps_float32 = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → the same shape and type."""
        wide = x if x.dtype == torch.float64 else x.float()
        # Division by the root, not multiplication with rsqrt: the form that runtimes recognise and fuse.
        scaled = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation, computed in float32 whatever the input's type; the result has the input's type again."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [..., size] → the same shape and type."""
        wide = input if input.dtype == torch.float64 else input.float()
        return F.layer_norm(wide, self.normalized_shape, self.weight, self.bias, self.eps).to(input.dtype)


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of every channel over all tokens of a batch; running statistics in evaluation."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [B, T, C] → the same shape and type."""
        flat = input.reshape(-1, input.shape[-1])
        wide = flat if flat.dtype == torch.float64 else flat.float()
        return super().forward(wide).to(input.dtype).view_as(input)


def make_norm(kind: str, size: int, eps: float) -> nn.Module:
    """``layer | rms | batch | none`` (the paper's normalisation ablation)."""
    kinds: dict[str, Callable[..., nn.Module]]
    kinds = {"layer": LayerNorm, "rms": RMSNorm, "batch": TokenBatchNorm, "none": nn.Identity}
    return kinds[kind](size, eps=eps)


def half_for_export(model: nn.Module) -> nn.Module:
    """The model with its matrices and biases in FP16, in place: half the bytes.

    Modules that say ``keeps_float32`` (norms), running statistics and rotary tables are used in float32 and keep their
    values.
    """
    for module in model.modules():
        if not getattr(module, "keeps_float32", False):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model


# Attention written out, which graphs are traced with. Training and evaluation in torch use torch's fused kernels.


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, what torch's ``scaled_dot_product_attention`` computes.

    That one is exported with a copy of all keys, scaled and transposed through two changes of shape. Here the scale is
    on the queries alone, before the product, where FP16 cannot overflow for it; an exported FP16 graph computes its
    softmax in float32, see :mod:`edgeformer.models.tracing`.

    Args:
        q: [B, H, Q, D]; k, v: [B, H, S, D].
        mask: added to the scores, broadcast to [B, H, Q, S]; None: every position is seen.
        scale: None: D^-0.5.

    Returns:
        [B, H, Q, D].
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    result: Tensor = (scores if mask is None else scores + mask).softmax(-1) @ v
    return result
