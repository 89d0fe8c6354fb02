"""Run a graph with ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.runtimes.session import Array, Session, shape_text


class ReferenceSession(Session):
    """A graph with its weights inside. See :class:`Session`."""

    provider = "onnx-reference"

    def __init__(self, path: Path, max_positions: int | None) -> None:
        self._path, self._max_positions = path, max_positions
        try:
            graph = onnx.load(str(path))
            onnx.checker.check_model(graph)
            self._evaluator: ReferenceEvaluator | None = ReferenceEvaluator(graph)
        except (OSError, DecodeError, onnx.checker.ValidationError) as error:
            raise ArtifactError(f"{path}: missing, damaged, or no ONNX graph ({error}); export it again") from None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._evaluator is None:
            raise EdgeformerError(f"{self._path}: the session is closed")
        feed = {name: self._checked(name, inputs) for name in self._evaluator.input_names}
        try:
            outputs = self._evaluator.run(None, feed)
        except Exception as error:  # whatever numpy raises inside an operator
            shapes = ", ".join(f"{name} {shape_text(array)}" for name, array in feed.items())
            raise InputError(f"{self._path.name}: the graph refuses {shapes} ({error})") from None
        return dict(zip(self._evaluator.output_names, outputs, strict=True))

    def close(self) -> None:
        """Let go of the graph."""
        self._evaluator = None

    def _checked(self, name: str, inputs: Mapping[str, Array]) -> Array:
        if name not in inputs:
            raise InputError(f"{self._path.name}: input {name!r} is missing (given: {', '.join(sorted(inputs))})")
        array = inputs[name]
        if array.dtype != "int64" or array.ndim != 2 or 0 in array.shape:
            raise InputError(f"{self._path.name}: input {name!r} must be int64[batch, seq], is {shape_text(array)}")
        if self._max_positions is not None and array.shape[1] > self._max_positions:
            raise InputError(
                f"{self._path.name}: {array.shape[1]} tokens; the model takes at most {self._max_positions}"
            )
        return array
