"""Next-token loss of a language model at every exit, without ever holding all logits (paper B, eq. 4 and 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edgeformer.data.batching import IGNORED
from edgeformer.families.crt.model import CRT

CHUNK_TOKENS = 512
"""Tokens whose logits exist at the same time: at 50,257 words 98 MiB in float32."""


def exit_losses(model: CRT, states: dict[int, Tensor], targets: Tensor, *, chunked: bool) -> dict[int, Tensor]:
    """Summed cross-entropy of every exit, in nats.

    Args:
        states: loop → hidden states [B, T, C], from ``model(…)``.
        targets: int64 [B, T]: the token after each position, or ``IGNORED``.
        chunked: compute logits ``CHUNK_TOKENS`` at a time, and again in the backward pass.

    Returns:
        loop → scalar: the sum over all positions that count. Divide by their number.
    """
    flat, losses = targets.reshape(-1), dict[int, Tensor]()
    for loop, state in states.items():
        x, head = state.reshape(-1, state.shape[-1]), model.head_of(loop)
        if not chunked:
            losses[loop] = _cross_entropy(x, head, flat)
            continue
        losses[loop] = x.new_zeros((), dtype=torch.float32)
        for start in range(0, len(flat), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            losses[loop] = losses[loop] + checkpoint(_cross_entropy, x[part], head, flat[part], use_reentrant=False)
    return losses


def weighted(losses: dict[int, Tensor], exit_weight: float) -> Tensor:
    """(1 − λ) · final + λ · mean over the earlier exits (eq. 5)."""
    final = losses[max(losses)]
    earlier = [loss for loop, loss in losses.items() if loop != max(losses)]
    if not earlier or not exit_weight:
        return final
    return (1 - exit_weight) * final + exit_weight * torch.stack(earlier).mean()


def _cross_entropy(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    logits = head(x)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


class TokenLosses(nn.Module):
    """A language model that answers with losses instead of logits, which would not fit for every exit at once."""

    inputs = ("input_ids", "targets")
    optional = ("positions",)

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Of every exit ``loss_exitN``, the cross-entropy in nats, and what tokens can leave there by.

        ``confidence_exitN`` is the top probability (paper B, eq. 6), ``cosine_exitN`` the cosine between a token's
        hidden states before and after loop N, which comes close to 1 where the loop changed little (released code).

        Args:
            input_ids: int64 [B, T].
            targets: the token after each position, int64 [B, T], or ``IGNORED``.
            positions: place of each token in its document, int64 [B, T]; None: each row is one document.

        Returns:
            name → float32 [B, T]; losses are 0 where nothing is predicted.
        """
        found: dict[str, Tensor] = {}
        before: Tensor | None = None
        for loop, state in self.model.states(input_ids, positions):
            earlier, before = before, state
            if earlier is None or loop not in self.model.exits:
                continue
            losses, confidence = list[Tensor](), list[Tensor]()
            parts = torch.split(state.flatten(0, 1), CHUNK_TOKENS), torch.split(targets.flatten(), CHUNK_TOKENS)
            for part, wanted in zip(*parts, strict=True):
                logits = self.model.head_of(loop)(part).float()
                log_sum = logits.logsumexp(-1)
                counted = wanted != IGNORED
                own = logits.gather(-1, torch.where(counted, wanted, 0)[:, None])[:, 0]
                losses.append(torch.where(counted, log_sum - own, 0.0))
                confidence.append((logits.amax(-1) - log_sum).exp())
            found[f"loss_exit{loop}"] = torch.cat(losses).view_as(targets)
            found[f"confidence_exit{loop}"] = torch.cat(confidence).view_as(targets)
            found[f"cosine_exit{loop}"] = F.cosine_similarity(earlier.float(), state.float(), dim=-1)
        return found
