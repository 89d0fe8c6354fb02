"""Run a torch module as a Session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from edgeformer.backends.session import Array, Session, shape_text
from edgeformer.formats.errors import EdgeformerError, InputError


class TorchSession(Session):
    """A module as a session. It is put into evaluation mode and stays on its device; arrays are copied there and back.

    Args:
        model: its arguments are called like the inputs, all int64 [batch, seq]; it returns a tensor, which becomes
            the output ``logits``, or several by name.
        inputs: those it must be given.
        optional: those it takes where they are given.
        device: where its arguments belong; None: where its parameters lie.
        outputs: names of the tensors that it returns, in their order; others behind them are left where they are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Sequence[str] = ("input_ids", "attention_mask"),
        optional: Sequence[str] = (),
        device: torch.device | None = None,
        outputs: Sequence[str] = ("logits",),
    ) -> None:
        first = next(model.parameters(), None)
        self._device = device or (first.device if first is not None else torch.device("cpu"))
        self._model: torch.nn.Module | None = model.eval()
        self._inputs, self._optional, self._outputs = tuple(inputs), tuple(optional), tuple(outputs)
        self.provider = f"torch-{self._device.type}"

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the module once under ``torch.inference_mode``; the outputs come back as float32."""
        if self._model is None:
            raise EdgeformerError("the torch session is closed")
        names = (*self._inputs, *(name for name in self._optional if name in inputs))
        tensors = {name: self._tensor(name, inputs) for name in names}
        with torch.inference_mode():
            answer = self._model(**tensors)
            several = answer if isinstance(answer, tuple) else (answer,)
            outputs = answer if isinstance(answer, Mapping) else dict(zip(self._outputs, several, strict=False))
            # .cpu() waits for the device, so the call blocks until the answer is here.
            return {name: output.float().cpu().numpy() for name, output in outputs.items()}

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
