"""What a precision does to a model's numbers: would FP16 hold them, and how far do they drift from loop to loop?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgeformer.formats.drift import Drift, LoopDrift
from edgeformer.formats.manifest import Precision
from edgeformer.stages.exporting.exportable import Array

FP16_LARGEST = 65_504.0

DRIFT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1, "int4": 3e-1}
"""Of the root mean square of torch FP32's state; like the logits' tolerances fixed here, not chosen per model."""


@torch.inference_mode()
def largest_activation(model: nn.Module, *inputs: NDArray[np.int64]) -> float:
    """Largest absolute number that any module of the FP32 model takes or gives on these inputs, attention scores too.

    ONNX Runtime's CPU provider computes FP16 graphs in FP32, so running one here cannot show an overflow.
    """
    largest = 0.0

    def note(tensor: object) -> None:
        nonlocal largest
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            # NaN would lose every comparison, and is no smaller a problem than infinity.
            largest = max(largest, float(tensor.abs().max().nan_to_num(float("inf"))))

    def watch(module: nn.Module, taken: tuple[object, ...], given: object) -> None:
        for tensor in (*taken, given):
            note(tensor)

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        with _Scores(note):
            model(*map(torch.from_numpy, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return largest


class _Scores(TorchFunctionMode):
    """Shows the scores q·kᵀ/√D, which torch's attention keeps to itself and a graph computes in its own precision."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            self._note(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        return func(*args, **(kwargs or {}))


def measure_drift(states: Mapping[int, Array], references: Mapping[int, Array], precision: Precision) -> Drift:
    """Compare states of golden inputs, loop → float32 [B, S, C], with those of torch FP32."""
    tolerance = DRIFT_TOLERANCE[precision]
    loops = []
    for loop, reference in sorted(references.items()):
        error = states[loop].astype(np.float64) - reference
        size, rms = (float(np.sqrt(np.square(of, dtype=np.float64).mean())) for of in (reference, error))
        known = np.isfinite(error).all() and size > 0
        largest = float(np.abs(error).max()) / size if known else None
        loops.append(LoopDrift(loop=loop, rms_error=rms / size if known else None, max_error=largest))
    beyond = [row.loop for row in loops if row.rms_error is None or row.rms_error > tolerance]
    return Drift(tolerance=tolerance, loops=tuple(loops), first_beyond=beyond[0] if beyond else None)
