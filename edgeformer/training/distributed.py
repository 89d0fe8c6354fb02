"""The processes that train one run together: how many there are, which of them this is, and what they agree on.

``torchrun`` or ``accelerate launch`` starts them; Accelerate connects them, with gloo on CPUs and NCCL on CUDA cards.
Process 0 is the main one: it alone writes, reports and logs. Without a launcher there is one process, and nothing here
costs it anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from edgeformer.artifacts.errors import EdgeformerError, InputError, ToldElsewhere
from edgeformer.artifacts.recipe import Recipe
from edgeformer.training.memory import is_out_of_memory
from edgeformer.training.optimizer import resolve_precision

Value = TypeVar("Value")

_LOST = re.compile(r"connection|socket|timed? ?out|peer|ncclRemoteError|communicator was aborted", re.IGNORECASE)


class Processes:
    """This process among those that train the run.

    Attributes:
        rank, count: its number from 0, and how many there are.
        sharded: weights, gradients and optimizer state are spread over all of them (FSDP2) instead of copied (DDP).
    """

    def __init__(self, accelerator: Accelerator, precision: str, *, sharded: bool = False) -> None:
        self.accelerator, self.precision = accelerator, precision
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.sharded = sharded and self.count > 1
        self.device: torch.device = accelerator.device

    @property
    def main(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    @property
    def here(self) -> int:
        """How many of them run on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.count > 1 else 1

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Model and optimizer as training uses them: on the device, wrapped for number format and processes."""
        if not self.sharded:
            model, optimizer = self.accelerator.prepare(model, optimizer)
            return model, optimizer
        model.to(self.device)
        # One group: the loss uses heads outside of the model's forward, and shared layers would be gathered anew in
        # every iteration. Accelerate must not wrap it once more; on a CPU it takes FSDP for DDP without a word.
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {parameter: name for name, parameter in model.named_parameters()}
        ordered = [names[parameter] for parameter in groups]
        fully_shard(model, mesh=init_device_mesh(self.device.type, (self.count,)))
        sharded = iter([dict(model.named_parameters())[name] for name in ordered])
        for group in optimizer.param_groups:
            group["params"] = [next(sharded) for _ in group["params"]]
        prepared = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared, self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def settle(self, model: nn.Module) -> None:
        """After an evaluation: give up the gathered weights, so that everyone has its shard again."""
        if self.sharded:
            module: Any = self.plain(model)
            module.reshard()

    def plain(self, model: nn.Module) -> nn.Module:
        """The module that was prepared."""
        found: nn.Module = self.accelerator.unwrap_model(model)
        return found

    def share(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """This process's part of the rows of a step: every row is in exactly one of them."""
        return rows[self.rank :: self.count]

    def gathering(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are summed over the processes after the last one."""
        if self.count == 1 or last or self.sharded:  # whole gradients of several micro-batches are what does not fit
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return context

    def clip(self, model: nn.Module, most: float | None) -> float:
        """Norm of the whole gradient before it was clipped to ``most``; None: it is not."""
        if most is not None and not self.sharded:
            return float(self.accelerator.clip_grad_norm_(model.parameters(), most))
        parameters = list(model.parameters())
        if most is not None:
            norm = clip_grad_norm_(parameters, most)
        else:
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all processes, in float64."""
        if self.count == 1:
            return list(values)
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device), "sum")
        return [float(value) for value in total.tolist()]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether a process has it set."""
        return [value > 0 for value in self.sums(*map(float, flags))]

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, in the order of their numbers."""
        return [value] if self.count == 1 else list(gather_object([value]))

    def on_main(self, work: Callable[[], Value]) -> Value:
        """What ``work`` returns in the main process, in all of them. An error in it ends all."""
        found: list[Any] = [None]
        with self.agreeing():
            if self.main:
                found = [work()]
        value: Value = self.from_main(found[0])
        return value

    def from_main(self, value: Value) -> Value:
        """The main process's value, in all of them."""
        if self.count > 1:
            found: list[Value] = [value]
            broadcast_object_list(found)
            value = found[0]
        return value

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """An error in the block ends all processes, and is told once: by the main one."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            own = error
        if self.count == 1:
            return
        code = getattr(own, "exit_code", 1)
        told = self.gather(None if own is None else (self.rank, f"{own}" or type(own).__name__, code))
        failed = [found for found in told if found is not None]
        if not failed:
            return
        if own is not None and self.main:
            raise own
        rank, message, code = failed[0]
        if self.main:
            raise (InputError if code == InputError.exit_code else EdgeformerError)(self._named(rank, message))
        raise ToldElsewhere(message, code)

    def compare(self, facts: Mapping[str, object]) -> None:
        """All must train the same. Raises InputError where a fact of one of them is another one."""
        told = self.gather(dict(facts))

        def check() -> None:
            for rank, found in enumerate(told):
                for name, value in found.items():
                    if value != told[0][name]:
                        raise InputError(
                            f"{self._named(rank, name)} is {value}, but {told[0][name]} in process 0; recipe, files, "
                            "options and number format must be the same everywhere"
                        )

        self.on_main(check)

    @contextmanager
    def one_first(self) -> Iterator[None]:
        """One process of each machine runs the block before the others, which find what it has prepared."""
        first = self.accelerator.is_local_main_process
        if not first:
            self.accelerator.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.accelerator.wait_for_everyone()

    @contextmanager
    def connected(self, then: str) -> Iterator[None]:
        """Say clearly when another process is gone, and what to do ``then``. Raises EdgeformerError."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or is_out_of_memory(error) or not _LOST.search(str(error)):
                raise
            # gloo begins with its own source file, and goes on with guesses.
            reason = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error)).partition(". This is")[0].partition("\n")[0]
            raise EdgeformerError(
                self._named(
                    self.rank,
                    f"lost the connection to another process, which ended or was killed (see its own message): {reason}"
                    f"; {then}",
                )
            ) from error

    def _named(self, rank: int, message: str) -> str:
        return f"process {rank} of {self.count}: {message}"

    def failure(self, message: str) -> EdgeformerError:
        """What all processes raise for what all of them have found; the main one tells it."""
        return EdgeformerError(message) if self.main else ToldElsewhere(message, EdgeformerError.exit_code)

    def differ(self, seed: int) -> None:
        """From here on the others draw other random numbers than the main process, whose own stay as they are."""
        if not self.main:
            set_seed(seed + self.rank)

    def part(self) -> None:
        """End the connection. Nobody may wait for an answer any more, and the model must be gone.

        DDP's reducer frees its group while it holds Python's lock, for which a thread of that group may be waiting; so
        the group must outlive the model.
        """
        if self.count > 1:
            self.accelerator.free_memory()
            self.accelerator.end_training()


# Where a run is trained: the device, its number format, and the other processes that a launcher has started.


_PATIENCE = timedelta(hours=1)
"""What the others wait for one that prepares large data. One that dies is noticed at once: its connection closes."""
_OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
_FSDP = "ACCELERATE_USE_FSDP"


def connect(recipe: Recipe, where: Literal["auto", "cpu", "cuda"], *, sharded: bool) -> Processes:
    """Find the device and the other processes, as the launcher's environment says.

    Args:
        where: the kind of device.
        sharded: FSDP2 instead of DDP; ``accelerate launch --use_fsdp`` asks for it as well.

    Raises:
        InputError: no such device, a number format that it does not train in, or another engine was asked for.
    """
    if where == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--accelerator cuda: torch sees no CUDA card here; run edgeformer doctor, or use --accelerator cpu"
        )
    for name, engine in _OTHER_ENGINES.items():
        if os.environ.get(name, "false").lower() == "true":
            raise InputError(f"{name}: edgeformer does not train with {engine}; use plain data parallelism or --shard")
    # Sharding is done here (see Processes.prepare); Accelerate must not do it once more.
    sharded = os.environ.pop(_FSDP, "false").lower() == "true" or sharded
    use_cpu = where == "cpu" or not torch.cuda.is_available()
    precision = resolve_precision(recipe.training.precision, "cpu" if use_cpu else "cuda")
    # Accelerate keeps its settings for the life of the process and refuses others; each run brings its own.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = _accelerator(precision, use_cpu=use_cpu)
    processes = Processes(accelerator, precision, sharded=sharded)
    if sharded and processes.count == 1:
        raise InputError("--shard: there is one process only; start several with torchrun --nproc-per-node N")
    if processes.count > 1 and recipe.training.compile is not None:
        raise InputError(
            f"training.compile: compiles in one process only, not in {processes.count}; take it out "
            "(--set training.compile=null), or train with one"
        )
    if processes.sharded and precision == "fp16":
        raise InputError("--shard: does not train in fp16; use training.precision: bf16 or fp32")
    return processes


def _accelerator(precision: str, *, use_cpu: bool) -> Accelerator:
    here, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.environ.get("WORLD_SIZE", "1")
    if not use_cpu and here > torch.cuda.device_count():
        cards = torch.cuda.device_count()
        raise InputError(f"{here} processes on this machine, but {cards} CUDA cards; start one for each card")
    try:
        return Accelerator(
            mixed_precision="no" if precision == "fp32" else precision,
            cpu=use_cpu,
            # The loop accumulates by itself; a launcher's setting would divide the gradient once more.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=_PATIENCE),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
    except (RuntimeError, ValueError) as error:
        if count == "1":
            raise
        address = f"{os.environ.get('MASTER_ADDR', 'no MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'no MASTER_PORT')}"
        reason = str(error).strip().partition("\n")[0]
        raise EdgeformerError(
            f"the {count} processes cannot meet at {address}: {reason}; start them with torchrun or accelerate launch, "
            "at a port that is free, or unset WORLD_SIZE to train with one"
        ) from error
