"""Numerical parity: how close logits are to those of torch FP32 on real inputs, and the fixed tolerances."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.manifest import Parity, Precision

FP32_ABSOLUTE = 1e-4
FP16_RELATIVE = 1e-2
"""Relative to the standard deviation of the reference logits."""

Kind = Literal["absolute", "relative", "rms", "score"]
TOLERANCES: dict[Precision, tuple[Kind, float | None]] = {
    "fp32": ("absolute", FP32_ABSOLUTE),
    "fp16": ("relative", FP16_RELATIVE),
    "int8": ("score", None),
    "int4": ("score", None),
}
"""INT8 and INT4 are judged by the drop of the task score, which errors of the logits hardly predict."""


def measure_parity(
    logits: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision, provider: str
) -> Parity:
    """Compare logits [n, C] computed with ``provider`` with those of torch FP32; n counts rows or tokens."""
    error = np.abs(logits - reference)  # in float32: the difference of close numbers is exact
    return as_parity(error, float(reference.std()), logits.argmax(-1) == reference.argmax(-1), precision, provider)


def as_parity(
    error: NDArray[np.floating], spread: float, agrees: NDArray[np.bool_], precision: Precision, provider: str
) -> Parity:
    """Return errors of logits in the form of a manifest.

    Args:
        error: absolute errors; if one is not finite, all errors of the result are None.
        spread: standard deviation of the reference logits.
        agrees: whether the likeliest class or token is the same, [n].
    """
    finite = bool(np.isfinite(error).all())
    kind, tolerance = TOLERANCES[precision]
    return Parity(
        status="measured",
        n=len(agrees),
        provider=provider,
        max_abs_error=float(error.max()) if finite else None,
        mean_abs_error=float(error.mean(dtype=np.float64)) if finite else None,
        relative_error=float(error.max()) / spread if spread and finite else None,
        top1_agreement=float(agrees.mean()),
        tolerance=tolerance,
        tolerance_kind=kind,
    )


def out_of_tolerance(parity: Parity) -> str | None:
    """Explain why an artifact fails parity; None if it is within tolerance or judged by task score."""
    if parity.max_abs_error is None:
        outputs = f"output {parity.output!r} is" if parity.output is not None else "its logits are"
        return f"{outputs} not finite on real inputs (overflow)"
    if parity.tolerance is None:
        return None
    figures = {"absolute": parity.max_abs_error, "relative": parity.relative_error, "rms": parity.rms_error}
    kind, error = parity.tolerance_kind, figures[parity.tolerance_kind]
    if error is None:
        return "the reference logits do not vary, so a relative error is undefined"
    if error > parity.tolerance:
        output = f" of output {parity.output!r}" if parity.output is not None else ""
        return f"parity: {kind} error {error:.2e}{output} is above the tolerance {parity.tolerance:.0e}"
    return None
