"""torch.compile for the steps of training, with a bounded number of shapes."""

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
from edgeformer.training.optimizer import LearningRate, allocate_state, build_optimizer, quicken, quickens

BACKEND = "inductor"


class CompiledModel(nn.Module):
    """A model as training calls it, compiled for the shapes of whole micro-batches, as many as the recipe allows.

    A batch of fewer rows, or of one shape too many, goes through the model as it is. Whoever scores or saves the model
    has nothing to do with this.

    Args:
        model: as Accelerate prepared it.
        most: shapes.
        graphs: replay the launches of each as CUDA graphs.
    """

    def __init__(self, model: nn.Module, most: int, *, graphs: bool) -> None:
        super().__init__()
        self._plain, self._most, self._graphs = (model,), most, graphs  # a tuple hides it from this module's own parts
        self._shapes: set[object] = set()
        self.rows = 0
        self._begin()
        if graphs:
            _keep_gradients(model)

    @property
    def shapes(self) -> int:
        """How many are compiled so far."""
        return len(self._shapes)

    def _begin(self) -> None:
        options: dict[str, Any] = {}
        if self._graphs:  # and no way around them without a word
            options = {"options": {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}}
        self._fast = (torch.compile(self._plain[0], dynamic=False, backend=BACKEND, **options),)

    def starts_over(self, rows: int) -> None:
        """From now on a whole micro-batch has so many rows; what was compiled for other numbers of them is dropped."""
        if rows == self.rows:
            return
        if self._shapes:  # recorded graphs hold memory, of which there was too little
            torch._dynamo.reset()
            self._shapes.clear()
            self._begin()
        self.rows = rows

    def forward(self, *inputs: Tensor | None, **named: Any) -> Any:
        """As the model's own. Raises InputError: it cannot be compiled here."""
        arguments = (*inputs, *named.values())
        shape = tuple(one.shape if isinstance(one, Tensor) else one for one in arguments)
        whole = isinstance(inputs[0], Tensor) and len(inputs[0]) == self.rows
        if not whole or (shape not in self._shapes and self.shapes >= self._most):
            return self._plain[0](*inputs, **named)
        self._shapes.add(shape)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            # Shapes are counted here; torch's own limit would let a further one go uncompiled without a word.
            with torch._dynamo.config.patch(recompile_limit=4 * self._most + 8, fail_on_recompile_limit_hit=True):
                return self._fast[0](*inputs, **named)
        except RuntimeError as error:
            # What cannot be recorded as a CUDA graph is noticed when it is run, and is no error of the compiler.
            cannot = isinstance(error, TorchDynamoException) or "cudagraph" in str(error)
            if is_out_of_memory(error) or not cannot:
                raise
            lines = str(error).strip().splitlines()
            said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise InputError(f"training.compile: the model cannot be compiled here: {said}; take it out") from error


def _keep_gradients(model: nn.Module) -> None:
    """Give every parameter a gradient of its own.

    What a graph returns is written over by its next replay, and torch would keep a first gradient as it was returned.
    """
    own: dict[nn.Parameter, int] = {}

    def copied(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None and parameter.grad.data_ptr() != own.get(parameter):
            parameter.grad = parameter.grad.clone()
            own[parameter] = parameter.grad.data_ptr()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(copied)  # type: ignore[no-untyped-call]


# What a recipe asks of the device for speed, and whether it is there: TF32, page-locked memory, CUDA graphs.


_FIRST_WITH_TF32 = (8, 0)
"""Compute capability."""


@dataclass(frozen=True)
class Levers:
    """What is used of it.

    Attributes:
        tf32: steps multiply float32 in TF32.
        pinned: batches are copied out of page-locked memory, and nothing waits for the copy.
        graphs: the launches of compiled shapes are replayed as CUDA graphs.
        unused: of what was asked for, what is not used and why, for people.
    """

    tf32: bool
    pinned: bool
    graphs: bool
    unused: tuple[str, ...] = ()

    @classmethod
    def on(cls, training: TrainingConfig, device: torch.device) -> Levers:
        """Those of a recipe on this device."""
        on_card = device.type == "cuda"
        here = f"this run trains on the {device.type.upper()}"
        graphs = training.compile is not None and training.compile.cuda_graphs
        unused = []
        if training.tf32 and not on_card:
            unused.append(f"training.tf32 is not used: TF32 is a format of CUDA cards and {here}")
        if training.pinned_memory and not on_card:
            unused.append(f"training.pinned_memory is not used: nothing is copied to a card, {here}")
        if graphs and not on_card:
            unused.append(f"training.compile.cuda_graphs is not used: CUDA graphs need a CUDA card and {here}")
        tf32 = training.tf32 and on_card
        if tf32 and (capability := torch.cuda.get_device_capability(device)) < _FIRST_WITH_TF32:
            tf32 = False
            found = "{}.{}".format(*capability)
            unused.append(f"training.tf32 is not used: it needs compute capability 8.0, and this card has {found}")
        pinned = on_card and training.pinned_memory is not False
        return cls(tf32, pinned, graphs and on_card, tuple(unused))

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Around the steps of training: scores, which are computed between them, are not cut down."""
        before = torch.get_float32_matmul_precision()
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if self.tf32:
                torch.set_float32_matmul_precision(before)


# One optimizer step after the other: what all processes compute together, and how it recovers from lack of memory.


_TOTAL = ""
"""The loss itself among its named parts."""


class Stepper:
    """The model, its optimizer and its learning rate, as training uses them.

    An optimizer step is planned as a whole and computed ``batch_size`` rows at a time. When memory runs out, the step
    is repeated with half as many at a time: the same rows, the same gradient. Several processes share its rows.

    Args:
        total_steps: of the whole training, for the schedule.
    """

    def __init__(self, objective: Objective, processes: Processes, total_steps: int) -> None:
        self._objective, self._processes, self._config = objective, processes, objective.recipe.training
        learning = objective.model_spec.adapter.learning(objective.model, self._config)
        optimizer = build_optimizer(objective.model, self._config.optimizer, learning)
        # Before Accelerate keeps the optimizer's step method, which a schedule marks as its own.
        self.rate = LearningRate(optimizer, self._config.schedule, total_steps)
        if processes.count > 1 and not processes.sharded:
            self._not_for_ddp()
        self.model, self.optimizer = processes.prepare(objective.model, optimizer)
        self.levers, compile_ = Levers.on(self._config, processes.device), self._config.compile
        if quickens(processes.device.type, self._config, processes.count):
            quicken(objective.model)
        self._compiled = (
            None if compile_ is None else CompiledModel(self.model, compile_.shapes, graphs=self.levers.graphs)
        )
        self._is_updated = False
        self._allocated = False
        """Whether optimizer and scaler have all that a step needs; a checkpoint may be loaded before the first one."""
        processes.differ(objective.recipe.seed)

    def _not_for_ddp(self) -> None:
        """DDP waits for the gradient of every parameter, and sends every buffer around before each micro-batch: it must
        not know of parameters that the loss does not depend on, and of buffers, which are constants."""
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

    def take(self, rows: NDArray[np.int64], position: Position, halved: Callable[[int], None]) -> Meter:
        """One optimizer step on ``rows``; again with half as many rows at a time while memory runs out.

        Args:
            position: before the step; its ``batch_size`` is how many rows are computed at a time.
            halved: is told how many they were before.

        Returns:
            Sums over the rows, of all processes.

        Raises:
            EdgeformerError: loss or gradient are not finite, or a single row does not fit into memory.
        """
        # The repetition must draw the same numbers.
        cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        step: Meter | None = None
        while True:
            self._is_updated = False
            try:
                with self.levers.multiplying():
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
            # Outside the handler, where nothing refers to the failed attempt's tensors any more.
            self.optimizer.zero_grad()
            if step is not None:  # only clearing the gradients failed
                return step
            self._reset_scaler()
            size = self._halve(position)
            halved(size)
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
                torch.cuda.empty_cache()

    def _reset_scaler(self) -> None:
        """Clear what a failed attempt left in the gradient scaler; its factor and its count of good steps stay."""
        scaler = self._processes.accelerator.scaler
        if scaler is None:
            return
        if self._allocated:  # before, the scaler has no factor yet
            scaler.update(scaler.get_scale())
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        for name in ("grad_scale", "found_inf"):  # the scaler sets them for a fused step, and removes them after it
            vars(optimizer).pop(name, None)

    def _halve(self, position: Position) -> int:
        processes, step = self._processes, position.step + 1
        if processes.count > 1:  # the others wait in the middle of this step, and cannot go back
            raise EdgeformerError(
                f"process {processes.rank} of {processes.count}: out of memory at step {step}; train with a smaller "
                "training.batch_size, training.checkpointing: loop, more processes, or --shard"
            )
        size = min(position.batch_size, self._config.effective_batch)
        if size == 1:
            raise EdgeformerError(
                f"out of memory at step {step} with a single row at a time; use training.checkpointing: loop, a "
                f"shorter data.{self._objective.recipe.data.length_key}, or see edgeformer plan"
            )
        position.batch_size = size // 2
        return size

    def _attempt(self, rows: NDArray[np.int64], position: Position) -> Meter:
        scaler, norm = self._processes.accelerator.scaler, 0.0
        if not self._allocated:
            allocate_state(self.optimizer)
            if scaler is not None:
                scaler.scale(torch.zeros((), device=self._processes.device))  # makes its factor
            self._allocated = True
        step = self._gradient(rows, position.batch_size)
        if self._config.clip_norm is not None or scaler is None:
            norm = self._processes.clip(self.model, self._config.clip_norm)
        finite = math.isfinite(step.loss_sum) and math.isfinite(norm)
        if scaler is None and not finite:
            raise self._diverged(step, position)
        scale = scaler.get_scale() if scaler is not None else 0.0
        self._update(position)
        self._is_updated = True  # what fails from here on must not repeat the step
        # A fused optimizer skips the step by itself, which Accelerate does not notice; the scaler lowers its factor.
        if scaler is not None and scaler.get_scale() < scale:
            step = self._meter()
            step.rows_sum, step.skipped = len(rows), 1
        elif not finite:
            raise self._diverged(step, position)
        else:
            self.rate.after_step()
        return step

    def _update(self, position: Position) -> None:
        """Let the optimizer take its step. Raises EdgeformerError: memory ran out when a part of it was done."""
        before = self._updates()
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error) or self._updates() == before:
                raise
            fused = self._config.optimizer.kernels == "fused"
            remedy = "free memory" if fused else "use training.optimizer.kernels: fused, whose step allocates nothing"
            raise EdgeformerError(
                f"out of memory inside the optimizer's step {position.step + 1} after it had begun to change weights, "
                f"so it cannot be repeated; {remedy}, and train again"
            ) from error

    def _updates(self) -> float:
        """Return how often the first parameter was updated: what each of AdamW's implementations changes first."""
        groups = self.optimizer.param_groups
        first = next(parameter for group in groups for parameter in group["params"] if parameter.grad is not None)
        return float(self.optimizer.state[first]["step"])

    def _gradient(self, rows: NDArray[np.int64], size: int) -> Meter:
        """The gradient of the mean loss over ``rows``, of which each process computes its share; the sums are of all.

        All processes compute as many micro-batches. One that has no row left takes one that does not count.
        """
        processes, step = self._processes, self._meter()
        mine = processes.share(rows)
        parts = [mine[at : at + size] for at in range(0, -(-len(rows) // processes.count), size)]
        pinned = self.levers.pinned
        batches = [
            self._objective.batch(part if len(part) else rows[:1], processes.device, pinned=pinned) for part in parts
        ]
        weights = [counted if len(part) else 0 for part, (_, counted) in zip(parts, batches, strict=True)]
        step.rows_sum, step.weight_sum = len(rows), int(processes.sums(sum(weights))[0])
        # DDP and FSDP average over the processes what is to be summed.
        divisor = max(1, step.weight_sum) / processes.count
        found: list[tuple[float, dict[str, Tensor]]] = []
        for number, ((batch, _), part) in enumerate(zip(batches, parts, strict=True), 1):
            share = 1.0 if len(part) else 0.0
            with processes.gathering(self.model, last=number == len(parts)):
                with processes.accelerator.autocast():
                    losses = self._objective.losses(self._called(size), batch)
                processes.accelerator.backward(losses.total * share / divisor)
            found.append((share, {_TOTAL: losses.total.detach(), **{k: v.detach() for k, v in losses.parts.items()}}))
        # Once a step: a card that is asked for a number stands still until it was computed.
        for share, values in found:
            for name, value in values.items():
                step.part_sums[name] = step.part_sums.get(name, 0.0) + share * float(value)
        step.loss_sum = step.part_sums.pop(_TOTAL, 0.0)
        step.loss_sum, *sums = processes.sums(step.loss_sum, *step.part_sums.values())
        step.part_sums = dict(zip(step.part_sums, sums, strict=True))
        return step

    def _called(self, size: int) -> nn.Module:
        """What computes micro-batches of ``size`` rows: the model, or what was compiled of it."""
        if self._compiled is None:
            return self.model
        self._compiled.starts_over(size)
        return self._compiled

    def _meter(self) -> Meter:
        return Meter(per_token=self._objective.task.unit == "tokens")

    def _diverged(self, step: Meter, position: Position) -> EdgeformerError:
        found = "the gradient is not finite" if math.isfinite(step.loss_sum) else f"the loss is {step.loss_sum}"
        return self._processes.failure(metrics.divergence(self.model, position.step + 1, found))
