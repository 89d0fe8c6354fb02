"""Token-by-token decoding in torch, with numpy outside. With the torch session, all of the runtime that knows torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from edgeformer.backends.session import Array


class CachedModel(Protocol):
    """What is wrapped: a causal model that keeps what it computed for earlier tokens."""

    def read(self, input_ids: torch.Tensor) -> None:
        """Take in tokens, int64 [1, n]."""

    def advance(self, loop: int) -> torch.Tensor:
        """Hidden state [1, C] of the newest token after ``loop``."""

    def logits(self, state: torch.Tensor, loop: int) -> torch.Tensor:
        """Logits float32 [1, V] of that state."""


class TorchDecoder:
    """One text, decoded on the device that the model's weights lie on."""

    def __init__(self, model: CachedModel, device: torch.device | None = None) -> None:
        self._model, self._device = model, device or torch.device("cpu")
        self._state: torch.Tensor | None = None
        self.provider = f"torch-{self._device.type}"

    def read(self, ids: Sequence[int]) -> None:
        """Take in the next tokens. Raises InputError where the text gets longer than the model takes."""
        self._model.read(torch.tensor([list(ids)], dtype=torch.int64, device=self._device))
        self._state = None

    def advance(self, loop: int) -> None:
        """Compute the newest token up to ``loop``, further than it was computed before."""
        self._state = self._model.advance(loop)

    def logits(self, loop: int) -> Array:
        """Logits float32 [V] of the exit after ``loop``, the one that was advanced to last."""
        if self._state is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        return self._model.logits(self._state, loop)[0].cpu().numpy()
