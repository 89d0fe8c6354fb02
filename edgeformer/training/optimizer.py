"""Tables that a CPU trains faster than torch's own, where one process trains them; what is computed is the same.

Small batches of short texts spend more on them than one would think. Torch makes the gradient of a table anew in every
step, zeros for tens of thousands of rows of which a few hundred are used: pages that the system must clear first, then
torch again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    OneCycleSchedule,
    OptimizerConfig,
    PlateauSchedule,
    Schedule,
    TrainingConfig,
)
from edgeformer.models.adapter import Learning

LEAST_BYTES = 1 << 20
"""Of a table; clearing a smaller one costs next to nothing."""


def quickens(device_type: str, training: TrainingConfig, processes: int = 1) -> bool:
    """Whether a training uses them.

    Several processes exchange gradients through autograd's hooks, and what is compiled computes its own.
    """
    return device_type == "cpu" and training.compile is None and processes == 1


def quicken(model: nn.Module) -> list[Tensor]:
    """Train with them; the weights, their names, and what is computed in evaluation stay the same.

    Returns:
        The gradients of tables, which stay allocated.
    """
    gradients = []
    for module in model.modules():
        if type(module) is nn.Embedding and _pays(module):
            module.__class__ = QuickTable
            assert isinstance(module, QuickTable)
            gradients.append(module.begin())
    return gradients


def _pays(table: nn.Embedding) -> bool:
    unusual = table.padding_idx is not None or table.max_norm is not None or table.scale_grad_by_freq or table.sparse
    return table.weight.requires_grad and table.weight.nbytes >= LEAST_BYTES and not unusual


class QuickTable(nn.Embedding):
    """A table whose gradient stays allocated from step to step, and is cleared where it is.

    All of it, not the rows alone that were used: others may have added to it, such as a head that is tied to the table.
    """

    _gradient: Tensor

    def begin(self) -> Tensor:
        """Make the gradient. Not in a constructor: the module was another one before. It is no part of its state."""
        self._gradient = torch.zeros_like(self.weight.detach())
        return self._gradient

    def forward(self, input: Tensor) -> Tensor:
        """As torch's own; input int64 [...] → [..., width]."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        rows: Tensor = _Rows.apply(self.weight, input, self)  # type: ignore[no-untyped-call]
        return rows

    def add(self, ids: Tensor, slopes: Tensor) -> None:
        """Add to the gradient of rows: ids int64 [n], slopes [n, width]."""
        if self.weight.grad is None:
            self.weight.grad = self._gradient.zero_()
        self.weight.grad.index_add_(0, ids, slopes.to(self.weight.dtype))


class _Rows(torch.autograd.Function):
    """Rows of a table. The gradient goes straight to where it stays: handed to autograd it would be copied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: QuickTable) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.table.add(ids.reshape(-1), slopes.flatten(0, -2))
        return None, None, None


# What a recipe trains with: number format, optimizer, learning-rate schedule.


def resolve_precision(requested: str, device_type: str) -> str:
    """``auto`` becomes bf16 where the hardware multiplies in it, else fp32.

    Raises:
        InputError: fp16 training on a CPU (torch computes it hundreds of times slower than fp32).
    """
    if requested == "fp16" and device_type == "cpu":
        raise InputError("training.precision: fp16 trains on CUDA cards only; use fp32, bf16 or auto on a CPU")
    if requested != "auto":
        return requested
    if device_type == "cuda":
        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"
    # torch only says whether bf16 *works*, which it does on AVX2 by emulation, tens of times slower than fp32.
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "fp32"
    return "bf16" if any(f" {feature}" in flags for feature in ("avx512_bf16", "amx_bf16", "bf16 ")) else "fp32"


def build_optimizer(model: nn.Module, config: OptimizerConfig, learning: Iterable[Learning] | None = None) -> Optimizer:
    """AdamW, fused where the recipe does not say otherwise.

    Args:
        model: what is trained.
        config: of the recipe.
        learning: how each of its parameters is learned; None: all at the same rate, with weight decay on matrices only.
    """
    if learning is None:
        learning = (Learning(parameter, decays=parameter.ndim >= 2) for parameter in model.parameters())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for one in learning:
        groups.setdefault((one.rate, one.decays), []).append(one.parameter)
    # The order is part of a checkpoint. The full rate comes first, which is the one that is shown.
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], not item[0][1]))
    options = [
        {"params": parameters, "lr": config.lr * rate, "weight_decay": config.weight_decay if decays else 0.0}
        for (rate, decays), parameters in ordered
    ]
    fused = config.kernels == "fused"
    foreach = None if fused else config.kernels == "foreach"
    return AdamW(options, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused, foreach=foreach)


def allocate_state(optimizer: Optimizer) -> None:
    """Make the state of :class:`AdamW` for each trained parameter that has none, as its first step would.

    The first step makes the state of one group after it has updated the group before. Where memory runs out in between,
    neither that step nor another one can follow. Afterwards, a step with the ``fused`` kernels allocates nothing.

    Raises:
        torch.OutOfMemoryError: what was made so far is complete; another call goes on from there.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                device = parameter.device if group["fused"] else "cpu"
                optimizer.state[parameter] = {
                    # Not by zeros: a step of the other kernels reads it, which a fake tensor allows of a constant only.
                    "step": torch.tensor(0.0, dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


class LearningRate:
    """One schedule behind two calls: after each optimizer step, and after each epoch's validation."""

    def __init__(self, optimizer: Optimizer, config: Schedule, total_steps: int) -> None:
        self._optimizer = optimizer
        self._scheduler: ReduceLROnPlateau | LambdaLR | OneCycleLR | None = None
        if isinstance(config, PlateauSchedule):
            self._scheduler = ReduceLROnPlateau(optimizer, factor=config.factor, patience=config.patience)
        elif isinstance(config, OneCycleSchedule):
            peak = [group["lr"] for group in optimizer.param_groups]
            # torch divides by the warm-up's length less one step, so a warm-up of exactly one step is no option, and
            # a run of one step is the first of two.
            steps = max(2, total_steps)
            warmup = max(config.warmup, 1.001 / steps)
            self._scheduler = OneCycleLR(optimizer, peak, total_steps=steps, pct_start=warmup, cycle_momentum=False)
        elif isinstance(config, (CosineSchedule, LinearSchedule)):
            rising, final, straight = round(config.warmup * total_steps), config.final, config.kind == "linear"

            def factor(step: int) -> float:
                if step < rising:
                    return (step + 1) / (rising + 1)
                share = min(1.0, (step - rising) / max(1, total_steps - rising))
                left = 1 - share if straight else 0.5 * (1 + math.cos(math.pi * share))
                return final + (1 - final) * left

            self._scheduler = LambdaLR(optimizer, factor)
        elif not isinstance(config, ConstantSchedule):
            raise TypeError(f"no such schedule: {config!r}")

    @property
    def current(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self) -> None:
        """Call after every optimizer step."""
        if isinstance(self._scheduler, (LambdaLR, OneCycleLR)):
            self._scheduler.step()

    def after_epoch(self, validation_loss: float) -> None:
        """Call after every epoch's validation."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(validation_loss)

    def state_dict(self) -> dict[str, object]:
        """State for a checkpoint."""
        return self._scheduler.state_dict() if self._scheduler is not None else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore from :meth:`state_dict`."""
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)
