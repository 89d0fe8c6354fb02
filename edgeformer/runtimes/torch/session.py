"""Run a torch module as a Session, or a model with caches in a Decoder, with numpy inputs and outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.runtimes.decoder import LoopEngine
from edgeformer.runtimes.session import Array, InputType, Session, check_inputs

_TOKENS = InputType("int64", ("batch", "seq"))


class TorchSession(Session):
    """Session of a module in evaluation mode on its device; arrays are copied to the device and back.

    The model's arguments are named like the inputs, all int64 [batch, seq]; ``optional`` ones are passed if present. It
    returns a tensor, a tuple of tensors with names in ``outputs`` (others are ignored), or a mapping of them by name.
    """

    def __init__(
        self, model: torch.nn.Module, inputs: Sequence[str] = ("input_ids", "attention_mask"),
        optional: Sequence[str] = (), outputs: Sequence[str] = ("logits",),
    ) -> None:  # fmt: skip
        first = next(model.parameters(), None)
        self._device = first.device if first is not None else torch.device("cpu")
        self._model: torch.nn.Module | None = model.eval()
        self._inputs, self._optional, self._outputs = tuple(inputs), tuple(optional), tuple(outputs)
        self.provider = f"torch-{self._device.type}"

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._model is None:
            raise EdgeformerError("the torch session is closed")
        names = (*self._inputs, *(name for name in self._optional if name in inputs))
        feed = check_inputs(self.provider, dict.fromkeys(names, _TOKENS), inputs)
        with torch.inference_mode():
            result = self._model(**{name: torch.from_numpy(array).to(self._device) for name, array in feed.items()})
            tensors = result if isinstance(result, tuple) else (result,)
            outputs = result if isinstance(result, Mapping) else dict(zip(self._outputs, tensors, strict=False))
            # .cpu() waits for the device, so the call blocks until the outputs are available.
            return {name: output.float().cpu().numpy() for name, output in outputs.items()}

    def close(self) -> None:
        self._model = None


class TorchEngine(LoopEngine[torch.Tensor]):
    """Loop engine on a model with caches, in evaluation mode, whose state is [B, n, C] on its device.

    The model has ``fresh()`` (the same without tokens), ``embed(ids [B, n], start, keep=…)``, ``run_loop(number from 0,
    state, keep=…)``, ``logits(state […, C], loop)`` → float32 […, V], ``loops``, ``max_positions`` and ``device``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.provider = f"torch-{model.device.type}"
        self.stops = tuple(range(1, model.loops + 1))
        self.max_positions: int | None = model.max_positions

    def fresh(self) -> Self:
        return type(self)(self._model.fresh())

    def embed(self, ids: Array, start: int, *, keep: bool) -> torch.Tensor:
        state: torch.Tensor = self._model.embed(torch.from_numpy(ids).to(self._model.device), start, keep=keep)
        return state

    def advance(self, stretch: int, states: Sequence[torch.Tensor], *, keep: bool) -> torch.Tensor:
        joined = states[0] if len(states) == 1 else torch.cat([*states], dim=1)
        state: torch.Tensor = self._model.run_loop(stretch, joined, keep=keep)
        return state

    def readout(self, state: torch.Tensor, loop: int) -> Array:
        logits: Array = self._model.logits(state[:, -1], loop).cpu().numpy()
        return logits

    def hidden(self, state: torch.Tensor) -> Array:
        hidden: Array = state[:, -1].float().cpu().numpy()
        return hidden
