"""``export --coreml``: ML programs of the full and exit graphs in FP16, and with INT8 weights, as zipped .mlpackage.

An artifact of a bundle is a file, and an .mlpackage is a folder: the zip file holds it, uncompressed.
"""

from __future__ import annotations

import math
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest, Engine, Precision, Sharing
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.coreml.session import COREMLTOOLS, FORMAT, NOT_APPLE, PACKAGE
from edgeformer.runtimes.runtime import (
    ENGINES_FOLDER,
    Builder,
    BuildJob,
    Target,
    Unavailable,
    built_entry,
    full_text_graphs,
    initial_entry,
    silent_libraries,
    unmeasured_parity,
)
from edgeformer.system.capability import installed_version

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile

MAX_BATCH = 16
_EXAMPLE_LENGTH = 7
_ITEM_BYTES = {10: 2, 11: 4, 21: 1}
"""Types of weights in an ML program → bytes: FP16, FP32, INT8."""


class CoreMLBuilder(Builder):
    """A model in FP16 of each full and exit graph with the full vocabulary; with ``--int8`` also one with INT8 weights.

    FP16 is the default of ML programs: the Neural Engine and the GPU compute in it.
    """

    name = "coreml"
    formats = (FORMAT,)
    flag = "--coreml"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        problem = COREMLTOOLS.missing()
        return Unavailable(FORMAT, problem, "fp16") if problem is not None else Target(FORMAT, precision="fp16")

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        has_int8 = any(graph.precision == "int8" for graph in job.graphs)
        precisions: tuple[Precision, ...] = ("fp16", "int8") if has_int8 else ("fp16",)
        for precision in precisions:
            for graph in full_text_graphs(job, "fp32"):
                yield self._build(graph, precision, job)
        for graph in job.graphs:
            if graph.role == "decode" and graph.precision == "fp32" and not graph.trimmed:
                reason = "Core ML: models with caches of earlier tokens are not supported; use --gguf or ONNX"
                yield initial_entry(graph, FORMAT, "fp16", reason=reason)

    def _build(self, graph: ArtifactManifest, precision: Precision, job: BuildJob) -> ArtifactManifest:
        """Write the model of one graph, and return its manifest entry."""
        reason = f"{NOT_APPLE}; run there: edgeformer verify --write"
        entry = initial_entry(graph, FORMAT, precision, parity=unmeasured_parity(graph, reason, precision))
        try:
            module = job.module(graph)
        except EdgeformerError as error:
            return entry.model_copy(update={"status": "unavailable", "reason": str(error), "parity": None})
        file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}_{precision}.mlpackage.zip"
        length, start_s = min(job.max_length, job.max_positions), time.perf_counter()
        names = tuple(graph.inputs), tuple(graph.outputs) or ("logits",)
        try:
            with bar(job.progress, f"Converting {entry.id} to Core ML", None):
                weights = write_model(module, *names, length, job.bundle / file, precision)
        except EdgeformerError as error:
            return entry.model_copy(update={"reason": str(error)})
        unique = sum(parameter.numel() for parameter in module.parameters())
        if graph.sharing is not None:  # an exit does not need every parameter of the model
            unique = graph.sharing.unique_parameters
        engine = Engine(
            builder=f"coremltools {installed_version('coremltools')}",
            seconds=round(time.perf_counter() - start_s, 2),
            checked_by="size",
            weight_bytes=weights.bytes,
            graph_bytes=(job.bundle / str(graph.file)).stat().st_size,
            shapes=dict.fromkeys(graph.inputs, ((1, 1), (1, min(_EXAMPLE_LENGTH, length)), (MAX_BATCH, length))),
        )
        fields: dict[str, Any] = {
            "engine": engine,
            "quantized": {"weights": weights.quantized} if weights.quantized else {},
            "sharing": Sharing(
                unique_parameters=unique, stored_parameters=weights.parameters, constant_elements=weights.constants,
                weight_bytes=weights.bytes,
            ),
        }  # fmt: skip
        if weights.parameters > unique:
            fields["reason"] = f"stores {weights.parameters:,} parameters for a model of {unique:,}"
        return built_entry(entry, job.bundle, file, ("coremltools", "torch"), **fields)


@dataclass(frozen=True)
class StoredWeights:
    """Contents of a model, counted in its file: elements, and the number of quantized weights."""

    parameters: int
    constants: int
    bytes: int
    quantized: int


def write_model(
    module: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], length: int, path: Path, precision: Precision
) -> StoredWeights:
    """Convert a module to an ML program that takes 1 to ``MAX_BATCH`` rows of 1 to ``length`` tokens, and zip it.

    Args:
        module: in evaluation mode, from ``inputs``, all int64 [batch, sequence], to ``outputs``.
        inputs: names of its arguments, in order; the model's own are int32.
        outputs: names of its results, float32.
        length: the longest sequence.
        path: of the zip file.
        precision: fp16; or int8, in which weights have a scale per output channel, and products are computed in FP16.

    Raises:
        EdgeformerError: torch cannot export the module, or coremltools cannot convert it.
    """
    import torch

    sizes = {0: torch.export.Dim("batch", max=MAX_BATCH), 1: torch.export.Dim("sequence", max=length)}
    example = tuple(torch.ones(2, min(_EXAMPLE_LENGTH, length), dtype=torch.int64) for _ in inputs)

    class Source(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = module

        def forward(self, *arrays: torch.Tensor) -> Any:
            return self.source(*arrays)

    with tempfile.TemporaryDirectory() as folder, replacing(path) as temporary:
        package = Path(folder) / PACKAGE
        try:
            with silent_libraries():
                import coremltools
                from coremltools.optimize import coreml as optimize

                shapes = ((sizes,) * len(inputs),)  # of forward's only argument, which takes all inputs
                program = torch.export.export(Source(), example, dynamic_shapes=shapes).run_decompositions({})
                for node in list(program.graph.nodes):  # coremltools does not know this operator, which changes nothing
                    if node.target == torch.ops.aten.alias.default:
                        node.replace_all_uses_with(node.args[0])
                        program.graph.erase_node(node)
                ranges = (coremltools.RangeDim(1, MAX_BATCH, 1), coremltools.RangeDim(1, length, example[0].shape[1]))
                model = coremltools.convert(
                    program,
                    inputs=[coremltools.TensorType(name, coremltools.Shape(ranges), np.int32) for name in inputs],
                    outputs=[coremltools.TensorType(name, dtype=np.float32) for name in outputs],
                    convert_to="mlprogram",
                    minimum_deployment_target=coremltools.target.iOS17,
                    skip_model_load=True,
                )
                if precision == "int8":
                    settings = optimize.OpLinearQuantizerConfig(mode="linear_symmetric")
                    model = optimize.linear_quantize_weights(model, optimize.OptimizationConfig(settings))
                model.save(str(package))
                weights = _count(model.get_spec())
        except Exception as error:  # errors of torch.export and coremltools share no base class
            text = " ".join(str(error).split())[:300]
            raise EdgeformerError(f"coremltools cannot convert this model: {type(error).__name__}: {text}") from error
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for part in (package / "Manifest.json", *sorted((package / "Data").rglob("*"))):  # no debugging files
                if part.is_file():
                    archive.write(part, part.relative_to(package.parent).as_posix())
    return weights


def _count(spec: Any) -> StoredWeights:
    """Count the weights of an ML program: a stored tensor once per place in the file, small ones once per use.

    Names begin with ``p_`` for parameters and ``b_`` for other tensors of a module, such as tables of angles.
    """
    ((block,),) = ([*function.block_specializations.values()] for function in spec.mlProgram.functions.values())
    parameters = constants = size = quantized = 0
    offsets: set[int] = set()
    for operation in block.operations:
        values = [*operation.attributes.items()]
        values += [(key, part.value) for key, bound in operation.inputs.items() for part in bound.arguments]
        for key, value in values:
            tensor = value.type.tensorType
            if tensor.dataType not in _ITEM_BYTES or not (value.HasField("blobFileValue") or tensor.rank):
                continue
            if value.HasField("blobFileValue"):
                if value.blobFileValue.offset in offsets:
                    continue
                offsets.add(value.blobFileValue.offset)
            count = math.prod(dimension.constant.size for dimension in tensor.dimensions)
            size += count * _ITEM_BYTES[tensor.dataType]
            quantized += key == "quantized_data"
            name = operation.outputs[0].name
            is_added = "_bias_" in name and not name.startswith("p_")  # zeros, where a product becomes a layer
            if key in ("scale", "zero_point") or name.startswith("b_") or is_added or count == 1:
                constants += count
            else:
                parameters += count
    return StoredWeights(parameters, constants, size, quantized)
