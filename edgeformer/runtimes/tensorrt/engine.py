"""Build a TensorRT engine of an ONNX graph, or by torch-tensorrt of a module, and check it without running it.

The graph determines the precision, because networks are strongly typed.
"""

import importlib
import inspect
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild, Precision
from edgeformer.artifacts.progress import bar
from edgeformer.artifacts.units import format_bytes
from edgeformer.runtimes.runtime import BuildJob, InputShapes, Target
from edgeformer.runtimes.tensorrt.state import measured_on, tensorrt_log

MAX_SIZE_RATIO = 1.2
"""Largest accepted size of an engine's weights relative to its graph."""

CODE_BYTES = 9 * 10**6
"""Largest compiled code of an engine, whatever the model's size; measured with tensorrt-rtx: 3 to 9 MB. It is
subtracted from an engine whose weights' size is unknown."""

BEST_LENGTH = 128
"""Sequence length of the latency budgets; engines are tuned for it unless the longest text is shorter."""

MAX_ROWS, MAX_GENERATED_ROWS = 16, 4
"""Largest batch, and that of generation. An engine reserves memory for its largest call, and a prompt is one call. In
FP32 the loop of CRT-Deep needed 2.1 GiB and its readout 3.1 GiB for 16 rows of 1,024 tokens, 0.5 and 0.8 GiB for 4."""

TORCH_DEVICE = "cuda"
"""Where torch-tensorrt compiles."""

AxisSizes = dict[str, tuple[int, int, int]]
"""Name of a dynamic axis → smallest, tuned and largest size of the engine."""

_TOTAL = re.compile(r"Total (Weights|Activation) Memory: (\d+) bytes")
_PRECISIONS = {
    "Half": "FP16", "Float": "FP32", "BFloat16": "BF16", "Int64": "INT64", "Int32": "INT32", "Int8": "INT8",
    "Bool": "BOOL",
}  # fmt: skip
_LAYER = re.compile(
    r"^Name: .*?, LayerType: .*?, Inputs: \[.*?\], Constants: \[(.*)\], Outputs: \[(.*)\], TacticName", re.MULTILINE
)
_TENSOR = re.compile(r"Name: .+?, Dimensions: \[([\d,-]*)\].*?Datatype: (\w+)")
_FP16_TROUBLE = re.compile(r"(?=.*FP16)(?=.*(layer ?norm|normali[sz]ation|overflow))", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine written to disk: its facts, the system that can open it, and why it is rejected (None: it is not)."""

    engine: EngineBuild
    built_for: dict[str, str]
    reason: str | None


def graph_bytes(path: Path) -> int:
    """Return the size of a graph file plus its external weights, counting shared weights once."""
    regions = set()
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        if uses_external_data(tensor):
            data = ExternalDataInfo(tensor)
            size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
            regions.add((data.location, data.offset, data.length or size))
    return path.stat().st_size + int(sum(length for _, _, length in regions))


def why_engine_rejected(engine: EngineBuild, size_bytes: int, precision: Precision) -> str | None:
    """Return why an engine's warnings, precision or size are not acceptable, or None. The limit is of the weights."""
    for warning in engine.warnings:
        if precision == "fp16" and _FP16_TROUBLE.search(warning):
            return f"TensorRT warns about FP16: {' '.join(warning.split())[:300]}"
    fp32_count, fp16_count = engine.weight_elements.get("FP32", 0), engine.weight_elements.get("FP16", 0)
    if precision == "fp16" and engine.weight_elements and fp32_count >= fp16_count:
        return f"the engine is not FP16: {fp32_count:,} of its weights are FP32 and {fp16_count:,} FP16"
    measured = engine.weight_bytes or size_bytes - CODE_BYTES
    if measured > MAX_SIZE_RATIO * engine.graph_bytes:
        return (
            f"its weights take {format_bytes(measured)}, more than {MAX_SIZE_RATIO} × the graph of "
            f"{format_bytes(engine.graph_bytes)}: shared weights were copied, or FP16 was widened"
        )
    return None


def axis_sizes(job: BuildJob, *, generates: bool = False) -> AxisSizes:
    """Return the sizes of batch and sequence, tuned for one text of 128 tokens, or ``max_length`` if that is shorter.

    The largest sequence is at least 128, if the model supports it: latency is measured there. Step and decode graphs
    (``generates``) are tuned for one token of one text, with a cache of any length.
    """
    best, longest = min(BEST_LENGTH, job.max_length), min(job.max_positions, max(job.max_length, BEST_LENGTH))
    if not generates:
        return {"batch": (1, 1, MAX_ROWS), "sequence": (1, best, longest)}
    past = (0, best, max(best, job.max_positions - 1))
    return {"batch": (1, 1, MAX_GENERATED_ROWS), "sequence": (1, 1, longest), "past": past}


def build_engine(graph: Path, file: Path, target: Target, job: BuildJob, axes: AxisSizes | None = None) -> BuiltEngine:
    """Build the engine of an ONNX graph, which has the job's precision, and write it to ``file``.

    ``axes``: sizes of dynamic axes; None: those of texts. Raises ArtifactError: the graph's file is missing or damaged;
    InputError: an input has another dynamic axis; EdgeformerError: TensorRT does not support it, or cannot build it.
    """
    format_ = target.format
    trt: Any = importlib.import_module(format_.replace("-", "_"))
    log = tensorrt_log(trt)
    log.clear()
    start_s = time.perf_counter()

    # 1. Parse the graph.
    builder = trt.Builder(log)
    # TensorRT 11 and tensorrt-rtx have strongly typed networks only.
    typing_is_optional = format_ == "tensorrt" and trt.__version__.startswith("10.")
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if typing_is_optional else 0
    network = builder.create_network(flags)
    if not graph.is_file():
        raise ArtifactError(f"{graph}: no such file; export it again")
    parser = trt.OnnxParser(network, log)
    # Parse the file, not its bytes: the parser resolves external weights relative to it.
    if not (parser.parse_from_file(str(graph)) and network.num_outputs):
        errors, details = [parser.get_error(index) for index in range(parser.num_errors)], []
        for error in errors:
            # Cut the message about a missing driver that follows every error on a system without a GPU.
            text = " ".join(error.desc().partition("[checkMacros.cpp")[0].split())[:300]
            details.append(f"{error.node_operator()} {error.node_name()} {text}".strip())
        reason = "; ".join(details)
        # The parser reads an empty file as an empty network.
        if not errors or any(word in str(e.code()) for e in errors for word in ("DESERIALIZE", "INVALID_GRAPH")):
            raise ArtifactError(
                f"{graph}: truncated, damaged, or not an ONNX graph ({reason or 'no outputs'}); export it again"
            )
        raise EdgeformerError(f"{graph}: TensorRT cannot parse this graph: {reason}")

    # 2. Set precision, device and shapes.
    config = builder.create_builder_config()
    # The layers' types are read from this; it does not change the engine's size.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.precision == "fp32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default; its 10 bits miss the tolerance of FP32
    if format_ == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        capability = f"SM{str(target.compute_capability).replace('.', '')}"
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    profile = builder.create_optimization_profile()
    axes = axes or axis_sizes(job)
    shapes: InputShapes = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        sizes = []
        for axis, size in enumerate(tensor.shape):
            name = str(tensor.get_dimension_name(axis))
            if size < 0 and name not in axes and tensor.name not in job.shapes:
                names = " and ".join(axes)
                raise InputError(f"input {tensor.name!r} has the dynamic axis {name!r}; engines take {names}")
            sizes.append(axes.get(name, (size,) * 3) if size < 0 else (size,) * 3)
        shapes[tensor.name] = job.shapes.get(tensor.name) or tuple(zip(*sizes, strict=True))
        profile.set_shape(tensor.name, *shapes[tensor.name])
    config.add_optimization_profile(profile)

    # 3. Build, and write the engine.
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """An exception cancels the build (Ctrl-C)."""

        interruption: BaseException | None = None

        def phase_start(self, *_: object) -> None: ...

        phase_finish = phase_start

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                job.progress.advance()
            except BaseException as error:
                self.interruption = error
            return self.interruption is None

    config.progress_monitor = monitor = Monitor()
    label = f"Building the {format_} engine of {graph.name}"
    with bar(job.progress, label, None, "steps"):
        content = builder.build_serialized_network(network, config)
    if (interruption := monitor.interruption or log.interruption) is not None:
        raise interruption
    if content is None:
        raise EdgeformerError(f"{graph}: {format_} cannot build it: {log.last_error()}")
    seconds = time.perf_counter() - start_s
    with replacing(file) as temporary:
        temporary.write_bytes(memoryview(content))

    # 4. Read what was built from the log.
    layers, elements, by_precision = _LAYER.findall(log.listing), Counter[str](), Counter[str]()
    for constants, outputs in layers:  # none if the listing's format is unknown
        by_precision.update(_PRECISIONS.get(kind, kind) for _, kind in _TENSOR.findall(outputs))
        for dimensions, kind in _TENSOR.findall(constants):
            elements[_PRECISIONS.get(kind, kind)] += math.prod(int(size) for size in dimensions.split(",") if size)
    counts: dict[str, Any] = {}
    if layers:
        counts = {"layers": len(layers), "layers_by_precision": dict(sorted(by_precision.items()))}
        counts["weight_elements"] = dict(sorted(elements.items()))
    totals = {name: int(size) for name, size in _TOTAL.findall("\n".join(log.texts("INFO")))}
    engine = EngineBuild(
        builder=f"{format_} {trt.__version__}", seconds=round(seconds, 2),
        checked_by="builder log" if layers else "size", **counts, weight_bytes=totals.get("Weights"),
        activation_bytes=totals.get("Activation"), graph_bytes=graph_bytes(graph), shapes=shapes,
        warnings=log.texts("WARNING"),
    )  # fmt: skip
    size = file.stat().st_size
    weights = f" with {format_bytes(engine.weight_bytes)} of weights" if engine.weight_bytes else ""
    job.progress.message(f"{file.name}: built in {seconds:.1f} s by {engine.builder}, {format_bytes(size)}{weights}")
    built_for = {"compute_capability": str(target.compute_capability), format_: str(trt.__version__)}
    if format_ != "tensorrt-rtx":
        built_for |= measured_on()
    return BuiltEngine(engine, built_for, why_engine_rejected(engine, size, job.precision))


def compile_torch_engine(graph: ArtifactManifest, file: Path, target: Target, job: BuildJob) -> dict[str, str]:
    """Compile a graph's module for this system's GPU, write the engine, and return its ``built_for``.

    Its inputs are all int64 [batch, sequence]. The engine's outputs are called ``output0``… Untested on a GPU: it
    follows the documentation and the code of torch-tensorrt 2.11 to 2.13.
    """
    import torch

    torch_tensorrt: Any = importlib.import_module("torch_tensorrt")
    inputs = tuple(graph.inputs)
    module: torch.nn.Module = job.module(graph)
    sizes = axis_sizes(job)
    dims = [torch.export.Dim(name, min=min_size, max=max_size) for name, (min_size, _, max_size) in sizes.items()]
    smallest, best, largest = zip(*sizes.values(), strict=True)  # the same two sizes for every input
    shapes = {"min_shape": smallest, "opt_shape": best, "max_shape": largest}
    trt_inputs = [torch_tensorrt.Input(**shapes, dtype=torch.int64, name=name) for name in inputs]
    try:
        module.to(TORCH_DEVICE)
        example = tuple(torch.ones(2, best[1], dtype=torch.int64, device=TORCH_DEVICE) for _ in inputs)
        program = torch.export.export(module, example, dynamic_shapes=dict.fromkeys(inputs, tuple(dims)))
        to_engine: Callable[..., Any] = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
        is_optional = "use_explicit_typing" in inspect.signature(to_engine).parameters  # the default in newer versions
        typing_option = {"use_explicit_typing": True} if is_optional else {}
        # The builder needs the card's memory: the weights are in the engine that it writes.
        options = {"disable_tf32": True, "offload_module_to_cpu": True, **typing_option}
        engine = to_engine(program, arg_inputs=trt_inputs, **options)
    except Exception as error:  # errors of torch.export, converters and TensorRT share no base class
        raise EdgeformerError(
            f"{file.name}: torch-tensorrt cannot compile this model: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.to("cpu")
    with replacing(file) as temporary:
        temporary.write_bytes(memoryview(engine))
    return {
        "compute_capability": str(target.compute_capability),
        "torch-tensorrt": str(torch_tensorrt.__version__),
        # The TensorRT that opens the engine must have this version.
        "tensorrt": str(importlib.import_module("tensorrt").__version__),
        **measured_on(),
    }
