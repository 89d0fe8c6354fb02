"""Run a torch module as a Session. The only file of the runtime that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch

from edgeformer.backends.session import Array, Session, shape_text
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError


class TorchSession(Session):
    """A module as a session. It is put into evaluation mode and stays on its device; arrays are copied there and back.

    Args:
        model: its arguments are called like the inputs, all int64 [batch, seq]; it returns a tensor, which becomes
            the output ``logits``, or several by name.
        inputs: those it must be given.
        optional: those it takes where they are given.
        device: where its arguments belong; None: where its parameters lie.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Sequence[str] = ("input_ids", "attention_mask"),
        optional: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        first = next(model.parameters(), None)
        self._device = device or (first.device if first is not None else torch.device("cpu"))
        self._model: torch.nn.Module | None = model.eval()
        self._inputs, self._optional = tuple(inputs), tuple(optional)
        self.provider = f"torch-{self._device.type}"

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the module once under ``torch.inference_mode``; the outputs come back as float32."""
        if self._model is None:
            raise EdgeformerError("the torch session is closed")
        names = (*self._inputs, *(name for name in self._optional if name in inputs))
        tensors = {name: self._tensor(name, inputs) for name in names}
        with torch.inference_mode():
            answer = self._model(**tensors)
            outputs = answer if isinstance(answer, Mapping) else {"logits": answer}
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


class _Program(torch.nn.Module):
    """An exported program as a module whose arguments have names; it is always in evaluation mode."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        # Not a submodule: an exported module refuses to be put into evaluation mode.
        self._call = program.module().__call__

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The program's outputs; arguments in the order in which it was exported."""
        answer: torch.Tensor = self._call(*inputs.values())
        return answer


def open_torch_tensorrt(path: Path, inputs: Sequence[str]) -> TorchSession:
    """Open what ``export --trt-via torch-tensorrt`` saved. Raises ArtifactError when torch cannot read it."""
    import_module("torch_tensorrt")  # registers the operator that holds the engines
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch's readers have no common base class
        raise ArtifactError(f"{path}: torch cannot open this program ({error}); export the run again") from None
    return TorchSession(_Program(program), inputs, device=torch.device("cuda"))
