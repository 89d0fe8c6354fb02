"""Operators of public networks behind published latencies: classifiers and detectors of images.

networks.csv has the names of each network, in the form that ``normalised`` gives them, its parameters, and what was
published: millions of parameters and GMAC at the image's usual side (half of the floating-point operations where
sources state those). operators.json has the operators of each at the sides of the measurements, batch normalisation
folded into convolutions. Torch modules listed them: benchmarks/published/networks.py of commit 9a33755b, which lists a
further network or side. A dimension that grows with the batch is negative; a batch with other operators
has a list of its own.
"""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

FOLDER = Path(__file__).parent


def normalised(model: str) -> str:
    """A name without case, spaces, hyphens, underscores and what stands in parentheses."""
    return re.sub(r"\(.*?\)|[\s_-]", "", model.lower())


@cache
def networks() -> dict[str, dict[str, str]]:
    """Return the rows of networks.csv by each spelling."""
    rows = csv.DictReader((FOLDER / "networks.csv").read_text(encoding="utf-8").splitlines())
    return {spelling: row for row in rows for spelling in row["spellings"].split(";")}


@cache
def _listed() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "operators.json").read_text(encoding="utf-8")))


def list_network(model: str, batch: int, side: int) -> tuple[ExecutedNode, ...] | None:
    """Return the nodes of a call of the network that the column ``model`` names; None: they are not listed."""
    network = networks().get(normalised(model), {"network": ""})["network"]
    listed = _listed()["networks"]
    numbers = listed.get(f"{network} {side} {batch}", listed.get(f"{network} {side}"))
    if numbers is None:
        return None

    def tensor(shape: list[Any]) -> Tensor:
        dtype, *sizes = shape if shape and isinstance(shape[0], str) else ("float", *shape)
        return Tensor(dtype, tuple(-size * batch if size < 0 else size for size in sizes))

    nodes = []
    for number in numbers:
        operator, inputs, outputs, parameter_bytes = _listed()["nodes"][number]
        read, written = (tuple(map(tensor, shapes)) for shapes in (inputs, outputs))
        nodes.append(ExecutedNode(operator, f"{operator}_{number}", read, written, parameter_bytes, 0.0))
    return tuple(nodes)
