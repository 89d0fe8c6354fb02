"""An engine that was built: what is known of it without running it, and may it be deployed?"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edgeformer.formats.manifest import Engine, Precision
from edgeformer.formats.units import format_bytes

SIZE_BAR = 1.2
"""An engine's weights (or, where their size is unknown, the engine) against its graph."""

_FP16_TROUBLE = re.compile(r"(?=.*FP16)(?=.*(layer ?norm|normali[sz]ation|overflow))", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that was written.

    Attributes:
        built_for: compute capability and builder version; of ``tensorrt`` also GPU and driver. What
            :mod:`edgeformer.backends.tensorrt.state` compares with the machine that opens it.
        reason: why the engine is rejected; None where it is fine.
    """

    engine: Engine
    built_for: dict[str, str]
    reason: str | None


def together(parts: Collection[BuiltEngine], first: BuiltEngine) -> BuiltEngine:
    """What is known of several engines that are run in turn, as of one.

    Args:
        parts: all of them.
        first: whose inputs' shapes, builder and GPU are told.
    """
    engines = [part.engine for part in parts]

    def total(name: str) -> Any:
        known = [getattr(engine, name) for engine in engines]
        return None if None in known else sum(known)

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
    """Size of a graph's file and of the weights beside it that it refers to, each once."""
    regions = set()
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        if uses_external_data(tensor):
            place = ExternalDataInfo(tensor)
            size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
            regions.add((place.location, place.offset, place.length or size))
    return path.stat().st_size + int(sum(length for _, _, length in regions))


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
