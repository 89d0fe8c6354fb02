"""How an artifact's error grows from loop to loop, measured on the hidden state after every loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.formats.manifest import Drift, LoopDrift, Precision

Array = NDArray[Any]

TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1}
"""Of the root mean square of torch FP32's state; like the logits' tolerances fixed here, not chosen per model."""


def measure_drift(states: Mapping[int, Array], references: Mapping[int, Array], precision: Precision) -> Drift:
    """Compare states of golden inputs, loop → float32 [B, S, C], with those of torch FP32."""
    tolerance = TOLERANCE[precision]
    loops = tuple(_drift_after(loop, states[loop], references[loop]) for loop in sorted(references))
    beyond = [row.loop for row in loops if row.rms_error is None or row.rms_error > tolerance]
    return Drift(tolerance=tolerance, loops=loops, first_beyond=beyond[0] if beyond else None)


def _drift_after(loop: int, state: Array, reference: Array) -> LoopDrift:
    error = state.astype(np.float64) - reference
    size = float(np.sqrt(np.square(reference, dtype=np.float64).mean()))
    if not np.isfinite(error).all() or size == 0:
        return LoopDrift(loop=loop, rms_error=None, max_error=None)
    rms = float(np.sqrt(np.square(error).mean()))
    return LoopDrift(loop=loop, rms_error=rms / size, max_error=float(np.abs(error).max()) / size)
