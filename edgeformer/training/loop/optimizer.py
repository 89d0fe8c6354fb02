"""Number format, optimizer, learning-rate schedule, and embedding gradients that stay allocated on CPUs."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import (
    CosineSchedule,
    LinearSchedule,
    OneCycleSchedule,
    OptimizerConfig,
    PlateauSchedule,
    Schedule,
    TrainingConfig,
)
from edgeformer.models.adapter import ParameterSettings
from edgeformer.system.capability import cpu_flags

BF16_CAPABILITY = (8, 0)
"""Compute capability of the first NVIDIA cards that multiply in bf16 (Ampere)."""
STATIC_MIN_BYTES = 1 << 20
"""Smallest table that is worth it; clearing a smaller gradient costs next to nothing."""


def use_static_gradients(
    model: nn.Module, device_type: str, training: TrainingConfig, processes: int = 1
) -> list[Tensor]:
    """Turn the model's large embedding tables into :class:`StaticGradientTable` and return their gradients.

    Only one process on a CPU does so, and only without ``compile``: several processes exchange gradients through
    autograd's hooks, and a compiled model computes its own. torch would allocate and clear a table's gradient in every
    step, on which small batches of short texts spend much time.
    """
    gradients: list[Tensor] = []
    if device_type != "cpu" or training.compile is not None or processes > 1:
        return gradients
    for module in model.modules():
        if type(module) is not nn.Embedding or module.weight.nbytes < STATIC_MIN_BYTES:
            continue
        unusual = module.padding_idx is not None or module.max_norm is not None
        if module.weight.requires_grad and not (unusual or module.scale_grad_by_freq or module.sparse):
            module.__class__ = StaticGradientTable
            assert isinstance(module, StaticGradientTable)
            module.gradient = torch.zeros_like(module.weight.detach())
            gradients.append(module.gradient)
    return gradients


class StaticGradientTable(nn.Embedding):
    """An embedding whose gradient stays allocated and is cleared in place; weights and results are torch's own.

    All rows are cleared, not only those used: a tied head may have added to any of them.
    """

    gradient: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        rows: Tensor = _Rows.apply(self.weight, input, self)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    """Rows of a table, whose gradient is added in place: autograd would copy one that it receives."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: StaticGradientTable) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        weight: Tensor = ctx.table.weight
        if weight.grad is None:
            weight.grad = ctx.table.gradient.zero_()
        weight.grad.index_add_(0, ids.reshape(-1), slopes.flatten(0, -2).to(weight.dtype))
        return None, None, None


def resolve_precision(requested: str, device_type: str) -> str:
    """Resolve ``auto`` to bf16 where the hardware multiplies in it, else to fp32 (CPU) or fp16 (CUDA).

    Raises InputError for fp16 on a CPU (torch computes it hundreds of times slower than fp32).
    """
    if requested == "fp16" and device_type == "cpu":
        raise InputError("training.precision: fp16 needs a CUDA card; use fp32, bf16 or auto on a CPU")
    if requested != "auto":
        return requested
    if device_type == "cuda":
        return "bf16" if torch.cuda.get_device_capability() >= BF16_CAPABILITY else "fp16"
    # torch reports only whether bf16 works, which it does on AVX2 by emulation, tens of times slower than fp32.
    return "bf16" if (cpu_flags() or frozenset()) & {"avx512_bf16", "amx_bf16", "bf16"} else "fp32"


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, learning: Iterable[ParameterSettings] | None = None
) -> Optimizer:
    """Build AdamW, with the fused kernels unless the recipe requests others.

    Without ``learning``, all parameters have the same rate, and weight decay is on matrices only.
    """
    if learning is None:
        learning = (ParameterSettings(parameter, decays=parameter.ndim >= 2) for parameter in model.parameters())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for setting in learning:
        groups.setdefault((setting.rate, setting.decays), []).append(setting.parameter)
    # The order is part of a checkpoint. The group with the full rate comes first: its rate is displayed.
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], not item[0][1]))
    options = [
        {"params": parameters, "lr": config.lr * rate, "weight_decay": config.weight_decay if decays else 0.0}
        for (rate, decays), parameters in ordered
    ]
    fused = config.kernels == "fused"
    foreach = None if fused else config.kernels == "foreach"
    return AdamW(options, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused, foreach=foreach)


def allocate_state(optimizer: Optimizer) -> None:
    """Allocate AdamW's state of each trained parameter that has none, as its first step would.

    The first step allocates the state of one group after updating the group before: without memory in between, it
    could be neither completed nor repeated. Afterwards, a step with the ``fused`` kernels allocates nothing. After
    torch.OutOfMemoryError another call continues.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                device = parameter.device if group["fused"] else "cpu"
                optimizer.state[parameter] = {
                    # Not zeros(): the other kernels read it, which a fake tensor allows for a constant only.
                    "step": torch.tensor(0.0, dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


def build_schedule(
    optimizer: Optimizer, config: Schedule, total_steps: int
) -> ReduceLROnPlateau | LambdaLR | OneCycleLR | None:
    """Build the schedule of the learning rate; None: it is constant.

    A plateau's schedule steps with the loss of each epoch's validation, the other ones after each optimizer step.
    """
    if isinstance(config, PlateauSchedule):
        return ReduceLROnPlateau(optimizer, factor=config.factor, patience=config.patience)
    if isinstance(config, OneCycleSchedule):
        peak = [group["lr"] for group in optimizer.param_groups]
        # torch divides by the length of the warm-up minus one step: a warm-up of exactly one step and a training of one
        # step would fail.
        steps = max(2, total_steps)
        warmup = max(config.warmup, 1.001 / steps)
        return OneCycleLR(optimizer, peak, total_steps=steps, pct_start=warmup, cycle_momentum=config.cycle_momentum)
    if not isinstance(config, (CosineSchedule, LinearSchedule)):
        return None
    warmup_steps, final, linear = round(config.warmup * total_steps), config.final, config.kind == "linear"

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        share = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        decay = 1 - share if linear else 0.5 * (1 + math.cos(math.pi * share))
        return final + (1 - final) * decay

    return LambdaLR(optimizer, factor)
