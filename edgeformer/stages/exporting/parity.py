"""How close an artifact is to torch FP32, on real inputs. The tolerances are fixed here, not chosen per model."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgeformer.schema.manifest import Parity, Precision

FP32_ABSOLUTE = 1e-4
FP16_RELATIVE = 1e-2
"""Of the standard deviation of the reference logits."""

FP16_LARGEST = 65_504.0


def measure_parity(
    logits: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision, provider: str
) -> Parity:
    """Compare logits [n, C], computed with ``provider``, with those of torch FP32. Errors are None where not finite.

    ``n`` are rows of a classifier, tokens of a language model.
    """
    error = np.abs(logits - reference)  # in float32: the difference of close numbers is exact
    spread = float(reference.std())
    finite = bool(np.isfinite(error).all())
    kind: Literal["absolute", "relative"] = "absolute" if precision == "fp32" else "relative"
    return Parity(
        status="measured",
        n=len(reference),
        provider=provider,
        max_abs_error=float(error.max()) if finite else None,
        mean_abs_error=float(error.mean(dtype=np.float64)) if finite else None,
        relative_error=float(error.max()) / spread if spread and finite else None,
        top1_agreement=float((logits.argmax(-1) == reference.argmax(-1)).mean()),
        tolerance=FP32_ABSOLUTE if kind == "absolute" else FP16_RELATIVE,
        tolerance_kind=kind,
    )


@torch.inference_mode()
def largest_activation(model: nn.Module, *inputs: NDArray[np.int64]) -> float:
    """Largest absolute number that any module of the FP32 model takes or gives on these inputs.

    ONNX Runtime's CPU provider computes FP16 graphs in FP32, so running one here cannot show an overflow.
    """
    largest = 0.0

    def watch(module: nn.Module, taken: tuple[object, ...], given: object) -> None:
        nonlocal largest
        for tensor in (*taken, given):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                largest = max(largest, float(tensor.abs().max()))

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        model(*map(torch.from_numpy, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return largest


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
