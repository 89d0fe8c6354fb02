"""Run a graph with ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.runtimes.session import Array, Graph, InputType


class ReferenceSession(Graph):
    """A graph with its weights inside. See :class:`Graph`."""

    provider = "onnx-reference"

    def __init__(self, path: Path, max_positions: int | None) -> None:
        self.path, self.max_positions = path, max_positions
        try:
            graph = onnx.load(str(path))
            onnx.checker.check_model(graph)
            evaluator = ReferenceEvaluator(graph)
        except (OSError, DecodeError, onnx.checker.ValidationError) as error:
            raise ArtifactError(f"{path}: missing, damaged, or no ONNX graph ({error}); export it again") from None
        self.inputs = dict.fromkeys(evaluator.input_names, InputType("int64", ("batch", "seq")))
        self._evaluator: ReferenceEvaluator | None = evaluator

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = self.prepare_feed(self._evaluator, inputs)
        assert self._evaluator is not None
        try:
            outputs = self._evaluator.run(None, feed)
        except Exception as error:  # whatever numpy raises inside an operator
            raise self.refusal(feed, str(error)) from None
        return dict(zip(self._evaluator.output_names, outputs, strict=True))

    def close(self) -> None:
        """Let go of the graph."""
        self._evaluator = None
