"""What training computes in another way than plain torch does, because it takes less time; the same to rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nested import nested_tensor_from_jagged


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """torch's SDPA, causal. q, k, v [B, H, T, D].

    Args:
        documents: who may attend to whom, bool [B, 1, T, T], lower triangle included; or where the documents of packed
            rows begin, int64 [n + 1], see :func:`apart`; None: each row is one document.
    """
    if documents is not None and documents.ndim == 1:
        return apart(q, k, v, documents)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=documents, is_causal=documents is None)


def apart(q: Tensor, k: Tensor, v: Tensor, begins: Tensor) -> Tensor:
    """Causal attention of each document by itself. q, k, v [B, H, T, D] → the same shape.

    On a CUDA card one kernel of variable lengths computes all of them: flash in half formats, which takes no mask.

    Args:
        begins: where each document begins in the rows one after the other, rising, and their end: int64 [n + 1]. No
            document goes on in the next row.
    """
    shape = q.transpose(1, 2).shape
    if q.device.type == "cuda":
        nested_q, nested_k, nested_v = jagged((q, k, v), begins)
        mixed: Tensor = F.scaled_dot_product_attention(nested_q, nested_k, nested_v, is_causal=True)
        return mixed.transpose(1, 2).values().reshape(shape).transpose(1, 2)
    lengths = begins.diff().tolist()
    pieces = zip(*(torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (q, k, v)), strict=True)
    alone = [_causal(one[0], one[1], one[2]) for one in pieces]
    return torch.cat(alone).view(shape).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one document: q, k, v [T, H, D] → the same shape."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def jagged(tensors: tuple[Tensor, ...], begins: Tensor) -> list[Tensor]:
    """Tensors [B, H, T, D] as nested ones of the documents in them, [n, H, *, D]; ``begins`` as of :func:`apart`."""
    longest = tensors[0].shape[2]
    return [
        nested_tensor_from_jagged(
            x.transpose(1, 2).flatten(0, 1).contiguous(), begins, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for x in tensors
    ]


def attention_here(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """The same as :func:`attention`; with a gradient, on a CPU, in float32.

    There torch's gradient of it takes twice as long in bfloat16, casts included.
    """
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad):
        return attention(q, k, v, documents)
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float(), documents).to(q.dtype)


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
