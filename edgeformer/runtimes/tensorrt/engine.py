"""Build a TensorRT engine of an ONNX graph and check it without running it.

tensorrt-rtx, TensorRT 10 and TensorRT 11 are built the same way: the graph determines the precision, because networks
are strongly typed. (TensorRT 11 removed the builder flags for FP16: an FP32 graph silently gives an FP32 engine.)
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import Engine, Precision
from edgeformer.artifacts.progress import bar
from edgeformer.artifacts.units import format_bytes
from edgeformer.runtimes.runtime import BuildJob, InputShapes, Target
from edgeformer.runtimes.tensorrt.log import (
    PARTS,
    Layers,
    TensorRTLog,
    progress_monitor,
    read_inspector,
    read_listing,
    read_total,
    tensorrt_log,
)
from edgeformer.runtimes.tensorrt.state import measured_on
from edgeformer.system.cuda_driver import devices

SIZE_BAR = 1.2
"""Largest accepted size of an engine's weights (or of the engine, if that is unknown) relative to its graph."""

_FP16_TROUBLE = re.compile(r"(?=.*FP16)(?=.*(layer ?norm|normali[sz]ation|overflow))", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine written to disk.

    Attributes:
        built_for: compute capability and builder version; for ``tensorrt`` also GPU and driver.
            :mod:`edgeformer.runtimes.tensorrt.state` compares them with the system that opens the engine.
        reason: why the engine is rejected; None if it is accepted.
    """

    engine: Engine
    built_for: dict[str, str]
    reason: str | None


def combine_engines(parts: Collection[BuiltEngine], first: BuiltEngine) -> BuiltEngine:
    """Combine the facts of the engines of a step artifact: sums, and all warnings.

    Args:
        parts: all engines.
        first: the engine whose input shapes, builder and GPU are recorded.
    """
    engines = [part.engine for part in parts]

    def total(name: str) -> Any:
        values = [getattr(engine, name) for engine in engines]
        return None if None in values else sum(values)

    summed = ("seconds", "layers", "weight_bytes", "activation_bytes", "graph_bytes")
    counted = {name: Counter[str]() for name in ("layers_by_precision", "weight_elements")}
    for engine in engines:
        for name, counter in counted.items():
            counter.update(getattr(engine, name))
    facts = {name: total(name) for name in summed} | {name: dict(counter) for name, counter in counted.items()}
    warnings = tuple(dict.fromkeys(warning for engine in engines for warning in engine.warnings))
    reason = next((part.reason for part in parts if part.reason is not None), None)
    return BuiltEngine(first.engine.model_copy(update={**facts, "warnings": warnings}), first.built_for, reason)


def graph_bytes(path: Path) -> int:
    """Return the size of a graph file plus its external weights, counting shared weights once."""
    regions = set()
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        if uses_external_data(tensor):
            data = ExternalDataInfo(tensor)
            size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
            regions.add((data.location, data.offset, data.length or size))
    return path.stat().st_size + int(sum(length for _, _, length in regions))


def why_engine_rejected(engine: Engine, size_bytes: int, precision: Precision) -> str | None:
    """Return why an engine's warnings, precision or size are not acceptable, or None.

    The size limit applies to the weights: the compiled code adds 3 to 9 MB whatever the model's size.
    """
    for warning in engine.warnings:
        if precision == "fp16" and _FP16_TROUBLE.search(warning):
            return f"TensorRT warns of FP16: {' '.join(warning.split())[:300]}"
    fp32_count, fp16_count = engine.weight_elements.get("FP32", 0), engine.weight_elements.get("FP16", 0)
    if precision == "fp16" and engine.weight_elements and fp32_count >= fp16_count:
        return f"is not FP16: {fp32_count:,} of its weights' elements are FP32, {fp16_count:,} FP16"
    measured, subject = (engine.weight_bytes, "its weights") if engine.weight_bytes else (size_bytes, "it")
    if measured > SIZE_BAR * engine.graph_bytes:
        return (
            f"{subject} take {format_bytes(measured)}, more than {SIZE_BAR} × the graph of "
            f"{format_bytes(engine.graph_bytes)}: shared weights were copied, or FP16 was widened"
        )
    return None


def size_note(id_: str, engine: Engine, size_bytes: int) -> str | None:
    """Return a note if an engine is much larger than its graph although its weights are not, else None."""
    if size_bytes <= SIZE_BAR * engine.graph_bytes or engine.weight_bytes is None:
        return None
    return (
        f"{id_}: {format_bytes(size_bytes)}, {size_bytes / engine.graph_bytes:.2f} × its graph: its weights take "
        f"{format_bytes(engine.weight_bytes)}, each stored once, the rest is compiled code"
    )


LARGEST_BATCH = 16
BEST_LENGTH = 128
"""Sequence length of the latency budgets; engines are tuned for it unless the longest text is shorter."""

PAST = "past"
"""Name of the cache-length axis in graphs."""

WRITTEN_ROWS = 4
"""Largest batch for generation. An engine reserves memory for its largest call, and a prompt is one call. In FP32
the loop of CRT-Deep needed 2.1 GiB and its readout 3.1 GiB for 16 rows of 1,024 tokens, 0.5 and 0.8 GiB for 4 rows."""

Shapes = Mapping[str, tuple[int, int, int]]
"""Name of a dynamic axis → smallest, tuned and largest size of the engine."""


def text_shapes(max_length: int, max_positions: int) -> Shapes:
    """Return the axis sizes: batch 1…16, tuned for 1; sequence 1…``max_length``, tuned for 128 or the longest text.

    The largest sequence is at least 128, if the model supports it, because latency is measured there.

    Args:
        max_length: tokens of the recipe's longest text.
        max_positions: longest sequence of the model in tokens.
    """
    longest = min(max_positions, max(max_length, BEST_LENGTH))
    return {"batch": (1, 1, LARGEST_BATCH), "sequence": (1, min(BEST_LENGTH, max_length), longest)}


def writing_shapes(graph: Path, job: BuildJob) -> InputShapes:
    """Return the input shapes of a step or decode graph: tuned for one token of one text, with a cache of any length.

    Args:
        graph: the graph's file.
        job: the export's build job.
    """
    best, longest = text_shapes(job.max_length, job.max_positions)["sequence"][1:]
    axes = {
        "batch": (1, 1, WRITTEN_ROWS),
        "sequence": (1, 1, longest),
        PAST: (0, best, max(best, job.max_positions - 1)),
    }
    shapes: InputShapes = {}
    for value in onnx.load(str(graph), load_external_data=False).graph.input:
        sizes = [axes.get(dim.dim_param, (dim.dim_value,) * 3) for dim in value.type.tensor_type.shape.dim]
        shapes[value.name] = tuple(zip(*sizes, strict=True))
    return shapes


def build_engine(graph: Path, file: Path, target: Target, job: BuildJob) -> BuiltEngine:
    """Build the engine of an ONNX graph and write it to ``file``.

    Args:
        graph: the .onnx file; external weights lie in the same folder.
        target: from :class:`~edgeformer.runtimes.tensorrt.builders.TensorRTBuilder`.
        job: its precision is the graph's (an engine computes in the types of its graph); its cache stores timings.

    Raises:
        ArtifactError: the graph's file is missing or damaged.
        InputError: an input has a dynamic axis that is neither batch nor sequence.
        EdgeformerError: TensorRT does not support the graph, or cannot build it.
    """
    format_ = target.format
    trt: Any = importlib.import_module(format_.replace("-", "_"))
    began = time.perf_counter()
    content, shapes = _serialized(trt, graph, target, job)
    seconds = time.perf_counter() - began
    with replacing(file) as temporary:
        temporary.write_bytes(memoryview(content))
    log = tensorrt_log(trt)
    totals = log.of("INFO")
    checked_by, layers = _layers(trt, content, log)
    engine = Engine(
        builder=f"{format_} {trt.__version__}",
        seconds=round(seconds, 2),
        checked_by=checked_by,
        layers=layers.count,
        layers_by_precision=layers.by_precision,
        weight_elements=layers.weight_elements,
        weight_bytes=read_total(totals, "weights"),
        activation_bytes=read_total(totals, "activations"),
        graph_bytes=graph_bytes(graph),
        shapes=shapes,
        warnings=log.of("WARNING"),
    )
    size = file.stat().st_size
    job.progress.message(
        f"{file.name}: built in {seconds:.1f} s by {engine.builder}, {format_bytes(size)}"
        + (f" with {format_bytes(engine.weight_bytes)} of weights" if engine.weight_bytes else "")
    )
    built_for = {"compute_capability": str(target.compute_capability), format_: str(trt.__version__)}
    if format_ != "tensorrt-rtx":
        built_for |= measured_on()
    return BuiltEngine(engine, built_for, why_engine_rejected(engine, size, job.precision))


def _layers(trt: Any, content: Any, log: TensorRTLog) -> tuple[Literal["builder log", "inspector", "size"], Layers]:
    """Return the engine's layers and their source: the builder's listing, else the inspector, else none."""
    layers = read_listing(log.listing() or "")
    if layers is not None:
        return "builder log", layers
    # The inspector needs an open engine, on the GPU that it was built for.
    runtime = trt.Runtime(log.logger) if devices() else None
    engine = runtime.deserialize_cuda_engine(content) if runtime is not None else None
    if engine is not None:
        text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        layers = read_inspector(text)
    return ("size", Layers()) if layers is None else ("inspector", layers)


def _serialized(trt: Any, graph: Path, target: Target, job: BuildJob) -> tuple[Any, InputShapes]:
    """Parse the graph and build the engine. Return TensorRT's buffer and the shapes."""
    log = tensorrt_log(trt)
    log.clear()
    builder = trt.Builder(log.logger)
    # TensorRT 11 and tensorrt-rtx have strongly typed networks only.
    typing_is_optional = target.format == "tensorrt" and trt.__version__.startswith("10.")
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if typing_is_optional else 0
    network = builder.create_network(flags)
    _parse(trt, network, graph, log)
    config, shapes = _configured(trt, builder, network, target, job)
    monitor = progress_monitor(trt, job.progress)
    if monitor is not None:
        config.progress_monitor = monitor
    label = f"Building the {target.format} engine of {graph.name}"
    with bar(job.progress, label, PARTS, "%"):
        with _timing_cache(trt, config, target, job.cache):
            content = builder.build_serialized_network(network, config)
        if content is not None and monitor is not None:
            monitor.phases.reach(PARTS)
    interruption = getattr(monitor, "interruption", None) or log.interruption
    if interruption is not None:
        raise interruption
    if content is None:
        why = log.last_error() or "it gives no reason"
        raise EdgeformerError(f"{graph}: {target.format} cannot build it: {why}")
    return content, shapes


def _parse(trt: Any, network: Any, graph: Path, log: TensorRTLog) -> None:
    if not graph.is_file():
        raise ArtifactError(f"{graph}: no such file; export it again")
    parser = trt.OnnxParser(network, log.logger)
    # Parse the file, not its bytes: the parser resolves external weights relative to it.
    if parser.parse_from_file(str(graph)) and network.num_outputs:
        return
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    # Cut the message about a missing driver that follows every error on a system without a GPU.
    texts = [" ".join(error.desc().partition("[checkMacros.cpp")[0].split())[:300] for error in errors]
    details = "; ".join(
        f"{error.node_operator()} {error.node_name()} {text}".strip() for error, text in zip(errors, texts, strict=True)
    )
    # The parser reads an empty file as an empty network.
    if not errors or any(word in str(error.code()) for error in errors for word in ("DESERIALIZE", "INVALID_GRAPH")):
        raise ArtifactError(
            f"{graph}: truncated, damaged, or not an ONNX graph ({details or 'no outputs'}); export it again"
        )
    raise EdgeformerError(f"{graph}: TensorRT's parser does not take this graph: {details}")


def _configured(trt: Any, builder: Any, network: Any, target: Target, job: BuildJob) -> tuple[Any, InputShapes]:
    config = builder.create_builder_config()
    # The layers' types are read from this; it does not change the engine's size.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.precision == "fp32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default; its 10 bits miss the tolerance of FP32
    if target.format == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        name = f"SM{str(target.compute_capability).replace('.', '')}"
        config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
    profile, shapes = builder.create_optimization_profile(), _shapes(network, job)
    for name, sizes in shapes.items():
        profile.set_shape(name, *sizes)
    config.add_optimization_profile(profile)
    return config, shapes


def _shapes(network: Any, job: BuildJob) -> InputShapes:
    axes = text_shapes(job.max_length, job.max_positions)
    shapes: InputShapes = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name in job.shapes:
            shapes[tensor.name] = job.shapes[tensor.name]
            continue
        columns = []
        for axis, size in enumerate(tensor.shape):
            name = str(tensor.get_dimension_name(axis))
            sizes = axes.get(name) if size < 0 else (size, size, size)
            if sizes is None:
                raise InputError(
                    f"input {tensor.name!r} has the dynamic axis {name!r}; engines take batch and sequence"
                )
            columns.append(sizes)
        shapes[tensor.name] = tuple(zip(*columns, strict=True))
    return shapes


@contextmanager
def _timing_cache(trt: Any, config: Any, target: Target, cache: Path | None) -> Iterator[None]:
    """Keep the kernel timings of ``tensorrt`` for the next build on this GPU; tensorrt-rtx measures none."""
    if cache is None or target.format != "tensorrt":
        yield
        return
    path = cache / "tensorrt" / f"timing-{target.compute_capability}-{trt.__version__}.cache"
    timings = path.read_bytes() if path.is_file() else b""
    if not config.set_timing_cache(config.create_timing_cache(timings), False):  # of another GPU or damaged
        config.set_timing_cache(config.create_timing_cache(b""), False)
    yield
    with replacing(path) as temporary:
        temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
