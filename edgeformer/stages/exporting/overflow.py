"""Would FP16 hold what a model computes on real inputs?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FP16_LARGEST = 65_504.0


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


def overflow(largest: float) -> str | None:
    """Why FP16 cannot hold activations up to ``largest``; None when it can."""
    if largest > FP16_LARGEST:
        return f"an activation reaches {largest:.3g} on real inputs; FP16 ends at {FP16_LARGEST:.0f} (overflow)"
    return None
