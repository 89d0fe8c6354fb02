"""Numbers going wrong: losses and gradients that are not finite, and losses that leap."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HISTORY, LEAST = 100, 20
DEVIATIONS = 6.0
SKIPPED_IN_A_ROW = 32
"""fp16 scaling halves its factor with each skipped step: after so many no factor is left that could help."""


def is_spike(loss: float, before: list[float]) -> bool:
    """Whether a step's mean loss is more than 6 standard deviations above the mean of the last 100 (at least 20)."""
    if len(before) < LEAST:
        return False
    return loss > statistics.fmean(before) + DEVIATIONS * statistics.pstdev(before)


def divergence(model: nn.Module, step: int, found: str) -> str:
    """Why training stops at ``step``: ``found`` is what is not finite; and the first parameter where it shows."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            place = f"; the first layer with weights that are not finite is {name}"
            break
        if parameter.grad is not None and not _finite(parameter.grad):
            place = f"; the first layer with a gradient that is not finite is {name}"
            break
    else:
        place = ""
    return (
        f"training diverged at step {step}: {found}{place}; the weights of the last checkpoint and the best ones are "
        "kept; lower training.optimizer.lr or training.clip_norm"
    )


def weights_are_finite(model: nn.Module) -> bool:
    """Whether a checkpoint of these weights would be worth keeping."""
    return all(map(_finite, model.parameters()))


def _finite(tensor: Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # this process's shard
    return bool(torch.isfinite(own).all())
