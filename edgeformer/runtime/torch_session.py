"""Run a torch module as a Session. The only file of the runtime that imports torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from edgeformer.runtime.session import Array, Session, shape_text
from edgeformer.schema.errors import EdgeformerError, InputError


class TorchSession(Session):
    """A module that maps (input_ids, attention_mask), both int64 [batch, seq], to logits [batch, classes].

    The module is put into evaluation mode and stays on its device; arrays are copied there and back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        first = next(model.parameters(), None)
        self._device = first.device if first is not None else torch.device("cpu")
        self._model: torch.nn.Module | None = model.eval()
        self.provider = f"torch-{self._device.type}"

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the module once under ``torch.inference_mode``; ``logits`` come back as float32."""
        if self._model is None:
            raise EdgeformerError("the torch session is closed")
        tensors = [self._tensor(name, inputs) for name in ("input_ids", "attention_mask")]
        with torch.inference_mode():
            # .cpu() waits for the device, so the call blocks until the answer is here.
            logits = self._model(*tensors).float().cpu()
        return {"logits": logits.numpy()}

    def close(self) -> None:
        """Let go of the module."""
        self._model = None

    def _tensor(self, name: str, inputs: Mapping[str, Array]) -> torch.Tensor:
        if name not in inputs:
            raise InputError(f"input {name!r} is missing (given: {', '.join(sorted(inputs)) or 'none'})")
        array = inputs[name]
        if array.dtype != "int64" or array.ndim != 2 or 0 in array.shape:
            raise InputError(f"input {name!r} must be int64[batch, seq] and not empty, but is {shape_text(array)}")
        return torch.from_numpy(array).to(self._device)
