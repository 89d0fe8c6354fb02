"""Processes that train one run together, and the device and number format they use.

``torchrun`` or ``accelerate launch`` starts them; Accelerate connects them, with gloo on CPUs and NCCL on CUDA cards.
Process 0 is the main process: only it writes, reports and logs. Without a launcher there is one process, and every
method returns its own value.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from edgeformer.artifacts.errors import AlreadyReported, EdgeformerError, InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.training.loop.optimizer import resolve_precision

Value = TypeVar("Value")

_LOST_CONNECTION = re.compile(
    r"connection|socket|timed? ?out|peer|ncclRemoteError|communicator was aborted", re.IGNORECASE
)
_TIMEOUT = timedelta(hours=1)
"""How long processes wait for the one that prepares large data. The end of a process closes its connection at once."""
_UNSUPPORTED_ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")

_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator"
    r"|CUDA out of memory"  # torch.OutOfMemoryError, wrapped by the compiler
    r"|CUDA (driver )?error: out of memory"  # AcceleratorError; the allocator's expandable segments
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|Triton Error \[CUDA\]: out of memory"
)
"""Messages of a RuntimeError. Not included: Triton's "out of resource: shared memory" (a block of a kernel needs more
than a multiprocessor has, for any number of rows) and CUBLAS_STATUS_NOT_INITIALIZED (has other causes too)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the card or the host ran out of memory, so that a smaller batch may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


class Processes:
    """This process among those that train the run."""

    def __init__(self, accelerator: Accelerator, precision: str, *, sharded: bool = False) -> None:
        self.accelerator, self.precision = accelerator, precision
        self.rank: int = accelerator.process_index  # from 0
        self.count: int = accelerator.num_processes
        self.sharded = sharded and self.count > 1  # weights, gradients and optimizer state: FSDP2 instead of DDP
        self.device: torch.device = accelerator.device
        self.is_main = self.rank == 0  # the process that writes
        # Processes on this host
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.count > 1 else 1

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Move model and optimizer to the device and wrap them for number format and processes."""
        if not self.sharded:
            model, optimizer = self.accelerator.prepare(model, optimizer)
            return model, optimizer
        model.to(self.device)
        # One FSDP group: the loss uses heads outside of the model's forward, and shared layers would be gathered anew
        # in every iteration. Accelerate must not wrap the model once more; on a CPU it takes FSDP for DDP silently.
        names = {parameter: name for name, parameter in model.named_parameters()}
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        fully_shard(model, mesh=init_device_mesh(self.device.type, (self.count,)))
        shards = iter([dict(model.named_parameters())[name] for name in ordered])
        for group in optimizer.param_groups:
            group["params"] = [next(shards) for _ in group["params"]]
        prepared = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared, self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def clip(self, model: nn.Module, max_norm: float | None) -> float:
        """Clip the gradient to ``max_norm`` (None: do not) and return its norm before."""
        if max_norm is not None and not self.sharded:
            return float(self.accelerator.clip_grad_norm_(model.parameters(), max_norm))
        parameters = list(model.parameters())
        if max_norm is not None:
            norm = clip_grad_norm_(parameters, max_norm)
        else:
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def sums(self, *values: float) -> list[float]:
        """Return each value summed over all processes, in float64."""
        if self.count == 1:
            return list(values)
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device), "sum")
        return [float(value) for value in total.tolist()]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes in the order of their ranks."""
        return [value] if self.count == 1 else list(gather_object([value]))

    def on_main(self, work: Callable[[], Value]) -> Value:
        """Run ``work`` in the main process and return its result in all of them. An error ends all processes."""
        result: list[Any] = [None]
        with self.failing_together():
            if self.is_main:
                result = [work()]
        if self.count > 1:
            broadcast_object_list(result)
        value: Value = result[0]
        return value

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise in all processes if the block fails in any of them; only the main process reports the error."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self.count == 1:
                raise
            error = raised
        if self.count == 1:
            return
        code = getattr(error, "exit_code", 1)
        report = None if error is None else (self.rank, f"{error}" or type(error).__name__, code)
        failures = [failure for failure in self.gather(report) if failure is not None]
        if not failures:
            return
        if error is not None and self.is_main:
            raise error
        rank, message, code = failures[0]
        if self.is_main:
            raise (InputError if code == InputError.exit_code else EdgeformerError)(
                f"process {rank} of {self.count}: {message}"
            )
        raise AlreadyReported(message, code)

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Run the block in one process of each host first; unlike Accelerate's, the others go on if it fails."""
        is_first = self.accelerator.is_local_main_process
        if not is_first:
            self.accelerator.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.accelerator.wait_for_everyone()

    @contextmanager
    def explaining_lost_connection(self, remedy: str) -> Iterator[None]:
        """Replace torch's error about a lost connection by an EdgeformerError that ends with ``remedy``."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or is_out_of_memory(error) or not _LOST_CONNECTION.search(str(error)):
                raise
            # gloo begins with its own source file, and goes on with guesses.
            reason = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error)).partition(". This is")[0].partition("\n")[0]
            message = f"the connection to another process, which ended or was killed, is lost: {reason}; {remedy}"
            raise EdgeformerError(f"process {self.rank} of {self.count}: {message}") from error

    def failure(self, message: str) -> EdgeformerError:
        """Return the error that every process raises for a failure all of them detect; only the main one prints it."""
        return EdgeformerError(message) if self.is_main else AlreadyReported(message, EdgeformerError.exit_code)


def connect(recipe: Recipe, accelerator_kind: Literal["auto", "cpu", "cuda"], *, sharded: bool) -> Processes:
    """Find the device, the number format and the other processes, from the launcher's environment variables.

    ``sharded``: FSDP2 instead of DDP; ``accelerate launch --use_fsdp`` requests it too.

    Raises:
        InputError: no such device, a number format that it does not train in, or an unsupported engine.
        EdgeformerError: the processes cannot connect.
    """
    # 1. Choose device and number format
    if accelerator_kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--accelerator cuda: torch finds no CUDA card; run edgeformer doctor, or use --accelerator cpu"
        )
    for name in _UNSUPPORTED_ENGINES:
        if os.environ.get(name, "false").lower() == "true":
            raise InputError(f"{name}: not supported; use plain data parallelism or --shard")
    # Processes.prepare shards the model; Accelerate must not do it once more.
    sharded = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true" or sharded
    use_cpu = accelerator_kind == "cpu" or not torch.cuda.is_available()
    precision = resolve_precision(recipe.training.precision, "cpu" if use_cpu else "cuda")
    # Accelerate keeps its settings for the life of the process and refuses different ones.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

    # 2. Connect the processes
    local_count, cards = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 0 if use_cpu else torch.cuda.device_count()
    if not use_cpu and local_count > cards:
        raise InputError(f"{local_count} processes on this machine, but {cards} CUDA cards; start one process per card")
    try:
        accelerator = Accelerator(
            mixed_precision="no" if precision == "fp32" else precision,
            cpu=use_cpu,
            # The stepper accumulates; a launcher's setting would divide the gradient once more.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=_TIMEOUT),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
    except (RuntimeError, ValueError) as error:
        if (count := os.environ.get("WORLD_SIZE", "1")) == "1":
            raise
        address = f"{os.environ.get('MASTER_ADDR', 'no MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'no MASTER_PORT')}"
        reason = str(error).strip().partition("\n")[0]
        raise EdgeformerError(
            f"the {count} processes cannot connect at {address}: {reason}; start them with torchrun or accelerate "
            "launch at a free port, or unset WORLD_SIZE to train with one process"
        ) from error

    # 3. Refuse what does not work together
    processes = Processes(accelerator, precision, sharded=sharded)
    if sharded and processes.count == 1:
        raise InputError("--shard: needs several processes; start them with torchrun --nproc-per-node N")
    if processes.count > 1 and recipe.training.compile is not None:
        raise InputError(
            f"training.compile: not possible with {processes.count} processes; leave it out (--set "
            "training.compile=null), or train with one process"
        )
    if processes.sharded and precision == "fp16":
        raise InputError("--shard: not possible with fp16; use training.precision: bf16 or fp32")
    return processes
