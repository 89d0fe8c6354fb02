"""What a checkpoint holds of weights, optimizer, scaler and random states: the same files for any number of processes.

They are those that ``Accelerator.save_state`` writes for one process, so that one process, many copies and many shards
go on from each other's checkpoints; each process has random states of its own. The main process writes all of it: only
it needs the disk while training.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load as load_without_code
from accelerate.utils import save
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from edgeformer.stages.training.processes import Processes

WEIGHTS = "model.safetensors"
_OPTIMIZER, _SCALER = "optimizer.bin", "scaler.pt"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

State = Mapping[str, Any]
"""File name → what it holds."""


def random_file(rank: int) -> str:
    """Name of the file with the random states of process ``rank``."""
    return f"random_states_{rank}.pkl"


def gather(processes: Processes, model: nn.Module, optimizer: Any) -> State:
    """Everything that a checkpoint of these processes needs, in the main one; all must ask for it.

    Args:
        model, optimizer: as :meth:`Processes.prepare` returned them.
    """
    drawn = {random_file(rank): found for rank, found in enumerate(processes.gather(_random_states()))}
    scaler = processes.accelerator.scaler
    scaling = {} if scaler is None else {_SCALER: scaler.state_dict()}
    if processes.sharded:
        weights: Any = OrderedDict(get_model_state_dict(processes.plain(model), options=_WHOLE))
        found = get_optimizer_state_dict(processes.plain(model), _inner(optimizer), options=_WHOLE)
        states: Any = _by_number(found) if processes.main else {}
    else:
        weights, states = processes.plain(model).state_dict(), optimizer.state_dict()
    return {WEIGHTS: weights, _OPTIMIZER: states, **scaling, **drawn}


def write(state: State, folder: Path) -> None:
    """Fill ``folder``. Raises OSError, RuntimeError or SafetensorError: it cannot be written."""
    for name, value in state.items():
        # Accelerate takes out of the weights what has another name as well.
        is_weights = name == WEIGHTS
        save(OrderedDict(value) if is_weights else value, folder / name, safe_serialization=is_weights)


def load(folder: Path, processes: Processes, model: nn.Module, optimizer: Any) -> None:
    """Put a checkpoint into what was prepared; raises whatever torch and safetensors raise for what does not fit.

    A process whose random states it does not have keeps its own.
    """
    plain, stored = processes.plain(model), load_without_code(folder / _OPTIMIZER, map_location="cpu")
    if processes.sharded:
        set_model_state_dict(plain, _with_shared(plain, load_file(folder / WEIGHTS)), options=_WHOLE)
        set_optimizer_state_dict(plain, _inner(optimizer), _by_name(plain, _inner(optimizer), stored), options=_WHOLE)
    else:
        load_model(plain, folder / WEIGHTS)
        optimizer.load_state_dict(stored)
    scaler = processes.accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict(load_without_code(folder / _SCALER))
    own = folder / random_file(processes.rank)
    if own.is_file():
        _restore(load_without_code(own))


def _random_states() -> dict[str, Any]:
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = [torch.cuda.get_rng_state()]  # of this process's card
    return states


def _restore(states: Mapping[str, Any]) -> None:
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
        found = states["torch_cuda_manual_seed"]  # earlier versions: of all cards, by their numbers
        torch.cuda.set_rng_state(found[min(torch.cuda.current_device(), len(found) - 1)])


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    return found


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameter names as ``Optimizer.state_dict`` has it, by numbers in the groups' order."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: found for name, found in state["state"].items()}, "param_groups": groups}


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of :func:`_by_number`."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    names = [known[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: found for number, found in state["state"].items()}, "param_groups": groups}


def _with_shared(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights that a file has once also under the other names that the model has for them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    stored = {known: weights[one] for same in names.values() for one in same if one in weights for known in same}
    return {**weights, **stored}
