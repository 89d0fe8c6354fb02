"""The ONNX graphs of a variant as files: each with its own weights, or all with one file of weights beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import replacing
from edgeformer.export.variants import Variant
from edgeformer.models.tracing import Graphs, cut_out
from edgeformer.tasks.early_exit import exit_logits

ALIGNMENT = 64
"""Bytes: where a tensor may begin in a weights file."""

_SMALL_BYTES = 256
"""A tensor up to this size stays in the graph: shapes and scalars, which runtimes want to see at once."""


class WeightsFile:
    """Weights of several graphs, every distinct tensor once. The graphs lie in the same folder."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}

    def place(self, tensor: onnx_ir.TensorProtocol) -> onnx_ir.ExternalTensor:
        """The tensor as a reference into this file, which it is written to unless its bytes are there already."""
        content = tensor.tobytes()
        key = hashlib.sha256(content).hexdigest()
        if key not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            self._places[key] = (self._file.tell(), len(content))
            self._file.write(content)
        offset, length = self._places[key]
        return onnx_ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            tensor.dtype,
            shape=onnx_ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            base_dir=str(self.path.parent),
        )


@contextmanager
def weights_file(path: Path) -> Iterator[WeightsFile]:
    """The file has its name only when everything was written."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield WeightsFile(path, file)


def write_graph(model: onnx_ir.Model, path: Path, weights: WeightsFile | None = None) -> int:
    """Write a graph, its larger weights to ``weights`` if given; its bytes with them. ``model`` is left as it was."""
    shared = 0
    originals: dict[str, onnx_ir.TensorProtocol] = {}
    if weights is not None:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > _SMALL_BYTES:
                originals[name] = tensor
                value.const_value = weights.place(tensor)
                shared += tensor.nbytes
    try:
        with replacing(path) as temporary:
            onnx.save_model(onnx_ir.to_proto(model), str(temporary))
            if weights is None:
                onnx.checker.check_model(str(temporary))
    finally:
        for name, tensor in originals.items():
            model.graph.initializers[name].const_value = tensor
    return path.stat().st_size + shared


LOOP = "loop"
"""The step graph that is run again and again."""


@dataclass(frozen=True)
class Written:
    """Files relative to the bundle, each with its size, shared weights included.

    Attributes:
        others: graphs that were there before, and are written anew for the sake of the shared weights → size.
    """

    exits: dict[int, str]
    steps: dict[str, str]
    decode: str | None
    size_bytes: dict[str, int]
    others: dict[str, int] = field(default_factory=dict)


@contextmanager
def write_graphs(
    bundle: Path, variant: Variant, graphs: Graphs, exits: Sequence[int], others: Mapping[str, Path]
) -> Iterator[Written]:
    """Write the graphs of ``exits`` (the first one is the full graph), steps and decode.

    Args:
        others: further graphs of the variant, name in the bundle → where they lie now. Where graphs share their
            weights these are written anew, because their weights get another place.

    While the context lasts there is also :func:`probe_path`: the states after every loop as outputs.
    """
    files = {exit_: variant.file("model" if exit_ == exits[0] else f"model_exit{exit_}") for exit_ in exits}
    steps = {part: variant.file(f"step_{part}") for part in graphs.steps}
    decode = variant.file("decode") if graphs.decode is not None else None
    made = {file: cut_out(graphs.exits, {exit_logits(exit_): "logits"}) for exit_, file in files.items()}
    made |= {file: graphs.steps[part] for part, file in steps.items()}
    if decode is not None and graphs.decode is not None:
        made[decode] = graphs.decode
    carried = {}
    if graphs.shared_weights:
        carried = {file: _with_weights_of(variant, path) for file, path in others.items() if file not in made}
    states = [value.name for value in graphs.exits.graph.outputs if value.name and value.name.startswith("state_")]
    probe = cut_out(graphs.exits, {name: name for name in states})
    with weights_file(bundle / variant.weights) if graphs.shared_weights else nullcontext() as weights:
        sizes = {file: write_graph(graph, bundle / file, weights) for file, graph in made.items()}
        again = {file: write_graph(graph, bundle / file, weights) for file, graph in carried.items()}
        write_graph(probe, probe_path(bundle, variant), weights)
    try:
        yield Written(files, steps, decode, sizes, again)
    finally:
        probe_path(bundle, variant).unlink(missing_ok=True)


def _with_weights_of(variant: Variant, path: Path) -> onnx_ir.Model:
    """The graph in ``path``. Raises ArtifactError where it names another weights file than its variant's."""
    graph = onnx_ir.load(path)
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, onnx_ir.ExternalTensor) and tensor.location != Path(variant.weights).name:
            raise ArtifactError(f"{path}: names {str(tensor.location)!r} as its weights, not {variant.weights}")
    return graph


def probe_path(bundle: Path, variant: Variant) -> Path:
    """A graph that is there while the others are checked, and gone afterwards."""
    return bundle / variant.folder / ".states.onnx"
