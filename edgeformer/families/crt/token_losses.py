"""The loss of every token at every exit of a language model: what evaluation asks torch for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeformer.families.crt.loss import CHUNK_TOKENS, IGNORED
from edgeformer.families.crt.model import CRT


class TokenLosses(nn.Module):
    """A language model that answers with losses instead of logits, which would not fit for every exit at once."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Cross-entropy in nats, ``loss_exitN`` → float32 [B, T]; 0 where nothing is predicted.

        Args:
            input_ids: int64 [B, T].
            targets: the token after each position, int64 [B, T], or ``IGNORED``.
            positions: place of each token in its document, int64 [B, T]; None: each row is one document.
        """
        states = self.model(input_ids, positions)
        return {
            f"loss_exit{loop}": _losses(self.model.head_of(loop), state.flatten(0, 1), targets.flatten()).view_as(
                targets
            )
            for loop, state in states.items()
        }


def _losses(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    """x [n, C], targets [n] → float32 [n], logits for a few hundred tokens at a time."""
    return torch.cat(
        [
            nn.functional.cross_entropy(head(part).float(), wanted, ignore_index=IGNORED, reduction="none")
            for part, wanted in zip(torch.split(x, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
        ]
    )
