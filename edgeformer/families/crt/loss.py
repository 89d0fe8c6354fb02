"""Next-token loss of a language model at every exit, without ever holding all logits (paper B, eq. 4 and 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edgeformer.families.crt.model import CRT

CHUNK_TOKENS = 512
"""Tokens whose logits exist at the same time: at 50,257 words 98 MiB in float32."""

IGNORED = -100
"""The target of a position that is not predicted."""


def exit_losses(model: CRT, states: dict[int, Tensor], targets: Tensor, *, chunked: bool) -> dict[int, Tensor]:
    """Summed cross-entropy of every exit, in nats.

    Args:
        states: loop → hidden states [B, T, C], from ``model(…)``.
        targets: int64 [B, T]: the token after each position, or ``IGNORED``.
        chunked: compute logits ``CHUNK_TOKENS`` at a time, and again in the backward pass.

    Returns:
        loop → scalar: the sum over all positions that count. Divide by their number.
    """
    flat = targets.reshape(-1)
    return {
        loop: _summed(state.reshape(-1, state.shape[-1]), model.head_of(loop), flat, chunked=chunked)
        for loop, state in states.items()
    }


def weighted(losses: dict[int, Tensor], exit_weight: float) -> Tensor:
    """(1 − λ) · final + λ · mean over the earlier exits (eq. 5)."""
    final = losses[max(losses)]
    earlier = [loss for loop, loss in losses.items() if loop != max(losses)]
    if not earlier or not exit_weight:
        return final
    return (1 - exit_weight) * final + exit_weight * torch.stack(earlier).mean()


def _summed(x: Tensor, head: nn.Linear, targets: Tensor, *, chunked: bool) -> Tensor:
    if not chunked:
        return _cross_entropy(x, head, targets)
    total = x.new_zeros((), dtype=torch.float32)
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        if torch.is_grad_enabled():
            loss = checkpoint(_cross_entropy, x[part], head, targets[part], use_reentrant=False)
        else:
            loss = _cross_entropy(x[part], head, targets[part])
        total = total + loss
    return total


def _cross_entropy(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    logits = head(x)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
