"""How far the outputs of one graph are from those of another, whatever they are; the bars are fixed here.

Errors are relative to how much an output varies: its standard deviation over all golden calls (of a constant one, its
root mean square). Noise of a hundredth of that is invisible in whatever is made of the output; a fifth of it leaves the
cosine of the two at 0.98. The states of MiniLM, a sentence encoder that is in wide use in dynamic INT8, are 0.15 off in
that form (its embeddings: cosine 0.991), measured on sentences of SST-2. An output of whole numbers or truth values has
no such scale: there the error is the share of the numbers that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.formats.manifest import Parity, Precision
from edgeformer.formats.scores import Score
from edgeformer.tasks.metric import Array, Arrays
from edgeformer.tasks.parity import Kind

TOLERANCES: dict[Precision, tuple[Kind, float]] = {
    "fp32": ("relative", 1e-3),
    "fp16": ("rms", 1e-2),
    "int8": ("rms", 2e-1),
    "int4": ("rms", 3e-1),
}
"""FP32: the largest error over the standard deviation, for other processors add up in another order. The others: the
root mean square error over it, for one number in a million may be far off without any harm."""

_CLASSES = ("logit", "prob", "score", "label", "softmax", "class")
"""What outputs are called of which the largest number is the answer."""
_ONE = 1e-3
"""Probabilities of a row add up to one within this."""


class TensorScore(Score):
    """How close all outputs are to those of the FP32 graph on the golden inputs. 1 and 0: no difference."""

    n: int = Field(description="golden calls")
    loss: float = Field(description="root mean square error over the standard deviation, of the worst output")
    cosine: float = Field(description="cosine of the angle between an output and FP32's, of the worst output")


@dataclass(frozen=True)
class OutputError:
    """How far one output is from its reference. Figures are None where a number is not finite and should be.

    Attributes:
        spread: standard deviation of the reference; of a constant one its root mean square; 1 of integers.
    """

    name: str
    largest: float | None
    mean: float | None
    rms: float | None
    cosine: float | None
    spread: float

    @property
    def relative(self) -> float:
        """The root mean square error over the spread; infinite where it is not known."""
        if self.rms is None:
            return float("inf")
        return self.rms / self.spread if self.spread else (float("inf") if self.rms else 0.0)

    @property
    def worst(self) -> float | None:
        """The largest error over the spread; None where it is not known."""
        if self.largest is None:
            return None
        return self.largest / self.spread if self.spread else (float("inf") if self.largest else 0.0)


def measure_error(name: str, found: Array, reference: Array) -> OutputError:
    """Compare one output with its reference; both have the same shape.

    Where the reference is not finite (a mask of −∞), the other has to be the same there.
    """
    if reference.dtype.kind not in "f":
        share = float((found != reference).mean()) if reference.size else 0.0
        return OutputError(name, share, share, share, 1.0 - share, 1.0)
    wide, wanted = found.astype(np.float64), reference.astype(np.float64)
    counted = np.isfinite(wanted)
    same = np.array_equal(wide[~counted], wanted[~counted], equal_nan=True)
    wide, wanted = wide[counted], wanted[counted]
    spread = float(wanted.std()) or float(np.sqrt(np.square(wanted).mean())) if wanted.size else 1.0
    if not same or not np.isfinite(wide).all():
        return OutputError(name, None, None, None, None, spread)
    error = np.abs(wide - wanted)
    if not error.size:
        return OutputError(name, 0.0, 0.0, 0.0, 1.0, spread)
    lengths = float(np.linalg.norm(wide) * np.linalg.norm(wanted))
    cosine = min(1.0, float(wide @ wanted) / lengths) if lengths else float(not error.any())
    return OutputError(name, float(error.max()), float(error.mean()), _rms(error), cosine, spread)


def _rms(error: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(error).mean()))


def measure_errors(found: Arrays, reference: Arrays) -> list[OutputError]:
    """Every output against its reference, the one that is worst off first."""
    errors = [measure_error(name, found[name], array) for name, array in reference.items()]
    return sorted(errors, key=lambda error: -error.relative)


def as_parity(
    errors: Sequence[OutputError], agreement: float | None, n: int, precision: Precision, provider: str
) -> Parity:
    """The errors of all outputs, worst first, in a manifest's form.

    Args:
        agreement: share of equal answers, where an output has answers.
        n: golden calls.
    """
    (kind, tolerance), first = TOLERANCES[precision], errors[0]
    known = [error for error in errors if error.largest is not None and error.mean is not None]
    finite = len(known) == len(errors)
    relative = [error.worst for error in errors if error.worst is not None]
    # Which one is shown as the worst is by the figure that is judged.
    worst = first if kind == "rms" or not finite else max(errors, key=lambda error: error.worst or 0.0)
    return Parity(
        status="measured",
        n=n,
        provider=provider,
        max_abs_error=max(error.largest or 0.0 for error in known) if finite else None,
        mean_abs_error=max(error.mean or 0.0 for error in known) if finite else None,
        relative_error=_finite(max(relative)) if finite else None,
        rms_error=_finite(first.relative) if finite else None,
        output=worst.name,
        top1_agreement=agreement,
        tolerance=tolerance,
        tolerance_kind=kind,
    )


def _finite(value: float) -> float:
    """JSON has no infinity: an output that is constantly zero in FP32, and is not here."""
    return min(value, 1e9)


def score_of(errors: Sequence[OutputError], n: int) -> TensorScore | None:
    """The errors of all outputs, worst first, as a score; None where a number is not finite."""
    cosines = [error.cosine for error in errors if error.cosine is not None]
    if len(cosines) < len(errors):
        return None
    return TensorScore(n=n, loss=_finite(errors[0].relative), cosine=min(cosines))


def agreement(found: Arrays, reference: Arrays) -> float | None:
    """Share of rows with the same largest number, in outputs that have an answer: probabilities, or called so.

    None where no output has one.
    """
    shares = [
        float((found[name].argmax(-1) == array.argmax(-1)).mean())
        for name, array in reference.items()
        if _has_answers(name, array)
    ]
    return min(shares, default=None)


def _has_answers(name: str, array: Array) -> bool:
    """[…, C] with two or more classes, and either probabilities or called as such outputs are."""
    if array.dtype.kind != "f" or array.ndim < 3 or array.shape[-1] < 2 or not np.isfinite(array).all():
        return False  # the first axis counts golden calls
    if any(word in name.lower() for word in _CLASSES) and array.ndim == 3:
        return True
    return bool((array >= 0).all() and np.abs(array.astype(np.float64).sum(-1) - 1).max() < _ONE)


def differing_shapes(found: Mapping[str, Array], reference: Mapping[str, Array]) -> str | None:
    """What cannot be compared: an output that is missing, or of another shape; None where all can be."""
    for name, array in reference.items():
        if name not in found:
            return f"it has no output {name!r}, but {', '.join(found) or 'none'}"
        if found[name].shape != array.shape:
            shapes = f"{list(found[name].shape[1:])}, FP32's {list(array.shape[1:])}"
            return f"output {name!r} has the shape {shapes}"
    return None
