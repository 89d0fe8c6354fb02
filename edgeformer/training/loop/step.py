"""One optimizer step: micro-batches over all processes, recovery when memory runs out, torch.compile, speed options."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import Processes, is_out_of_memory
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.optimizer import allocate_state, build_optimizer, build_schedule, use_static_gradients

BACKEND = "inductor"
TF32_CAPABILITY = (8, 0)
_TOTAL = ""
"""Key of the total loss among the named parts."""


@dataclass
class Meter:
    """Sums over optimizer steps. ``per_token``: the weight counts tokens instead of rows."""

    per_token: bool
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    weight_sum: int = 0
    rows_sum: int = 0
    seconds_sum: float = 0.0
    skipped: int = 0

    def add(self, step: Meter) -> None:
        for name in ("loss_sum", "weight_sum", "rows_sum", "seconds_sum", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        for name, value in step.part_sums.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + value

    @property
    def loss(self) -> float:
        """Mean loss per row or token."""
        return self.loss_sum / max(1, self.weight_sum)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values of a tensor, or of this process's shard of it, are finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def describe_divergence(model: nn.Module, step: int, problem: str) -> str:
    """Return the message that ends training at ``step``, with the first parameter that is not finite."""
    place = ""
    for name, parameter in model.named_parameters():
        has_finite_weights = is_finite(parameter)
        if not has_finite_weights or (parameter.grad is not None and not is_finite(parameter.grad)):
            tensor = "a gradient that is" if has_finite_weights else "weights that are"
            place = f"; the first layer with {tensor} not finite is {name}"
            break
    return (
        f"training diverged at step {step}: {problem}{place}; the last checkpoint and the best weights are kept; "
        "reduce training.optimizer.lr or training.clip_norm"
    )


class CompiledModel(nn.Module):
    """A model compiled for the shapes of full micro-batches, at most as many shapes as the recipe allows.

    A micro-batch with fewer than ``rows`` rows, or of a further shape, goes through the model uncompiled, and so do
    scoring and saving.
    """

    def __init__(self, model: nn.Module, max_shapes: int, rows: int) -> None:
        super().__init__()
        # A tuple hides both from this module's own parameters.
        self._models = (model, torch.compile(model, dynamic=False, backend=BACKEND))
        self.rows, self._max_shapes = rows, max_shapes
        self._shapes: set[object] = set()

    def forward(self, *inputs: Tensor | None, **keywords: Any) -> Any:
        """Compute as the model itself does. Raises InputError if it cannot be compiled on this host."""
        arguments = (*inputs, *keywords.values())
        shape = tuple(argument.shape if isinstance(argument, Tensor) else argument for argument in arguments)
        is_full = isinstance(inputs[0], Tensor) and len(inputs[0]) == self.rows
        if not is_full or (shape not in self._shapes and len(self._shapes) >= self._max_shapes):
            return self._models[0](*inputs, **keywords)
        self._shapes.add(shape)
        try:
            # This class counts the shapes; beyond its own limit torch would silently run a shape uncompiled.
            with torch._dynamo.config.patch(recompile_limit=4 * self._max_shapes + 8, fail_on_recompile_limit_hit=True):
                return self._models[1](*inputs, **keywords)
        except TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines()
            reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise InputError(f"training.compile: the model cannot be compiled here: {reason}; leave it out") from error


class Stepper:
    """The prepared model with its optimizer and schedule (None: a constant rate); takes optimizer steps.

    A step is computed ``Position.batch_size`` rows at a time in each process. When memory runs out, it is repeated with
    half as many rows at a time: the same rows, the same gradient. ``unused`` are messages about requested options for
    speed that this device does not support.
    """

    def __init__(self, objective: Objective, processes: Processes, total_steps: int) -> None:
        self._objective, self._processes, self._config = objective, processes, objective.recipe.training
        plain, device = objective.model, processes.device
        optimizer = build_optimizer(
            plain, self._config.optimizer, objective.model_spec.adapter.learning(plain, self._config)
        )
        # Before Accelerate wraps the optimizer's step method, which a schedule replaces.
        self.schedule = build_schedule(optimizer, self._config.schedule, total_steps)
        if processes.count > 1 and not processes.sharded:
            # DDP would wait for parameters without a gradient, and broadcast buffers: exclude both.
            plain.to(device)
            batch, _ = objective.batch(np.arange(1), device)
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                with processes.accelerator.autocast():
                    total = objective.losses(plain, batch).total
                total.backward()  # type: ignore[no-untyped-call]
            parameters = plain.named_parameters(remove_duplicate=False)
            names = [name for name, parameter in parameters if parameter.grad is None]
            names += [name for name, _ in plain.named_buffers()]
            plain.zero_grad()
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)  # type: ignore[no-untyped-call]
        self.model, self.optimizer = processes.prepare(plain, optimizer)
        training, on_card = self._config, device.type == "cuda"
        options = {"tf32": training.tf32, "pinned_memory": training.pinned_memory}
        self.unused = [
            f"training.{name} has no effect: it needs a CUDA card, and this run trains on the {device.type.upper()}"
            for name, is_requested in options.items()
            if is_requested and not on_card
        ]
        # Steps multiply float32 in TF32; scores between them are computed in full precision.
        self._tf32 = training.tf32 and on_card
        if self._tf32 and torch.cuda.get_device_capability(device) < TF32_CAPABILITY:
            self._tf32 = False
            self.unused.append("training.tf32 has no effect: it needs compute capability 8.0, and this card has less")
        self._pinned = on_card and training.pinned_memory is not False
        use_static_gradients(plain, device.type, self._config, processes.count)
        self._compiled: CompiledModel | None = None
        self._is_updating = False
        self._is_allocated = False  # optimizer and scaler: a checkpoint may be loaded before the first step
        if not processes.is_main:  # random numbers of its own
            set_seed(objective.recipe.seed + processes.rank)

    def take(self, rows: NDArray[np.int64], position: Position) -> Meter:
        """Take one optimizer step on ``rows`` and return sums over the rows of all processes.

        ``position`` is the one before the step; its ``batch_size`` is halved when memory runs out. Raises
        EdgeformerError if loss or gradient are not finite, or a single row does not fit into memory.
        """
        # 1. Remember what a repetition needs, to draw the same random numbers
        cpu_state = torch.get_rng_state()
        cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        number, processes, scaler = position.step + 1, self._processes, self._processes.accelerator.scaler
        step: Meter | None = None
        matmul_precision = torch.get_float32_matmul_precision()

        # 2. Attempt the step with fewer rows at a time until it fits
        while True:
            self._is_updating = False
            try:
                if self._tf32:
                    torch.set_float32_matmul_precision("high")
                step = self._attempt(rows, position)
                self.optimizer.zero_grad()
                return step
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._is_updating and step is None:
                    is_fused = self._config.optimizer.kernels == "fused"
                    other_kernels = "training.optimizer.kernels: fused, whose step allocates nothing, or "
                    raise EdgeformerError(
                        f"out of memory in the optimizer's step {number}, which may have changed weights, so it cannot "
                        f"be repeated; use {'' if is_fused else other_kernels}a smaller training.batch_size, and train "
                        "again"
                    ) from error
            finally:
                torch.set_float32_matmul_precision(matmul_precision)
            # After the handler, when nothing refers to the failed attempt's tensors any more.
            self.optimizer.zero_grad()
            if step is not None:  # only clearing the gradients failed
                return step
            # Other processes wait in the middle of this step, and cannot go back.
            if processes.count > 1 or position.batch_size == 1:
                length_key = self._objective.recipe.data.length_key
                place, remedy = "with a single row at a time", f"a smaller data.{length_key}"
                if processes.count > 1:
                    place = f"in process {processes.rank} of {processes.count}"
                    remedy = "a smaller training.batch_size, more processes, or --shard"
                can_recompute = getattr(self._config, "checkpointing", None) == "none"
                recomputing = "training.checkpointing: loop, " if can_recompute else ""
                raise EdgeformerError(
                    f"out of memory at step {number} {place}; use {recomputing}{remedy}; edgeformer plan predicts "
                    "what fits"
                )
            position.batch_size //= 2
            if scaler is not None and self._is_allocated:  # before, the scaler has no factor
                scaler.update(scaler.get_scale())  # forget the failed attempt; factor and count of good steps stay
            torch.set_rng_state(cpu_state)
            if cuda_states:
                torch.cuda.set_rng_state_all(cuda_states)
                torch.cuda.empty_cache()

    def _attempt(self, rows: NDArray[np.int64], position: Position) -> Meter:
        scaler, norm = self._processes.accelerator.scaler, 0.0
        if not self._is_allocated:
            allocate_state(self.optimizer)
            if scaler is not None:
                scaler.scale(torch.zeros((), device=self._processes.device))  # creates its factor
            self._is_allocated = True
        step = self._compute_gradient(rows, position.batch_size)
        if self._config.clip_norm is not None or scaler is None:
            norm = self._processes.clip(self.model, self._config.clip_norm)
        has_finite_step = math.isfinite(step.loss_sum) and math.isfinite(norm)
        if has_finite_step or scaler is not None:
            scale = scaler.get_scale() if scaler is not None else 0.0
            self._is_updating = True  # an error from here on must not repeat the step
            self.optimizer.step()
            # A fused optimizer skips the step itself, which Accelerate does not notice; the scaler lowers its factor.
            if scaler is not None and scaler.get_scale() < scale:
                return Meter(step.per_token, rows_sum=len(rows), skipped=1)
        if not has_finite_step:
            is_loss = not math.isfinite(step.loss_sum)
            problem = f"the loss is {step.loss_sum}" if is_loss else "the gradient is not finite"
            raise self._processes.failure(describe_divergence(self.model, position.step + 1, problem))
        if self.schedule is not None and not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()
        return step

    def _compute_gradient(self, rows: NDArray[np.int64], size: int) -> Meter:
        """Compute the gradient of the mean loss over ``rows``, ``size`` at a time; each process computes its share.

        All processes compute the same number of micro-batches. A process without rows computes one with weight 0.
        """
        processes, step = self._processes, Meter(self._objective.per_token)
        local = rows[processes.rank :: processes.count]  # disjoint and complete
        parts = [local[start : start + size] for start in range(0, -(-len(rows) // processes.count), size)]
        batches = [
            self._objective.batch(part if len(part) else rows[:1], processes.device, pinned=self._pinned)
            for part in parts
        ]
        weight = sum(weight for part, (_, weight) in zip(parts, batches, strict=True) if len(part))
        step.rows_sum, step.weight_sum = len(rows), int(processes.sums(weight)[0])
        # DDP and FSDP average over the processes, but the gradient is a sum.
        divisor = max(1, step.weight_sum) / processes.count
        model = self.model
        if (compile_ := self._config.compile) is not None:
            if self._compiled is None or self._compiled.rows != size:
                if self._compiled is not None:  # compiled code holds memory, and memory has just run out
                    torch._dynamo.reset()
                self._compiled = CompiledModel(model, compile_.shapes, size)
            model = self._compiled
        computed: list[tuple[float, dict[str, Tensor]]] = []
        for number, ((batch, _), part) in enumerate(zip(batches, parts, strict=True), 1):
            share = 1.0 if len(part) else 0.0
            # DDP sums gradients over the processes after the last part; shards do so after each, because unsharded
            # gradients of several parts would not fit.
            is_local = processes.count > 1 and number < len(parts) and not processes.sharded
            with processes.accelerator.no_sync(self.model) if is_local else nullcontext():
                with processes.accelerator.autocast():
                    losses = self._objective.losses(model, batch)
                processes.accelerator.backward(losses.total * share / divisor)
            values = {_TOTAL: losses.total, **losses.parts}
            computed.append((share, {name: value.detach() for name, value in values.items()}))
        # Read once per step: every read of a number waits until the card has computed it.
        for share, values in computed:
            for name, value in values.items():
                step.part_sums[name] = step.part_sums.get(name, 0.0) + share * float(value)
        step.loss_sum = step.part_sums.pop(_TOTAL, 0.0)
        step.loss_sum, *sums = processes.sums(step.loss_sum, *step.part_sums.values())
        step.part_sums = dict(zip(step.part_sums, sums, strict=True))
        return step
