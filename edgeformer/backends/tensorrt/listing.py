"""What is inside an engine: the builder's listing of it, or the inspector's, as layers with types.

The two say the same. The builder writes its listing to the log while it builds, which needs no GPU; the inspector
needs the opened engine, and so the GPU.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_PRECISIONS = {
    "Half": "FP16", "FP16": "FP16", "Float": "FP32", "FP32": "FP32", "BFloat16": "BF16", "BF16": "BF16",
    "Int64": "INT64", "Int32": "INT32", "Int8": "INT8", "Bool": "BOOL",
}  # fmt: skip
_LAYER = re.compile(r"^Name: .*?, LayerType: .*?, Inputs: \[.*?\], Constants: \[(.*)\], Outputs: \[(.*)\], TacticName")
_TENSOR = re.compile(r"Name: .+?, Dimensions: \[([\d,-]*)\].*?Datatype: (\w+)")
_TOTALS = {"weights": "Total Weights Memory", "activations": "Total Activation Memory"}


@dataclass(frozen=True)
class Layers:
    """The layers of an engine.

    Attributes:
        by_precision: of their outputs.
        weight_elements: precision → elements of the weights, counted once per layer that reads them.
    """

    count: int | None = None
    by_precision: dict[str, int] = field(default_factory=dict)
    weight_elements: dict[str, int] = field(default_factory=dict)


def read_listing(text: str) -> Layers | None:
    """Layers from the builder's log; None where its format is not the known one."""
    layers = [found.groups() for found in map(_LAYER.match, text.splitlines()) if found is not None]
    if not layers:
        return None
    return _counted(
        len(layers),
        (kind for _, outputs in layers for _, kind in _TENSOR.findall(outputs)),
        ((dimensions, kind) for constants, _ in layers for dimensions, kind in _TENSOR.findall(constants)),
    )


def read_inspector(text: str) -> Layers | None:
    """Layers from an inspector's JSON; None where it holds names only, or something else."""
    try:
        layers: list[dict[str, Any]] = [one for one in json.loads(text)["Layers"] if isinstance(one, dict)]
        if not layers:
            return None
        return _counted(
            len(layers),
            (_kind(tensor) for layer in layers for tensor in layer["Outputs"]),
            (
                (",".join(map(str, tensor["Dimensions"])), _kind(tensor))
                for layer in layers
                for tensor in layer.get("Constants", [])
            ),
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_total(messages: Iterable[str], what: str) -> int | None:
    """Bytes of the engine's ``weights`` or ``activations`` as the builder logs them; None where it does not."""
    for message in messages:
        found = re.search(rf"{_TOTALS[what]}: (\d+) bytes", message)
        if found is not None:
            return int(found.group(1))
    return None


def _kind(tensor: dict[str, Any]) -> str:
    """``Half`` of newer versions, ``Row major linear FP16 format`` of older ones."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype"))
    return next((word for word in text.split() if word in _PRECISIONS), text)


def _counted(count: int, outputs: Iterable[str], constants: Iterable[tuple[str, str]]) -> Layers:
    elements: Counter[str] = Counter()
    for dimensions, kind in constants:
        elements[_PRECISIONS.get(kind, kind)] += math.prod(int(size) for size in dimensions.split(",") if size)
    by_precision = Counter(_PRECISIONS.get(kind, kind) for kind in outputs)
    return Layers(count, dict(sorted(by_precision.items())), dict(sorted(elements.items())))
