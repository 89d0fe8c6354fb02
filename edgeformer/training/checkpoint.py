"""What a checkpoint holds of weights, optimizer, scaler and random states: the same files for any number of processes.

They are those that ``Accelerator.save_state`` writes for one process, so that one process, many copies and many shards
go on from each other's checkpoints; each process has random states of its own. The main process writes all of it: only
it needs the disk while training.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load as load_without_code
from accelerate.utils import save
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import replacing_folder, sha256_of, write_json
from edgeformer.artifacts.units import format_bytes
from edgeformer.models.weights import save_weights
from edgeformer.training.distributed import Processes
from edgeformer.training.optimizer import LearningRate

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


# Resumable training state: written atomically, checksummed, never unpickled with code execution allowed.
#
# ``checkpoints/`` holds the last two states of a run, ``NUMBER-step-STEP/`` each. Every one is complete in itself:
# weights, optimizer, schedule, scaler, random states, position, and ``best.safetensors``, the best weights so far.
# Those
# are a hard link where the file system has them, so that no weights are written twice. Earlier versions kept one
# state,
# ``last/``, with the best weights beside it; it is read as well.


_STATE, _SUMS, _SCHEDULE, _BEST = "state.json", "sha256.json", "schedule.pt", "best.safetensors"
_FOLDER, _OLD = "checkpoints", "last"  # the one state of earlier versions
_KEPT = 2


@dataclass
class Position:
    """Where training stands; with the weights and the random states it decides everything that follows."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    samples: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stopping_loss: float | None = None
    epochs_without_improvement: int = 0
    epoch_loss_sum: float = 0.0
    epoch_weight: int = 0
    batch_size: int = 0
    window: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0  # steps that fp16 scaling could not use
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)  # of the last steps, to tell a spike by
    scored_at: int | None = None  # the step whose weights were validated last
    records: int | None = None  # of the log; None: an earlier version did not count them


class Checkpoints:
    """The ``checkpoints/`` folder of a run."""

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / _FOLDER
        self._good: list[Path] = []  # written or verified by this process, oldest first

    @property
    def best(self) -> Path:
        """The best weights so far. Raises ArtifactError where there are none."""
        newest = self._good[-1] if self._good else self._folder
        # An earlier version put them beside its only state, which may have been set aside when it was killed.
        for file in (newest / _BEST, self._folder / _BEST):
            if file.is_file():
                return file
        raise ArtifactError(f"{self._folder}: holds no best weights; train again without --resume")

    def save(self, state: State, rate: LearningRate, position: Position, *, best: bool) -> None:
        """Write a new state, and remove all but the last two once it is complete.

        Args:
            state: see :func:`edgeformer.training.checkpoint.gather`.
            best: its weights are the best so far.

        Raises:
            EdgeformerError: it cannot be written; the states before are as they were.
            FileNotFoundError: the run's folder was removed.
        """
        if not self._run.is_dir():
            raise FileNotFoundError(errno.ENOENT, "was removed", str(self._run))
        number = max((_number(path) for path in self._states()), default=0) + 1
        path = self._folder / f"{number:06d}-step-{position.step}"
        with self._explained(path), replacing_folder(path) as folder:
            write(state, folder)
            torch.save(rate.state_dict(), folder / _SCHEDULE)
            write_json(folder / _STATE, asdict(position))
            if best:
                _keep(state[WEIGHTS], folder)
            elif position.validation:
                _link(self.best, folder / _BEST)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            sums: dict[str, object] = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
            write_json(folder / _SUMS, sums)
            _flush(folder)
        _flush_names(self._folder)
        self._good = [*self._good, path][-_KEPT:]
        self._prune()

    @property
    def any(self) -> bool:
        """Whether a state was ever saved, damaged or not; without one a run begins anew."""
        return bool(self._states())

    def find(self, say: Callable[[str], None]) -> tuple[Path, bool] | None:
        """The newest state that is not damaged, and whether it has the best weights; None where none was saved yet.

        Args:
            say: is told which states are damaged.

        Raises:
            ArtifactError: all of them are damaged.
        """
        damages: dict[Path, str] = {}
        without_best: Path | None = None
        for folder in self._states():
            damage = _damage(folder)
            if damage is None:
                if damages:
                    say(f"{'; '.join(damages.values())}; going on from the checkpoint before: {folder}")
                return folder, True
            damages[folder] = f"{damage}: damaged (not what its checksum says)"
            if damage.name == _BEST and without_best is None:
                without_best = folder
        if not damages:
            return None
        said = "; ".join(damages.values())
        if without_best is None:
            raise ArtifactError(f"{said}; no good checkpoint is left; train again without --resume")
        # Two states may share the file, and earlier versions replaced it before they wrote the state that knows of it.
        say(f"{said}; going on from {without_best}; the best weights are looked for again from there on")
        return without_best, False

    def load(self, folder: Path, restore: Callable[[Path], None], rate: LearningRate, *, best: bool) -> Position:
        """Load the state that :meth:`find` found.

        Args:
            restore: puts the files of weights, optimizer and random states into what was prepared.
            best: it has the best weights.

        Raises:
            ArtifactError: it cannot be loaded.
        """
        self._good = [folder]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the unpickler: what it refuses is an error
                restore(folder)
                rate.load_state_dict(load_without_code(folder / _SCHEDULE))
            position = Position(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
        except pickle.UnpicklingError:
            problem = "holds more than numbers, which could run code, so it is not read"
            raise ArtifactError(f"{folder}: {problem}; train again without --resume") from None
        except Exception as error:  # torch, safetensors and accelerate raise whatever they like
            reason = str(error).partition("\n")[0]
            raise ArtifactError(f"{folder}: cannot be loaded: {type(error).__name__}: {reason}") from None
        if not best:
            position.best_value = position.best_epoch = None
            position.validation = {}
        return position

    def remove_leftovers(self) -> None:
        """Remove what killed processes began to write. Only whoever holds the run's lock may ask for it."""
        for path in (*self._folder.glob(".*.tmp*"), *self._folder.glob(".*.old")):
            if not (path / _OLD).is_dir():  # see _states
                remove(path)

    def _states(self) -> list[Path]:
        """Newest first; a process of an earlier version that was killed between two renames set its state aside."""
        numbered = sorted(self._folder.glob("[0-9]*-step-*"), key=_number, reverse=True)
        old = [self._folder / _OLD, *sorted(self._folder.glob(f".{_OLD}.*.old/{_OLD}"))]
        return [*numbered, *(folder for folder in old if folder.is_dir())]

    def _prune(self) -> None:
        """Remove all states but the good ones; what is none of ours stays."""
        for folder in self._states():
            if folder not in self._good:
                shutil.rmtree(folder)
        if all(folder.name != _OLD for folder in self._good):
            (self._folder / _BEST).unlink(missing_ok=True)

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """torch and safetensors name neither the file nor the reason when a disk is full."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
            free = format_bytes(shutil.disk_usage(self._run).free) if self._run.is_dir() else "nothing"
            rest = f"--resume goes on from {self._good[-1].name}" if self._good else "--resume begins anew"
            raise EdgeformerError(f"{path}: cannot be written ({reason}; {free} free on the disk); {rest}") from error


def _number(folder: Path) -> int:
    digits = folder.name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _damage(folder: Path) -> Path | None:
    """The file of a state that is not what it was; the best weights only where it is nothing else."""
    try:
        sums: dict[str, str] = dict(json.loads((folder / _SUMS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return folder / _SUMS
    if not {_STATE, _SCHEDULE, random_file(0)} <= sums.keys():
        return folder / _SUMS
    for name in sorted(sums, key=_BEST.__eq__):
        path = folder / name
        if name == _BEST and folder.name == _OLD:  # beside it; a state that was set aside lies two folders deeper
            path = next(parent for parent in folder.parents if parent.name == _FOLDER) / _BEST
        if not path.is_file() or sha256_of(path) != sums[name]:
            return path
    return None


def _keep(weights: Mapping[str, Tensor], folder: Path) -> None:
    """The state's weights as the best ones, under all names that they have."""
    with safe_open(folder / WEIGHTS, framework="pt") as stored:
        names = set(stored.keys())
    if names == set(weights):  # Accelerate leaves out what is stored under another name already
        _link(folder / WEIGHTS, folder / _BEST)
    else:
        save_weights(weights, folder / _BEST)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk: a rename may reach it before them, and then a power cut ends both."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    _flush_names(folder)


def _flush_names(folder: Path) -> None:
    if os.name == "posix":  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
