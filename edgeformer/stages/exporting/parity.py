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
    """Compare logits [n, C], computed with ``provider``, with those of torch FP32. Errors are None where not finite."""
    error = np.abs(logits.astype(np.float64) - reference)
    spread = float(reference.std())
    finite = bool(np.isfinite(error).all())
    kind: Literal["absolute", "relative"] = "absolute" if precision == "fp32" else "relative"
    return Parity(
        status="measured",
        n=len(reference),
        provider=provider,
        max_abs_error=float(error.max()) if finite else None,
        mean_abs_error=float(error.mean()) if finite else None,
        relative_error=float(error.max()) / spread if spread and finite else None,
        top1_agreement=float((logits.argmax(-1) == reference.argmax(-1)).mean()),
        tolerance=FP32_ABSOLUTE if kind == "absolute" else FP16_RELATIVE,
        tolerance_kind=kind,
    )


@torch.inference_mode()
def largest_activation(model: nn.Module, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64]) -> float:
    """Largest absolute output of any module of the FP32 model on these inputs.

    ONNX Runtime's CPU provider computes FP16 graphs in FP32, so running one here cannot show an overflow.
    """
    largest = 0.0

    def watch(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, float(output.abs().max()))

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        model(torch.from_numpy(input_ids), torch.from_numpy(attention_mask))
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
