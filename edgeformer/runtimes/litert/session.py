"""Run a .tflite file with LiteRT and XNNPACK on the processor.

The converter fixes all shapes, so a file has one signature per number of rows and length, named ``ROWSxTOKENS``.
XNNPACK copies the weights of every operator of every signature into its own layout. Its weight cache, which only
LiteRT's CompiledModel offers in Python, keeps one copy of a weight that several operators or signatures use.
"""

import atexit
import ctypes
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.runtime import OptionalPackage
from edgeformer.runtimes.session import Array, Graph, InputType, reason_of, require_file
from edgeformer.system.host import default_threads
from edgeformer.system.output import capture_native_stderr, discard_native_stderr
from edgeformer.system.worker import Send, WorkerJob, run_job

EXTRA = PROVIDER = "litert"
LITERT = OptionalPackage(
    "ai-edge-litert", EXTRA, "LiteRT, which runs .tflite files", ("ai_edge_litert",),
    """import importlib.metadata
from ai_edge_litert.compiled_model import CompiledModel
say(version=importlib.metadata.version("ai-edge-litert"))
""",
)  # fmt: skip
_SIGNATURE = re.compile(r"(\d+)x(\d+)")
_IN_MEMORY = ":memory"
"""XNNPACK's name of a weight cache in anonymous memory (memfd)."""
_IDENTIFIER = b"TFL3"
_COVERAGE_S = 120.0


@cache
def load_library() -> Any:
    """Return the process's LiteRT environment for the processor. Raises MissingDependencyError."""
    with LITERT.importing():
        from ai_edge_litert.environment import Environment
    # With an existing folder LiteRT loads libraries for GPUs and NPUs, which are not used here.
    nowhere = str(Path(tempfile.gettempdir()) / "edgeformer-has-no-litert-accelerators")
    with capture_native_stderr():
        environment = Environment.create(
            runtime_path=nowhere, compiler_plugin_path=nowhere, dispatch_library_path=nowhere
        )
    # Freeing it prints, too, and models must not outlive it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment._capsule))
    atexit.register(discard_native_stderr)  # what its static objects print at the end
    return environment


class _Buffers(NamedTuple):
    """Tensors of a signature in LiteRT's memory: name → buffer; and shapes of the outputs."""

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


class LiteRTSession(Graph):
    """A .tflite file of text inputs, opened by LiteRT with XNNPACK.

    A call pads its texts to the next length and splits its rows among the signatures of that length. ``size_bytes``: of
    the file, as export wrote it; None: not checked.
    """

    provider = PROVIDER

    def __init__(
        self, path: Path, threads: int | None = None, max_positions: int | None = None, size_bytes: int | None = None
    ) -> None:
        environment = load_library()
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.cpu_options import CpuOptions
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import Options

        require_file(path)
        with path.open("rb") as file:
            header = file.read(8)
        status = path.stat()
        # LiteRT reads beyond the end of a file that was cut short.
        if header[4:] != _IDENTIFIER or size_bytes not in (None, status.st_size):
            raise ArtifactError(f"{path}: is damaged, or no .tflite file; {REMEDY}")
        self.path, self.max_positions, self.threads = path, max_positions, threads or default_threads()
        self._weight_cache = _IN_MEMORY if hasattr(os, "memfd_create") else ""
        cpu = CpuOptions(num_threads=self.threads, xnnpack_weight_cache_path=self._weight_cache)
        options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=cpu)
        try:
            with capture_native_stderr():
                self._model: Any = CompiledModel.from_file(str(path), environment=environment, options=options)
                signatures = self._model.get_signature_list()
        except Exception as error:  # RuntimeError, and other classes for damaged files
            raise ArtifactError(f"{path}: cannot be opened by LiteRT ({reason_of(error)}); {REMEDY}") from None
        shapes = [match for name in signatures if (match := _SIGNATURE.fullmatch(name)) is not None]
        if not shapes:
            raise ArtifactError(
                f"{path}: has no signatures ROWSxTOKENS, as export --litert writes; export the run again"
            )
        self._rows: dict[int, list[int]] = {}  # length → rows of its signatures, the largest first
        for rows, length in sorted((int(match[1]), int(match[2])) for match in shapes)[::-1]:
            self._rows.setdefault(length, []).append(rows)
        self.lengths = tuple(sorted(self._rows))  # tokens of the file's signatures
        self._names = tuple(signatures[shapes[0][0]]["inputs"]), tuple(signatures[shapes[0][0]]["outputs"])
        self.inputs = {name: InputType("int64", ("batch", "sequence")) for name in self._names[0]}
        self._buffers: dict[str, _Buffers] = {}
        self._coverage = partial(_read_coverage, str(path), status.st_size, status.st_mtime_ns)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # 1. Pad the texts to the next length
        feed = self.prepare_feed(self._model, inputs, same_shape=True)
        count, tokens = next(iter(feed.values())).shape
        length = next((length for length in self.lengths if length >= tokens), None)
        if length is None:
            raise InputError(
                f"{self.path.name}: the text has {tokens} tokens, and the file's longest signature has "
                f"{self.lengths[-1]}; shorten it, or export with a larger data.max_length"
            )
        limits = np.iinfo(np.int32)
        if any(array.min() < limits.min or array.max() > limits.max for array in feed.values()):
            raise InputError(f"{self.path.name}: a token id lies outside the model's vocabulary")
        padding = ((0, 0), (0, length - tokens))  # zeros, also in the attention mask
        padded = {name: np.pad(array.astype(np.int32), padding) for name, array in feed.items()}

        # 2. Split their rows among the signatures of that length
        pieces: dict[str, list[Array]] = {name: [] for name in self._names[1]}
        start = 0
        while start < count:
            rows = next(rows for rows in self._rows[length] if rows <= count - start)
            name, model = f"{rows}x{length}", self._model
            try:
                # LiteRT loads more libraries for the first call, and says so.
                with capture_native_stderr() if name not in self._buffers else nullcontext():
                    if name not in self._buffers:
                        details = model.get_output_tensor_details(name)
                        self._buffers[name] = _Buffers(
                            {key: model.create_input_buffer_by_name(name, key) for key in self._names[0]},
                            {key: model.create_output_buffer_by_name(name, key) for key in self._names[1]},
                            {key: tuple(details[key]["shape"]) for key in self._names[1]},
                        )
                    buffers = self._buffers[name]
                    for key, array in padded.items():
                        buffers.inputs[key].write(np.ascontiguousarray(array[start : start + rows]))
                    model.run_by_name(name, buffers.inputs, buffers.outputs)
                    for key, shape in buffers.shapes.items():
                        values = buffers.outputs[key].read(int(np.prod(shape)), np.float32)
                        pieces[key].append(np.array(values).reshape(shape))
            except RuntimeError as error:
                raise InputError(
                    f"{self.path.name}: LiteRT cannot compute this call; a token id may lie outside the model's "
                    f"vocabulary ({reason_of(error)})"
                ) from None
            start += rows
        outputs = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
        # Only outputs [batch, sequence, …] have an axis of tokens.
        return {name: output[:, :tokens] if output.ndim > 2 else output for name, output in outputs.items()}

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "threads": self.threads, "lengths": list(self.lengths),
            "xnnpack_weight_cache": "in memory" if self._weight_cache else "none: needs memfd_create, as Linux has",
        }  # fmt: skip
        if (coverage := self._coverage()) is not None:
            counts = Counter[str]()
            for (place, _), nodes in coverage.items():
                counts[place] += nodes
            settings["nodes_by_provider"] = dict(counts)
        return settings

    def caveats(self) -> tuple[str, ...]:
        if (coverage := self._coverage()) is None:
            return ("LiteRT does not report which operators XNNPACK computes",)
        outside = {operator: nodes for (place, operator), nodes in coverage.items() if place != "XNNPACK"}
        if not outside:
            return ()
        listed = ", ".join(f"{operator} ({nodes})" for operator, nodes in sorted(outside.items()))
        total = sum(coverage.values())
        return (f"{sum(outside.values())} of {total} operators run in LiteRT's own kernels, not in XNNPACK: {listed}",)

    def close(self) -> None:
        self._buffers = {}
        if self._model is not None:
            self._model.close()
        self._model = None


class Coverage(Frozen):
    """Message: XNNPACK or LiteRT, operator, and nodes of a file's first signature."""

    rows: tuple[tuple[str, str, int], ...]


class CoverageJob(WorkerJob):
    """Reads a file with LiteRT's Interpreter. CompiledModel does not report what the Interpreter does, which loads all
    weights again."""

    name = "coverage"
    messages: ClassVar[tuple[type[BaseModel], ...]] = (Coverage,)
    path: str


@cache
def _read_coverage(path: str, size: int, changed_ns: int) -> Counter[tuple[str, str]] | None:
    """Return (XNNPACK or LiteRT, operator) → nodes of a file's first signature; None: it is not known."""
    messages: list[Coverage] = []
    run_job(CoverageJob(threads=1, path=path), messages.append, _COVERAGE_S)
    return Counter({(place, operator): nodes for place, operator, nodes in messages[0].rows}) if messages else None


def work(document: bytes, send: Send) -> None:
    """Send the coverage of a :class:`CoverageJob`."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=CoverageJob.model_validate_json(document, strict=False).path)
    interpreter.allocate_tensors()
    nodes = interpreter._get_ops_details()
    # A delegate's node comes after the nodes that it replaces, and has the outputs that others read.
    producers = {int(output): node for node in nodes for output in node["outputs"]}
    unvisited = [int(output["index"]) for output in interpreter.get_output_details()]
    executed: dict[int, str] = {}
    while unvisited:
        node = producers.get(unvisited.pop())
        if node is not None and node["index"] not in executed:
            executed[node["index"]] = node["op_name"]
            unvisited += [int(value) for value in node["inputs"]]
    delegated, outside = Counter[str](), Counter[str]()
    for node in nodes:
        if node["op_name"] != "DELEGATE":
            (outside if node["index"] in executed else delegated)[node["op_name"]] += 1
    rows = [("XNNPACK", *item) for item in delegated.items()] + [("LiteRT", *item) for item in outside.items()]
    send(Coverage(rows=tuple(rows)))
