"""An engine for a device: built, written, and checked for what can be known of it without running it."""

from __future__ import annotations

import importlib
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edgeformer.backends.onnx_file import open_graph
from edgeformer.backends.tensorrt.builders import EngineRequest
from edgeformer.backends.tensorrt.log import Layers, read_inspector, read_listing, read_total
from edgeformer.backends.tensorrt.network import Plan, build_plan
from edgeformer.formats.files import replacing
from edgeformer.formats.manifest import Engine, Precision
from edgeformer.formats.progress import Progress, Silent
from edgeformer.formats.units import format_bytes
from edgeformer.machine import nvidia
from edgeformer.machine.cuda_driver import devices

SIZE_BAR = 1.2
"""An engine's weights (or, where their size is unknown, the engine) against its graph."""

_FP16_TROUBLE = re.compile(r"(?=.*FP16)(?=.*(layer ?norm|normali[sz]ation|overflow))", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine on disk.

    Attributes:
        built_for: compute capability and builder version; of ``tensorrt`` also GPU and driver. What
            :mod:`edgeformer.backends.tensorrt.engine_check` compares with the machine that opens it.
        reason: why the engine is rejected; None where it is fine.
    """

    file: Path
    engine: Engine
    built_for: dict[str, str]
    reason: str | None


def build_engine(graph: Path, target: Path, request: EngineRequest, progress: Progress | None = None) -> BuiltEngine:
    """Build the engine of an ONNX graph and write it to ``target``.

    Args:
        graph: weights may lie beside it.
        request: from :func:`~edgeformer.backends.tensorrt.builders.plan_engine`, which says what is possible here.

    Raises:
        ArtifactError: the graph's file is missing or damaged.
        InputError: an input has a dynamic axis that is neither batch nor sequence.
        EdgeformerError: TensorRT does not support the graph, or cannot build it.
    """
    progress = progress or Silent()
    trt: Any = importlib.import_module(request.target.format.replace("-", "_"))
    began = time.perf_counter()
    plan = build_plan(trt, graph, request, progress)
    seconds = time.perf_counter() - began
    with replacing(target) as temporary:
        temporary.write_bytes(memoryview(plan.content))
    engine = _described(trt, plan, request, seconds, graph_bytes(graph))
    size = target.stat().st_size
    progress.message(
        f"{target.name}: built in {seconds:.1f} s by {engine.builder}, {format_bytes(size)}"
        + (f" with {format_bytes(engine.weight_bytes)} of weights" if engine.weight_bytes else "")
    )
    reason = why_engine_rejected(engine, size, request.precision)
    return BuiltEngine(target, engine, _built_for(trt, request), reason)


def graph_bytes(path: Path) -> int:
    """Size of a graph's file and of the weights beside it that it refers to, each once."""
    regions = set()
    for tensor in open_graph(path).graph.initializer:
        if uses_external_data(tensor):
            place = ExternalDataInfo(tensor)
            regions.add((place.location, place.offset, place.length or _tensor_bytes(tensor)))
    return path.stat().st_size + sum(length for _, _, length in regions)


def why_engine_rejected(engine: Engine, size_bytes: int, precision: Precision) -> str | None:
    """None where warnings, precision and size of an engine are as they should be.

    The bar of sharing is on the weights: beside them an engine holds its compiled code, 3 to 9 MB whatever the
    model's size, which says nothing of a small model.
    """
    for warning in engine.warnings:
        if precision == "fp16" and _FP16_TROUBLE.search(warning):
            return f"TensorRT warns of FP16: {' '.join(warning.split())[:300]}"
    wide, narrow = engine.weight_elements.get("FP32", 0), engine.weight_elements.get("FP16", 0)
    if precision == "fp16" and engine.weight_elements and wide >= narrow:
        return f"is not FP16: {wide:,} of its weights' elements are FP32, {narrow:,} FP16"
    measured, what = (engine.weight_bytes, "its weights") if engine.weight_bytes else (size_bytes, "it")
    if measured > SIZE_BAR * engine.graph_bytes:
        return (
            f"{what} take {format_bytes(measured)}, more than {SIZE_BAR} × the graph of "
            f"{format_bytes(engine.graph_bytes)}: shared weights were copied, or FP16 was widened"
        )
    return None


def size_note(id_: str, engine: Engine, size_bytes: int) -> str | None:
    """Says so when an engine is much larger than its graph although its weights are not."""
    if size_bytes <= SIZE_BAR * engine.graph_bytes or engine.weight_bytes is None:
        return None
    return (
        f"{id_}: {format_bytes(size_bytes)}, {size_bytes / engine.graph_bytes:.2f} × its graph: its weights take "
        f"{format_bytes(engine.weight_bytes)}, each stored once, the rest is compiled code"
    )


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    size: int = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
    return size


def _described(trt: Any, plan: Plan, request: EngineRequest, seconds: float, source_bytes: int) -> Engine:
    log = plan.log
    listing, totals = log.listing(), log.of("INFO")
    layers = read_listing(listing) if listing is not None else None
    checked_by: Literal["builder log", "inspector", "size"] = "builder log"
    if layers is None:
        layers = _inspected(trt, plan)
        checked_by = "inspector" if layers is not None else "size"
    known = layers or Layers()
    return Engine(
        builder=f"{request.target.format} {trt.__version__}",
        seconds=round(seconds, 2),
        checked_by=checked_by,
        layers=known.count,
        layers_by_precision=known.by_precision,
        weight_elements=known.weight_elements,
        weight_bytes=read_total(totals, "weights"),
        activation_bytes=read_total(totals, "activations"),
        graph_bytes=source_bytes,
        shapes=plan.shapes,
        warnings=log.of("WARNING"),
    )


def _inspected(trt: Any, plan: Plan) -> Layers | None:
    """The inspector's view: only where the engine can be opened, on the GPU that it was built for."""
    if not devices():
        return None
    runtime = trt.Runtime(plan.log.logger)
    engine = runtime.deserialize_cuda_engine(plan.content)
    if engine is None:
        return None
    return read_inspector(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def _built_for(trt: Any, request: EngineRequest) -> dict[str, str]:
    target = request.target
    found = {"compute_capability": request.compute_capability, target.format: str(trt.__version__)}
    if target.format != "tensorrt-rtx":
        # Its kernels were measured on this very GPU.
        found["gpu"] = devices()[0].name
        found["driver"] = nvidia.driver_version() or "unknown"
    return found
