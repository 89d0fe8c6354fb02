"""``export --executorch``: .pte programs of the full and exit graphs, with XNNPACK's kernels, in FP32 and INT8.

A program takes 1 to 16 texts of any length up to the recipe's longest. ExecuTorch reserves its activations for the
largest shape when it is opened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.artifacts.errors import EdgeformerError, install_hint
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest, Engine, Precision, Sharing
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.executorch.session import EXECUTORCH, EXTRA, FORMAT
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
_KERNELS = ("aten_", "dim_order_ops_", "quantized_decomposed_")
"""Prefixes of operators that compute; the other nodes of a program choose outputs and sizes."""
_ITEM_BYTES = {"BYTE": 1, "CHAR": 1, "BOOL": 1, "SHORT": 2, "HALF": 2, "INT": 4, "FLOAT": 4, "LONG": 8, "DOUBLE": 8}


class ExecuTorchBuilder(Builder):
    """A program in FP32 of each full and exit graph with the full vocabulary; with ``--int8`` also one in INT8."""

    name = "executorch"
    formats = (FORMAT,)
    flag = "--executorch"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        problem = EXECUTORCH.missing()
        return Unavailable(FORMAT, problem, "fp32") if problem is not None else Target(FORMAT, precision="fp32")

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        precisions: list[Precision] = ["fp32"]
        if any(graph.precision == "int8" for graph in job.graphs):
            precisions.append("int8")
        if any(graph.precision == "fp16" for graph in job.graphs):
            job.note(f"{FORMAT}: programs are FP32 or INT8; --fp16 does not change them")
        for precision in precisions:
            for graph in full_text_graphs(job, "fp32"):
                yield self._build(graph, precision, job)
        for graph in job.graphs:
            if graph.role == "decode" and graph.precision == "fp32" and not graph.trimmed:
                reason = "ExecuTorch: programs with caches of earlier tokens are not supported; use --gguf or ONNX"
                yield initial_entry(graph, FORMAT, "fp32", reason=reason)

    def _build(self, graph: ArtifactManifest, precision: Precision, job: BuildJob) -> ArtifactManifest:
        """Write the program of one graph, and return its manifest entry."""
        reason = f"it was not run here; run on the device: edgeformer verify --write ({install_hint(EXTRA)})"
        parity = unmeasured_parity(graph, reason, precision if precision != graph.precision else None)
        entry = initial_entry(graph, FORMAT, precision, parity=parity)
        try:
            module = job.module(graph)
        except EdgeformerError as error:
            return entry.model_copy(update={"status": "unavailable", "reason": str(error), "parity": None})
        suffix = "" if precision == "fp32" else f"_{precision}"
        file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}{suffix}.pte"
        length = min(job.max_length, job.max_positions)
        start_s = time.perf_counter()
        try:
            with bar(job.progress, f"Lowering {entry.id} for ExecuTorch", None):
                written = write_program(module, tuple(graph.inputs), length, job.bundle / file, precision)
        except EdgeformerError as error:
            return entry.model_copy(update={"reason": str(error)})
        unique = sum(parameter.numel() for parameter in module.parameters())
        if graph.sharing is not None:  # an exit does not need every parameter of the model
            unique = graph.sharing.unique_parameters
        stored = written.stored_parameters
        best = min(_EXAMPLE_LENGTH, length)
        engine = Engine(
            builder=f"executorch {installed_version('executorch')}",
            seconds=round(time.perf_counter() - start_s, 2),
            checked_by="size",
            weight_bytes=written.weight_bytes,
            activation_bytes=written.activation_bytes,
            delegated=written.delegated,
            not_delegated=written.not_delegated,
            graph_bytes=(job.bundle / str(graph.file)).stat().st_size,
            shapes=dict.fromkeys(graph.inputs, ((1, 1), (1, best), (MAX_BATCH, length))),
        )
        fields: dict[str, Any] = {
            "engine": engine,
            "quantized": {"linear": written.quantized} if written.quantized else {},
            "sharing": Sharing(
                unique_parameters=unique, stored_parameters=stored, constant_elements=written.constant_elements,
                weight_bytes=written.weight_bytes,
            ),
        }  # fmt: skip
        if stored > unique:
            fields["reason"] = f"stores {stored:,} parameters for a model of {unique:,}"
        return built_entry(entry, job.bundle, file, ("executorch", "torch", "torchao"), **fields)


@dataclass(frozen=True)
class WrittenProgram:
    """Contents of a program, counted in its file.

    Attributes:
        quantized: linear layers with INT8 weights, each counted once per loop.
        delegated: operators of XNNPACK.
        not_delegated: operator → nodes outside of XNNPACK.
        activation_bytes: reserved for activations between the kernels, at the largest shape.
    """

    stored_parameters: int
    constant_elements: int
    weight_bytes: int
    quantized: int
    delegated: int
    not_delegated: dict[str, int]
    activation_bytes: int


def write_program(
    module: Any, inputs: tuple[str, ...], length: int, path: Path, precision: Precision = "fp32"
) -> WrittenProgram:
    """Lower a module to a program that takes 1 to ``MAX_BATCH`` rows of 1 to ``length`` tokens.

    Args:
        module: in evaluation mode, from ``inputs``, all int64 [batch, sequence], to one or more outputs.
        inputs: names of its arguments, in order.
        length: the longest sequence.
        path: of the .pte file.
        precision: fp32, or int8: linear layers with a scale per output channel, activations with one per call.

    Raises:
        EdgeformerError: torch cannot export the module, or ExecuTorch cannot lower it.
    """
    import torch

    try:
        with silent_libraries():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.devtools.backend_debug import get_delegation_info
            from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

            class Source(torch.nn.Module):
                def __init__(self, source: Any) -> None:
                    super().__init__()
                    self.source = source

                def forward(self, *arrays: torch.Tensor) -> Any:
                    return self.source(*arrays)

            example = [torch.ones(2, min(_EXAMPLE_LENGTH, length), dtype=torch.int64) for _ in inputs]
            sizes = {0: torch.export.Dim("batch", max=MAX_BATCH), 1: torch.export.Dim("sequence", max=length)}

            def export(source: Any) -> Any:
                shapes = ((sizes,) * len(inputs),)  # of forward's only argument, which takes all inputs
                return torch.export.export(Source(source), tuple(example), dynamic_shapes=shapes)

            program = export(module)
            # Stored tensors that are no parameters: tables of angles, scales.
            constants = {_bytes(tensor) for _, tensor in program.named_buffers()}
            constants |= {_bytes(tensor) for tensor in program.constants.values() if isinstance(tensor, torch.Tensor)}
            integers: set[bytes] = set()
            if precision == "int8":
                program = export(_quantize(program.module(), example))
                for name, tensor in (*program.named_buffers(), *program.constants.items()):
                    if tensor.dtype == torch.int8:
                        integers.add(_bytes(tensor))
                    elif "scale" in name or "zero_point" in name:
                        constants.add(_bytes(tensor))
            # The check of operators would fix the batch at the example's: it compares sizes outside of tracing.
            config = EdgeCompileConfig(_check_ir_validity=False)
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
            coverage = get_delegation_info(lowered.exported_program().graph_module)
            contents = lowered.to_executorch().buffer
    except Exception as error:  # errors of torch.export and ExecuTorch share no base class
        text = " ".join(str(error).split())[:300]
        raise EdgeformerError(f"ExecuTorch cannot lower this model: {type(error).__name__}: {text}") from error
    with replacing(path) as temporary:
        temporary.write_bytes(contents)
    kernels = {name: count for name, count in coverage.delegation_by_operator.items() if name.startswith(_KERNELS)}
    outside = {name.removeprefix("aten_"): count.non_delegated for name, count in kernels.items()}
    blobs, activation_bytes = _read_program(contents)
    parameters = elements = 0
    for blob, item_bytes in blobs:
        count = len(blob) // (item_bytes or (1 if blob in integers else 4))
        elements += count
        parameters += count if count > 1 and blob not in constants else 0
    return WrittenProgram(
        stored_parameters=parameters,
        constant_elements=elements - parameters,
        weight_bytes=sum(len(blob) for blob, _ in blobs),
        quantized=sum(count.delegated for name, count in kernels.items() if "dequantize_per_channel" in name),
        delegated=sum(count.delegated for count in kernels.values()),
        not_delegated={name: count for name, count in sorted(outside.items()) if count},
        activation_bytes=activation_bytes,
    )


def _quantize(module: Any, example: list[Any]) -> Any:
    """Quantize the linear layers of a module that torch.export made, with XNNPACK's own quantizer."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
    prepared = prepare_pt2e(module, quantizer)
    prepared(*example)  # ranges of activations are measured in every call later; this one only runs the observers
    return convert_pt2e(prepared)


def _read_program(contents: bytes) -> tuple[list[tuple[bytes, int]], int]:
    """Return the stored tensors of a program and their item sizes, and the bytes that it reserves for activations.

    XNNPACK's weights have no type in the file: their item size is 0.
    """
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.exir.schema import Tensor

    file = deserialize_pte_binary(contents)
    (plan,) = file.program.execution_plan
    tensors = [value.val for value in plan.values if isinstance(value.val, Tensor)]
    counts = {t.data_buffer_idx: (math.prod(t.sizes), _ITEM_BYTES[t.scalar_type.name]) for t in tensors}
    blobs = []
    for index, part in enumerate(file.program.constant_buffer[1:], start=1):  # the first one stands for activations
        count, item_bytes = counts[index]
        blobs.append((bytes(part.storage)[: count * item_bytes], item_bytes))  # without padding
    if file.named_data is not None:
        blobs += [(bytes(part), 0) for part in file.named_data.buffers]
    return blobs, sum(plan.non_const_buffer_sizes)


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().numpy().tobytes())
