"""How large the numbers inside of a graph get on its golden inputs, by a run in which every value is an output."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir

from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Array, Session
from edgeformer.stages.exporting.half import lifted

_AT_ONCE = 64
"""Values that a run returns; each takes memory until it is looked at."""


def largest_values(
    model: onnx_ir.Model,
    feed: Callable[[Session], Sequence[Mapping[str, Array]]],
    workplace: Path,
) -> dict[str, float]:
    """Value of the outermost graph → largest absolute FP32 number in it; not finite ones are infinite.

    Args:
        model: FP32; it is left unchanged.
        feed: runs a session on the golden inputs, and returns the outputs of each call.
        workplace: folder for a copy of the graph.
    """
    probe = lifted(model)
    own = list(probe.graph.outputs)
    inner = [value for node in probe.graph for value in node.outputs if value.name and value not in own]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix=".reach-", dir=workplace) as folder:
        for start in range(0, len(inner), _AT_ONCE) or (0,):
            probe.graph.outputs[:] = [*own, *inner[start : start + _AT_ONCE]]
            path = Path(folder, f"{start}.onnx")
            onnx_ir.save(probe, path, external_data=f"{start}.data")
            with OnnxSession(path) as session:
                for outputs in feed(session):
                    for name, array in outputs.items():
                        if array.dtype == np.float32 and array.size:
                            reached = float(np.nan_to_num(np.abs(array).max(), nan=np.inf))
                            found[name] = max(found.get(name, 0.0), reached)
    return found
