"""From an ONNX graph to a serialised engine: one function for tensorrt-rtx, TensorRT 10 and TensorRT 11.

Precision is in the graph: networks are strongly typed, in every version. (Builder flags for FP16 are gone since
TensorRT 11; a graph in FP32 that is built with them becomes an FP32 engine without a word.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.backends.tensorrt.builders import EngineRequest
from edgeformer.backends.tensorrt.log import PARTS, TensorRTLog, progress_monitor, tensorrt_log
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.formats.files import replacing
from edgeformer.formats.progress import Progress

Shapes = dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Plan:
    """A serialised engine and what was said while it was built.

    Attributes:
        content: TensorRT's memory, as a buffer.
        shapes: input → smallest, best and largest shape.
    """

    content: Any
    shapes: Shapes
    log: TensorRTLog


def build_plan(trt: Any, graph: Path, request: EngineRequest, progress: Progress) -> Plan:
    """Parse and build. Nothing is printed.

    Raises:
        ArtifactError: the graph's file is missing or damaged.
        InputError: an input has a dynamic axis that is neither batch nor sequence.
        EdgeformerError: TensorRT does not support the graph, or cannot build it.
    """
    log = tensorrt_log(trt)
    log.clear()
    builder = trt.Builder(log.logger)
    network = builder.create_network(_creation_flags(trt, request))
    _parse(trt, network, graph, log)
    config, shapes = _configured(trt, builder, network, request)
    monitor = progress_monitor(trt, progress)
    if monitor is not None:
        config.progress_monitor = monitor
    progress.start(f"Building the {request.target.format} engine of {graph.name}", PARTS, "%")
    try:
        with _timing_cache(trt, config, request):
            content = builder.build_serialized_network(network, config)
        if content is not None and monitor is not None:
            monitor.phases.complete()
    finally:
        progress.finish()
    interruption = getattr(monitor, "interruption", None) or log.interruption
    if interruption is not None:
        raise interruption
    if content is None:
        why = log.last_error() or "it gives no reason"
        raise EdgeformerError(f"{graph}: {request.target.format} cannot build it: {why}")
    return Plan(content, shapes, log)


def _creation_flags(trt: Any, request: EngineRequest) -> int:
    # TensorRT 10 must be told; in 11 and in tensorrt-rtx there is nothing but strongly typed networks.
    if request.target.format == "tensorrt" and trt.__version__.startswith("10."):
        return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return 0


def _parse(trt: Any, network: Any, graph: Path, log: TensorRTLog) -> None:
    if not graph.is_file():
        raise ArtifactError(f"{graph}: no such file; export it again")
    parser = trt.OnnxParser(network, log.logger)
    # From the file, not from bytes: weights beside the graph are found relative to it.
    if parser.parse_from_file(str(graph)) and network.num_outputs:
        return
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    told = "; ".join(
        f"{error.node_operator()} {error.node_name()} {_one_line(error.desc())}".strip() for error in errors
    )
    # The parser takes an empty file for an empty network.
    if not errors or any(word in str(error.code()) for error in errors for word in ("DESERIALIZE", "INVALID_GRAPH")):
        raise ArtifactError(
            f"{graph}: truncated, damaged, or not an ONNX graph ({told or 'no outputs'}); export it again"
        )
    raise EdgeformerError(f"{graph}: TensorRT's parser does not take this graph: {told}")


def _one_line(text: str) -> str:
    """Without the complaint about a missing driver that follows every error on a machine without a GPU."""
    return " ".join(text.partition("[checkMacros.cpp")[0].split())[:300]


def _configured(trt: Any, builder: Any, network: Any, request: EngineRequest) -> tuple[Any, Shapes]:
    config = builder.create_builder_config()
    config.profiling_verbosity = (
        trt.ProfilingVerbosity.DETAILED
    )  # what the layers' types are read from; size is the same
    if request.precision == "fp32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default; its 10 bits miss the tolerance of FP32
    if request.target.format == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        name = f"SM{request.compute_capability.replace('.', '')}"
        config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
    profile, shapes = builder.create_optimization_profile(), _shapes(network, request)
    for name, sizes in shapes.items():
        profile.set_shape(name, *sizes)
    config.add_optimization_profile(profile)
    return config, shapes


def _shapes(network: Any, request: EngineRequest) -> Shapes:
    found: Shapes = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        columns = []
        for axis, size in enumerate(tensor.shape):
            name = str(tensor.get_dimension_name(axis))
            sizes = request.shapes.axis(name) if size < 0 else None
            if size < 0 and sizes is None:
                raise InputError(
                    f"input {tensor.name!r} has the dynamic axis {name!r}; engines take batch and sequence"
                )
            columns.append((sizes.smallest, sizes.best, sizes.largest) if sizes is not None else (size, size, size))
        found[tensor.name] = tuple(zip(*columns, strict=True))
    return found


@contextmanager
def _timing_cache(trt: Any, config: Any, request: EngineRequest) -> Iterator[None]:
    """What ``tensorrt`` measured of its kernels, kept for the next build on this GPU; tensorrt-rtx measures nothing."""
    if request.cache is None or request.target.format != "tensorrt":
        yield
        return
    path = request.cache / f"timing-{request.compute_capability}-{trt.__version__}.cache"
    known = path.read_bytes() if path.is_file() else b""
    if not config.set_timing_cache(config.create_timing_cache(known), False):  # of another GPU or damaged
        config.set_timing_cache(config.create_timing_cache(b""), False)
    yield
    with replacing(path) as temporary:
        temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
