"""How close logits are to those of torch FP32, on real inputs. The tolerances are fixed here, not chosen per model."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.manifest import Parity, Precision

FP32_ABSOLUTE = 1e-4
FP16_RELATIVE = 1e-2
"""Of the standard deviation of the reference logits."""

Kind = Literal["absolute", "relative", "rms", "score"]
TOLERANCES: dict[Precision, tuple[Kind, float | None]] = {
    "fp32": ("absolute", FP32_ABSOLUTE),
    "fp16": ("relative", FP16_RELATIVE),
    "int8": ("score", None),
    "int4": ("score", None),
}
"""INT8 and INT4 are judged by what they do to the task score: an error of the logits says little about that."""


def measure_parity(
    logits: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision, provider: str
) -> Parity:
    """Compare logits [n, C], computed with ``provider``, with those of torch FP32. Errors are None where not finite.

    ``n`` are rows of a classifier, tokens of a language model.
    """
    error = np.abs(logits - reference)  # in float32: the difference of close numbers is exact
    return as_parity(error, float(reference.std()), logits.argmax(-1) == reference.argmax(-1), precision, provider)


def as_parity(
    error: NDArray[np.floating], spread: float, agrees: NDArray[np.bool_], precision: Precision, provider: str
) -> Parity:
    """Errors of logits in a manifest's form.

    Args:
        error: absolute; a value that is not finite makes all of them None.
        spread: standard deviation of the reference logits.
        agrees: of every row or token, whether the same class or word is the likeliest, [n].
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
    """What is wrong with the logits; None when they are within tolerance, or judged by task score."""
    if parity.max_abs_error is None:
        what = f"output {parity.output!r} is" if parity.output is not None else "its logits are"
        return f"{what} not finite on real inputs (overflow)"
    if parity.tolerance is None:
        return None
    figures = {"absolute": parity.max_abs_error, "relative": parity.relative_error, "rms": parity.rms_error}
    error = figures[parity.tolerance_kind]
    if error is None:
        return "the reference logits do not vary, so a relative error is undefined"
    if error > parity.tolerance:
        where = f" of output {parity.output!r}" if parity.output is not None else ""
        return f"parity: {parity.tolerance_kind} error {error:.2e}{where} is above the tolerance {parity.tolerance:.0e}"
    return None
