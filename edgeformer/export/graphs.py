"""Write the ONNX graphs of a variant: each with its own weights, or all with one shared file of weights."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir

from edgeformer.artifacts.files import replacing
from edgeformer.export.variants import Variant
from edgeformer.models.blocks.tracing import Graphs, extract_outputs
from edgeformer.tasks.early_exit import exit_logits

ALIGNMENT = 64
"""Offsets of tensors in a weights file are multiples of this many bytes."""

_SMALL_BYTES = 256
"""Tensors up to this size stay in the graph: shapes and scalars, which runtimes read while loading."""


@dataclass(frozen=True)
class WeightsFile:
    """Weights of several graphs in the same folder, every distinct tensor once."""

    path: Path
    file: BinaryIO
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)  # sha256 → offset and length

    def place(self, tensor: onnx_ir.TensorProtocol) -> onnx_ir.ExternalTensor:
        """Write the tensor, unless its bytes are in the file already, and return a reference to it."""
        content = tensor.tobytes()
        key = hashlib.sha256(content).hexdigest()
        if key not in self.offsets:
            self.file.write(b"\0" * (-self.file.tell() % ALIGNMENT))
            self.offsets[key] = (self.file.tell(), len(content))
            self.file.write(content)
        offset, length = self.offsets[key]
        name, shape = tensor.name or "", onnx_ir.Shape(tensor.shape.numpy())
        folder = str(self.path.parent)
        return onnx_ir.ExternalTensor(
            self.path.name, offset, length, tensor.dtype, shape=shape, name=name, base_dir=folder
        )


@contextmanager
def weights_file(path: Path) -> Iterator[WeightsFile]:
    """Open a weights file, which gets its name when everything was written."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield WeightsFile(path, file)


def write_graph(model: onnx_ir.Model, path: Path, weights: WeightsFile | None = None) -> int:
    """Write a graph, its larger weights to ``weights`` if given, and return the bytes of both."""
    shared_bytes = 0
    originals: dict[str, onnx_ir.TensorProtocol] = {}
    if weights is not None:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > _SMALL_BYTES:
                originals[name] = tensor
                value.const_value = weights.place(tensor)
                shared_bytes += tensor.nbytes
    try:
        with replacing(path) as temporary:
            onnx.save_model(onnx_ir.to_proto(model), str(temporary))
            if weights is None:
                onnx.checker.check_model(str(temporary))
    finally:
        for name, tensor in originals.items():
            model.graph.initializers[name].const_value = tensor
    return path.stat().st_size + shared_bytes


LOOP = "loop"
"""Name of the step graph that is run once per loop, and key of the main graph of other artifacts."""


@dataclass(frozen=True)
class Written:
    """Files that were written, relative to the bundle: loop → graph up to it, part → step graph.

    Attributes:
        states: of a graph with the states after every loop as outputs, which exists while the others are judged.
        size_bytes: file → size, shared weights included.
    """

    exits: dict[int, str]
    steps: dict[str, str]
    decode: str | None
    states: str
    size_bytes: dict[str, int]


@contextmanager
def write_graphs(bundle: Path, variant: Variant, graphs: Graphs, exits: Sequence[int]) -> Iterator[Written]:
    """Write the graphs of ``exits`` (the first one is the full graph), steps, decode, and for a while states."""
    files = {exit_: variant.file("model" if exit_ == exits[0] else f"model_exit{exit_}") for exit_ in exits}
    steps = {part: variant.file(f"step_{part}") for part in graphs.steps}
    decode = variant.file("decode") if graphs.decode is not None else None
    models = {file: extract_outputs(graphs.exits, {exit_logits(exit_): "logits"}) for exit_, file in files.items()}
    models |= {file: graphs.steps[part] for part, file in steps.items()}
    if decode is not None and graphs.decode is not None:
        models[decode] = graphs.decode
    states = [value.name for value in graphs.exits.graph.outputs if value.name and value.name.startswith("state_")]
    probe = extract_outputs(graphs.exits, {name: name for name in states})
    probe_path = (bundle / variant.weights).with_name(".states.onnx")
    with weights_file(bundle / variant.weights) if graphs.shared_weights else nullcontext() as weights:
        sizes = {file: write_graph(model, bundle / file, weights) for file, model in models.items()}
        write_graph(probe, probe_path, weights)
    try:
        yield Written(files, steps, decode, probe_path.relative_to(bundle).as_posix(), sizes)
    finally:
        probe_path.unlink(missing_ok=True)
