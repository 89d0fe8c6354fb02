"""Nodes that ONNX Runtime executes for an optimised graph at a given input shape, with their shapes and durations."""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.onnxruntime.providers import CPU
from edgeformer.runtimes.session import Array

_ENDING = "_kernel_time"
_BYTES = {
    "float": 4, "float16": 2, "bfloat16": 2, "double": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "uint4": 0.5, "int4": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Type (ONNX Runtime's name: float, float16, int64…) and shape of an executed node's input or output."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes; unknown types count as 4 bytes per element."""
        return math.ceil(self.elements * _BYTES.get(self.dtype, 4))


@dataclass(frozen=True)
class ExecutedNode:
    """One executed node: the size of its constant inputs, and the mean duration over the faster half of the calls."""

    op: str
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameter_bytes: int
    duration_us: float


class ProfiledGraph:
    """An ONNX graph opened with ONNX Runtime's profiler; ``inputs``: name → ONNX type and shape (None: dynamic).

    With ``prepacked`` weights, products are as fast as in production; without, events show the weights' shapes.
    Raises ArtifactError if ONNX Runtime cannot open it.
    """

    def __init__(self, path: Path, threads: int = 1, *, prepacked: bool = False) -> None:
        import onnxruntime as ort

        self.path = path
        self._folder = tempfile.TemporaryDirectory(prefix="edgeformer-nodes-")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # the exception is enough
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "nodes")
        if not prepacked:
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session: Any = ort.InferenceSession(str(path), options, providers=[CPU])
        except Exception as error:  # onnxruntime's exceptions share no base class
            self._folder.cleanup()
            raise ArtifactError(
                f"{path}: ONNX Runtime cannot open it to list its operators ({str(error)[:200]})"
            ) from None
        self.inputs: dict[str, tuple[str, tuple[int | None, ...]]] = {
            node.name: (node.type, tuple(size if isinstance(size, int) else None for size in node.shape))
            for node in self._session.get_inputs()
        }

    def list_nodes(self, *feeds: Mapping[str, Array], calls: int = 1) -> list[tuple[ExecutedNode, ...]]:
        """Run every feed ``calls`` times, end the session, and return the nodes of each feed. Raises InputError."""
        try:
            for feed in feeds:
                for _ in range(calls):
                    self._session.run(None, dict(feed))
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise InputError(f"{self.path.name}: the graph does not accept an input ({str(error)[:200]})") from None
        finally:
            events = json.loads(Path(self._session.end_profiling()).read_text(encoding="utf-8"))
            self._session = None
            self._folder.cleanup()
        recorded_calls: list[list[dict[str, Any]]] = [[]]
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(_ENDING):
                recorded_calls[-1].append(event)
            elif event.get("name") == "model_run":  # follows the nodes of a call
                recorded_calls.append([])
        listed = []
        for start in range(0, len(feeds) * calls, calls):
            last, repeated = recorded_calls[start + calls - 1], recorded_calls[start : start + calls]
            durations = np.array(
                [[event["dur"] for event in call] for call in repeated if len(call) == len(last)], float
            )
            # The slower half is noise of other processes. Durations are truncated to whole microseconds, so a mean
            # resolves more than a median.
            means = np.sort(durations, axis=0)[: (len(durations) + 1) // 2].mean(axis=0)
            nodes = []
            for event, duration_us in zip(last, means, strict=True):
                facts, name = event["args"], event["name"].removesuffix(_ENDING)
                inputs, outputs = (
                    tuple(Tensor(dtype, tuple(shape)) for entry in facts.get(key, []) for dtype, shape in entry.items())
                    for key in ("input_type_shape", "output_type_shape")
                )
                parameter_bytes = int(facts.get("parameter_size", 0))
                nodes.append(ExecutedNode(facts["op_name"], name, inputs, outputs, parameter_bytes, float(duration_us)))
            listed.append(tuple(nodes))
        return listed
