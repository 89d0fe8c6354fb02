"""Attention written out, which graphs are traced with. Training and evaluation in torch use torch's fused kernels."""

from __future__ import annotations

from torch import Tensor


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, what torch's ``scaled_dot_product_attention`` computes.

    That one is exported with a copy of all keys, scaled and transposed through two changes of shape. Here the scale is
    on the queries alone, before the product, where FP16 cannot overflow for it; an exported FP16 graph computes its
    softmax in float32, see :mod:`edgeformer.families.tracing`.

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
