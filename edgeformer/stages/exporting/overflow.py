"""Would FP16 hold what a model computes on real inputs?"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

FP16_LARGEST = 65_504.0


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


def overflow(largest: float) -> str | None:
    """Why FP16 cannot hold activations up to ``largest``; None when it can."""
    if largest > FP16_LARGEST:
        return f"an activation reaches {largest:.3g} on real inputs; FP16 ends at {FP16_LARGEST:.0f} (overflow)"
    return None
