"""What export would write, run in torch: the same inputs and outputs by name, without the minutes of exporting it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeformer.models.crt.graphs import step_specs
from edgeformer.models.crt.model import CRT
from edgeformer.models.tracing import GraphSpec
from edgeformer.runtimes.onnxruntime.decode import StepParts


class TorchGraph:
    """Stands in for an OnnxSession."""

    provider, max_positions = "torch-cpu", None

    def __init__(self, spec: GraphSpec) -> None:
        self.spec, self.inputs = spec, tuple(spec.inputs)

    def empty(self, name: str, rows: int) -> np.ndarray[Any, Any]:
        example, axes = self.spec.inputs[name], self.spec.axes[name]
        shape = (rows, *(0 if axis in axes else size for axis, size in enumerate(example.shape) if axis))
        return example.new_zeros(shape).numpy()

    def most_tokens(self) -> None: ...

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        arguments = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in self.inputs]
        for name, given in zip(self.inputs, arguments, strict=True):
            example, axes = self.spec.inputs[name], self.spec.axes.get(name, {})
            assert given.dtype == example.dtype, name
            fixed = [axis for axis in range(example.ndim) if axis not in axes]
            assert all(given.shape[axis] == example.shape[axis] for axis in fixed), (name, given.shape)
        with torch.inference_mode():
            found = self.spec.module(*arguments)
        found = found if isinstance(found, tuple) else (found,)
        return {name: tensor.numpy() for name, tensor in zip(self.spec.outputs, found, strict=True)}


def torch_parts(model: CRT) -> StepParts:
    """A step bundle's parts, with a readout for every exit."""
    specs = step_specs(model)
    paths = {part: Path(part) for part in specs}
    return StepParts(paths, model.loops, model.exits, lambda path: TorchGraph(specs[path.name]))  # type: ignore
