"""One optimizer step: micro-batches over all processes, recovery when memory runs out, torch.compile, speed options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.parallel import DistributedDataParallel

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.training import metrics
from edgeformer.training.checkpoint import Position
from edgeformer.training.distributed import Processes
from edgeformer.training.memory import is_out_of_memory
from edgeformer.training.metrics import Meter
from edgeformer.training.objective import Objective
from edgeformer.training.optimizer import (
    LearningRate,
    allocate_state,
    build_optimizer,
    use_static_gradients,
    uses_static_gradients,
)

BACKEND = "inductor"
_TF32_CAPABILITY = (8, 0)
_TOTAL = ""
"""Key of the total loss among the named parts."""


class CompiledModel(nn.Module):
    """A model compiled for the shapes of full micro-batches, at most as many shapes as the recipe allows.

    A micro-batch with fewer rows, or of a further shape, goes through the model uncompiled. Scoring and saving use the
    model itself.

    Args:
        model: as Accelerate prepared it.
        max_shapes: shapes that are compiled.
        cuda_graphs: replay the launches of each shape as a CUDA graph.
    """

    def __init__(self, model: nn.Module, max_shapes: int, *, cuda_graphs: bool) -> None:
        super().__init__()
        # Tuples hide both models from this module's own parameters.
        self._plain, self._max_shapes, self._cuda_graphs = (model,), max_shapes, cuda_graphs
        self._shapes: set[object] = set()
        self.rows = 0
        self._compile()
        if not cuda_graphs:
            return
        # A replay overwrites the results of the previous replay, and torch would keep a returned first gradient:
        # copy it, so that every parameter has a gradient of its own.
        addresses: dict[Tensor, int] = {}

        def copy_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.data_ptr() != addresses.get(parameter):
                parameter.grad = parameter.grad.clone()
                addresses[parameter] = parameter.grad.data_ptr()

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(copy_gradient)  # type: ignore[no-untyped-call]

    @property
    def shapes(self) -> int:
        """Number of shapes that are compiled so far."""
        return len(self._shapes)

    def _compile(self) -> None:
        options: dict[str, Any] = {}
        if self._cuda_graphs:  # with an error instead of a silent fallback
            options = {"options": {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}}
        self._compiled = (torch.compile(self._plain[0], dynamic=False, backend=BACKEND, **options),)

    def set_rows(self, rows: int) -> None:
        """Set the rows of a full micro-batch; shapes compiled for another number are dropped."""
        if rows == self.rows:
            return
        if self._shapes:  # recorded graphs hold memory, and memory has just run out
            torch._dynamo.reset()
            self._shapes.clear()
            self._compile()
        self.rows = rows

    def forward(self, *inputs: Tensor | None, **keywords: Any) -> Any:
        """Compute as the model itself does. Raises InputError if it cannot be compiled on this host."""
        arguments = (*inputs, *keywords.values())
        shape = tuple(argument.shape if isinstance(argument, Tensor) else argument for argument in arguments)
        is_full = isinstance(inputs[0], Tensor) and len(inputs[0]) == self.rows
        if not is_full or (shape not in self._shapes and self.shapes >= self._max_shapes):
            return self._plain[0](*inputs, **keywords)
        self._shapes.add(shape)
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            # This class counts the shapes; beyond its own limit torch would silently run a shape uncompiled.
            with torch._dynamo.config.patch(recompile_limit=4 * self._max_shapes + 8, fail_on_recompile_limit_hit=True):
                return self._compiled[0](*inputs, **keywords)
        except RuntimeError as error:
            # A failure to record a CUDA graph occurs at run time and is no error of the compiler.
            is_compilation = isinstance(error, TorchDynamoException) or "cudagraph" in str(error)
            if is_out_of_memory(error) or not is_compilation:
                raise
            lines = str(error).strip().splitlines()
            reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise InputError(f"training.compile: the model cannot be compiled here: {reason}; take it out") from error


@dataclass(frozen=True)
class SpeedOptions:
    """Options for speed that the recipe requests and the device supports.

    Attributes:
        tf32: steps multiply float32 in TF32.
        pinned: batches are copied out of page-locked memory without waiting.
        cuda_graphs: launches of compiled shapes are replayed as CUDA graphs.
        unused: messages about requested options that this device does not support.
    """

    tf32: bool
    pinned: bool
    cuda_graphs: bool
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, training: TrainingConfig, device: torch.device) -> SpeedOptions:
        """Select those of a recipe for a device."""
        on_card = device.type == "cuda"
        actual = f"this run trains on the {device.type.upper()}"
        cuda_graphs = training.compile is not None and training.compile.cuda_graphs
        unused = []
        if training.tf32 and not on_card:
            unused.append(f"training.tf32 is not used: TF32 is a format of CUDA cards and {actual}")
        if training.pinned_memory and not on_card:
            unused.append(f"training.pinned_memory is not used: nothing is copied to a card, {actual}")
        if cuda_graphs and not on_card:
            unused.append(f"training.compile.cuda_graphs is not used: CUDA graphs need a CUDA card and {actual}")
        tf32 = training.tf32 and on_card
        if tf32 and (capability := torch.cuda.get_device_capability(device)) < _TF32_CAPABILITY:
            tf32 = False
            version = "{}.{}".format(*capability)
            unused.append(f"training.tf32 is not used: it needs compute capability 8.0, and this card has {version}")
        pinned = on_card and training.pinned_memory is not False
        return cls(tf32, pinned, cuda_graphs and on_card, tuple(unused))

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Multiply in TF32 within the block, if selected. Scores between the steps are computed in full precision."""
        precision = torch.get_float32_matmul_precision()
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if self.tf32:
                torch.set_float32_matmul_precision(precision)


class Stepper:
    """The prepared model with its optimizer and learning rate; takes optimizer steps.

    A step is computed ``Position.batch_size`` rows at a time in each process. When memory runs out, it is repeated with
    half as many rows at a time: the same rows, the same gradient.

    Args:
        total_steps: of the training, for the schedule.
    """

    def __init__(self, objective: Objective, processes: Processes, total_steps: int) -> None:
        self._objective, self._processes, self._config = objective, processes, objective.recipe.training
        learning = objective.model_spec.adapter.learning(objective.model, self._config)
        optimizer = build_optimizer(objective.model, self._config.optimizer, learning)
        # Before Accelerate wraps the optimizer's step method, which a schedule replaces.
        self.rate = LearningRate(optimizer, self._config.schedule, total_steps)
        if processes.count > 1 and not processes.sharded:
            self._exclude_from_ddp()
        self.model, self.optimizer = processes.prepare(objective.model, optimizer)
        self.speed, compile_ = SpeedOptions.of(self._config, processes.device), self._config.compile
        if uses_static_gradients(processes.device.type, self._config, processes.count):
            use_static_gradients(objective.model)
        self._compiled = (
            CompiledModel(self.model, compile_.shapes, cuda_graphs=self.speed.cuda_graphs) if compile_ else None
        )
        self._is_updated = False
        self._is_allocated = False
        """Whether optimizer and scaler have their state; a checkpoint may be loaded before the first step."""
        processes.seed_other_ranks(objective.recipe.seed)

    def initial_position(self) -> Position:
        """Return the position before the first step.

        The batch size is resolved here and nowhere else: a process computes ``training.batch_size`` rows at a time, or
        its share of a step's rows if that is less. Afterwards only :meth:`take` changes it, when memory runs out.
        """
        return Position(batch_size=self._config.batch_size)

    def _exclude_from_ddp(self) -> None:
        """Exclude parameters without a gradient, for which DDP would wait, and buffers, which it would broadcast."""
        device, model = self._processes.device, self._objective.model
        model.to(device)
        batch, _ = self._objective.batch(np.arange(1), device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with self._processes.accelerator.autocast():
                total = self._objective.losses(model, batch).total
            total.backward()  # type: ignore[no-untyped-call]
        unused = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.grad is None]
        model.zero_grad()
        names = [*unused, *(name for name, _ in model.named_buffers())]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]

    def take(self, rows: NDArray[np.int64], position: Position, report_smaller: Callable[[int], None]) -> Meter:
        """Take one optimizer step on ``rows``, repeated with smaller micro-batches while memory runs out.

        Args:
            position: before the step; its ``batch_size`` is halved when memory runs out.
            report_smaller: is then called with the size before.

        Returns:
            Sums over the rows of all processes.

        Raises:
            EdgeformerError: loss or gradient are not finite, or a single row does not fit into memory.
        """
        # A repetition must draw the same random numbers.
        cpu_state, cuda_states = torch.get_rng_state(), []
        if torch.cuda.is_available():
            cuda_states = torch.cuda.get_rng_state_all()
        step: Meter | None = None
        while True:
            self._is_updated = False
            try:
                with self.speed.multiplying():
                    step = self._attempt(rows, position)
                    self.optimizer.zero_grad()
                    return step
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._is_updated and step is None:
                    raise EdgeformerError(
                        f"out of memory right after the optimizer's step {position.step + 1} had changed the weights, "
                        "so it cannot be repeated; free memory or use a smaller training.batch_size, and train again"
                    ) from error
            # After the handler, when nothing refers to the failed attempt's tensors any more.
            self.optimizer.zero_grad()
            if step is not None:  # only clearing the gradients failed
                return step
            self._reset_scaler()
            report_smaller(self._halve(position))
            torch.set_rng_state(cpu_state)
            if cuda_states:
                torch.cuda.set_rng_state_all(cuda_states)
                torch.cuda.empty_cache()

    def _reset_scaler(self) -> None:
        """Clear the gradient scaler's state of a failed attempt; its factor and its count of good steps stay."""
        scaler = self._processes.accelerator.scaler
        if scaler is None:
            return
        if self._is_allocated:  # before, the scaler has no factor
            scaler.update(scaler.get_scale())
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        for name in ("grad_scale", "found_inf"):  # the scaler sets them for a fused step, and removes them after it
            vars(optimizer).pop(name, None)

    def _halve(self, position: Position) -> int:
        """Halve the rows of a micro-batch and return how many they were. Raises EdgeformerError if it cannot."""
        processes, step = self._processes, position.step + 1
        if processes.count > 1:  # the other processes wait in the middle of this step, and cannot go back
            raise EdgeformerError(
                f"process {processes.rank} of {processes.count}: out of memory at step {step}; train with a smaller "
                "training.batch_size, training.checkpointing: loop, more processes, or --shard"
            )
        size = position.batch_size
        if size == 1:
            raise EdgeformerError(
                f"out of memory at step {step} with a single row at a time; use training.checkpointing: loop, a "
                f"shorter data.{self._objective.recipe.data.length_key}, or see edgeformer plan"
            )
        position.batch_size = size // 2
        return size

    def _attempt(self, rows: NDArray[np.int64], position: Position) -> Meter:
        """Compute the gradient, clip it and update the weights."""
        scaler, norm = self._processes.accelerator.scaler, 0.0
        if not self._is_allocated:
            allocate_state(self.optimizer)
            if scaler is not None:
                scaler.scale(torch.zeros((), device=self._processes.device))  # creates its factor
            self._is_allocated = True
        step = self._compute_gradient(rows, position.batch_size)
        if self._config.clip_norm is not None or scaler is None:
            norm = self._processes.clip(self.model, self._config.clip_norm)
        is_finite = math.isfinite(step.loss_sum) and math.isfinite(norm)
        if is_finite or scaler is not None:
            scale = scaler.get_scale() if scaler is not None else 0.0
            self._update(position)
            self._is_updated = True  # an error from here on must not repeat the step
            # A fused optimizer skips the step itself, which Accelerate does not notice; the scaler lowers its factor.
            if scaler is not None and scaler.get_scale() < scale:
                skipped = self._objective.new_meter()
                skipped.rows_sum, skipped.skipped = len(rows), 1
                return skipped
        if not is_finite:
            problem = f"the loss is {step.loss_sum}"
            if math.isfinite(step.loss_sum):
                problem = "the gradient is not finite"
            raise self._processes.failure(metrics.describe_divergence(self.model, position.step + 1, problem))
        self.rate.after_step()
        return step

    def _update(self, position: Position) -> None:
        """Update the weights. Raises EdgeformerError if memory runs out after a part of them was updated."""
        updates = self._count_updates()
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error) or self._count_updates() == updates:
                raise
            fused = self._config.optimizer.kernels == "fused"
            remedy = "free memory" if fused else "use training.optimizer.kernels: fused, whose step allocates nothing"
            raise EdgeformerError(
                f"out of memory inside the optimizer's step {position.step + 1} after it had begun to change weights, "
                f"so it cannot be repeated; {remedy}, and train again"
            ) from error

    def _count_updates(self) -> float:
        """Return the updates of the first parameter, whose count every implementation of AdamW increments first."""
        groups = self.optimizer.param_groups
        first = next(parameter for group in groups for parameter in group["params"] if parameter.grad is not None)
        return float(self.optimizer.state[first]["step"])

    def _compute_gradient(self, rows: NDArray[np.int64], size: int) -> Meter:
        """Compute the gradient of the mean loss over ``rows``, ``size`` at a time; each process computes its share.

        All processes compute the same number of micro-batches. A process without rows computes one with weight 0.

        Returns:
            Sums over all processes.
        """
        processes, step = self._processes, self._objective.new_meter()
        local = processes.local_rows(rows)
        parts = [local[start : start + size] for start in range(0, -(-len(rows) // processes.count), size)]
        batches = [
            self._objective.batch(part if len(part) else rows[:1], processes.device, pinned=self.speed.pinned)
            for part in parts
        ]
        weight = sum(weight for part, (_, weight) in zip(parts, batches, strict=True) if len(part))
        step.rows_sum, step.weight_sum = len(rows), int(processes.sums(weight)[0])
        # DDP and FSDP average over the processes, but the gradient is a sum.
        divisor = max(1, step.weight_sum) / processes.count
        model = self.model
        if self._compiled is not None:
            self._compiled.set_rows(size)
            model = self._compiled
        computed: list[tuple[float, dict[str, Tensor]]] = []
        for number, ((batch, _), part) in enumerate(zip(batches, parts, strict=True), 1):
            share = 1.0 if len(part) else 0.0
            with processes.synchronizing(self.model, is_last=number == len(parts)):
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
