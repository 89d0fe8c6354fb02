"""How close an artifact is to torch FP32, on real inputs. The tolerances are fixed here, not chosen per model."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.schema.manifest import Parity, Precision

FP32_ABSOLUTE = 1e-4
FP16_RELATIVE = 1e-2
"""Of the standard deviation of the reference logits."""


def measure_parity(logits: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision) -> Parity:
    """Compare logits [n, C] with those of torch FP32."""
    error = np.abs(logits.astype(np.float64) - reference)
    spread = float(reference.std())
    kind: Literal["absolute", "relative"] = "absolute" if precision == "fp32" else "relative"
    return Parity(
        status="measured",
        n=len(reference),
        max_abs_error=float(error.max()),
        mean_abs_error=float(error.mean()),
        relative_error=float(error.max()) / spread if spread else None,
        top1_agreement=float((logits.argmax(-1) == reference.argmax(-1)).mean()),
        tolerance=FP32_ABSOLUTE if kind == "absolute" else FP16_RELATIVE,
        tolerance_kind=kind,
    )


def why_rejected(parity: Parity, logits: NDArray[np.float32]) -> str | None:
    """None when the artifact is within tolerance; otherwise what is wrong with it."""
    if not np.isfinite(logits).all():
        return "its logits are not finite on real inputs (overflow)"
    error = parity.max_abs_error if parity.tolerance_kind == "absolute" else parity.relative_error
    if error is None:
        return "the reference logits do not vary, so a relative error is undefined"
    if error > parity.tolerance:
        return f"parity: {parity.tolerance_kind} error {error:.2e} is above the tolerance {parity.tolerance:.0e}"
    return None
