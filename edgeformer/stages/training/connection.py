"""Where a run is trained: the device, its number format, and the other processes that a launcher has started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs

from edgeformer.formats.errors import EdgeformerError, InputError
from edgeformer.formats.recipe import Recipe
from edgeformer.stages.training.optimization import resolve_precision
from edgeformer.stages.training.processes import Processes

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
