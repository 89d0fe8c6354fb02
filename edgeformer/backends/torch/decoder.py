"""Token-by-token decoding in torch, with numpy outside."""

from __future__ import annotations

from typing import Protocol

import torch

from edgeformer.backends.decoder import Decoder, LoopEngine
from edgeformer.backends.session import Array


class CachedModel(Protocol):
    """What is wrapped: a causal model that keeps what it computed for earlier tokens."""

    loops: int
    max_positions: int

    def embed(self, input_ids: torch.Tensor, start: int, *, keep: bool) -> torch.Tensor:
        """Embeddings [B, n, C] of the next tokens, int64 [B, n], the first of them at place ``start``."""

    def run_loop(self, number: int, x: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Tokens [B, n, C] through the loop ``number``, from 0."""

    def logits(self, state: torch.Tensor, loop: int) -> torch.Tensor:
        """Logits float32 [B, V] of ``state`` [B, C], a token's after ``loop``."""


class TorchEngine(LoopEngine[torch.Tensor]):
    """A cached model on the device that its weights lie on; stops after every loop. A state is [B, n, C]."""

    def __init__(self, model: CachedModel, device: torch.device) -> None:
        self._model: CachedModel | None = model
        self._device = device
        self.provider = f"torch-{device.type}"
        self.stops = tuple(range(1, model.loops + 1))
        self.max_positions: int | None = model.max_positions

    def embed(self, ids: Array, start: int, *, keep: bool) -> torch.Tensor:
        """See :meth:`LoopEngine.embed`."""
        return self._opened.embed(torch.from_numpy(ids).to(self._device), start, keep=keep)

    def advance(self, stretch: int, state: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """See :meth:`LoopEngine.advance`."""
        return self._opened.run_loop(stretch, state, keep=keep)

    def joined(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """See :meth:`LoopEngine.joined`."""
        return torch.cat((first, second), dim=1)

    def readout(self, state: torch.Tensor, loop: int) -> Array:
        """See :meth:`LoopEngine.readout`."""
        return self._opened.logits(state[:, -1], loop).cpu().numpy()

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    @property
    def _opened(self) -> CachedModel:
        if self._model is None:
            raise ValueError("the decoder is closed")
        return self._model


def torch_decoder(model: CachedModel, device: torch.device | None = None) -> Decoder[torch.Tensor]:
    """A decoder on a cached model.

    Args:
        model: in evaluation mode; it serves this decoder alone.
        device: that its weights lie on; None: the CPU.
    """
    return Decoder(TorchEngine(model, device or torch.device("cpu")))
