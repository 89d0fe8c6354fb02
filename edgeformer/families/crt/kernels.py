"""What training computes in another way than plain torch does, because it takes less time; the same to rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's SDPA, causal. q, k, v [B, H, T, D]; mask bool [B, 1, T, T], lower triangle included, or None."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def attention_here(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same as :func:`attention`; with a gradient, on a CPU, in float32.

    There torch's gradient of it takes twice as long in bfloat16, casts included.
    """
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad):
        return attention(q, k, v, mask)
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float(), mask).to(q.dtype)


class CausalConvolution(torch.autograd.Function):
    """y_t = w₀ x_{t−2d} + w₁ x_{t−d} + w₂ x_t, and its gradient, with one copy of x kept, and no padded one made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dilation: int, positions: Tensor | None) -> Tensor:
        """x [B, T, C], weight [C, 1, 3], positions int64 [B, T]: place of each token in its document → [B, T, C]."""
        ctx.save_for_backward(x, weight, positions)
        ctx.dilation = dilation
        far, near, own = weight.squeeze(1).to(x.dtype).unbind(-1)
        y = x * own
        for tap, back in ((near, dilation), (far, 2 * dilation)):
            if back < x.shape[1]:
                y[:, back:] += _within(x[:, :-back] * tap, positions, back)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """By x and by the weight."""
        x, weight, positions = ctx.saved_tensors
        far, near, own = weight.squeeze(1).to(x.dtype).unbind(-1)
        by_x, by_tap = slope * own, [(slope * x).sum((0, 1))]
        for tap, back in ((near, ctx.dilation), (far, 2 * ctx.dilation)):
            if back >= x.shape[1]:
                by_tap.append(torch.zeros_like(tap))
                continue
            reached = _within(slope[:, back:], positions, back)
            by_x[:, :-back] += reached * tap
            by_tap.append((reached * x[:, :-back]).sum((0, 1)))
        return by_x, torch.stack(by_tap[::-1], -1).unsqueeze(1).to(weight.dtype), None, None


def _within(values: Tensor, positions: Tensor | None, back: int) -> Tensor:
    """values [B, T − back, C] of the tokens from ``back`` on, 0 where a document began less than ``back`` before."""
    return values if positions is None else values * (positions[:, back:, None] >= back).to(values.dtype)
