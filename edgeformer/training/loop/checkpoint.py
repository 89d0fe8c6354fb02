"""Training state on disk: what a checkpoint holds, and the ``checkpoints/`` folder of a run.

A checkpoint has the files that ``Accelerator.save_state`` writes for one process, plus the random states of every other
process. One process, data-parallel copies and shards therefore resume from each other's checkpoints. The main process
writes all files: only its disk is needed while training.
"""

import errno
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load as load_without_code
from accelerate.utils import save as save_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import nn
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
from edgeformer.training.loop.distributed import Processes

CHECKPOINTS_FOLDER, WEIGHTS = "checkpoints", "model.safetensors"
_OPTIMIZER, _SCALER, _SCHEDULE = "optimizer.bin", "scaler.pt", "schedule.pt"
_POSITION, _CHECKSUMS, _BEST = "state.json", "sha256.json", "best.safetensors"
RANDOM_STATES = "random_states_{}.pkl"
"""File with the random states of a process, by its rank."""
_CHECKPOINTS_KEPT = 2
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

State = Mapping[str, Any]
"""File name → content."""


@dataclass
class Position:
    """Progress of a training. With the weights and the random states it determines all further steps."""

    epoch: int = 0
    batch: int = 0  # optimizer steps of the current epoch
    step: int = 0
    seconds: float = 0.0  # of steps, validation and saves
    training_seconds: float = 0.0  # of steps only
    samples: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stopping_loss: float | None = None  # or the negative metric: the best value for early stopping
    epochs_without_improvement: int = 0
    epoch_loss_sum: float = 0.0
    epoch_weight: int = 0
    batch_size: int = 0  # rows that a process computes at a time: the recipe's, halved whenever memory runs out
    window: dict[str, Any] = field(default_factory=dict)  # fields of the step.Meter since the last log line
    validation: dict[str, Any] = field(default_factory=dict)  # score of the best weights
    skipped: int = 0  # steps whose gradient fp16 could not represent
    skipped_in_a_row: int = 0  # the latest of them
    losses: list[float] = field(default_factory=list)  # of the latest steps, to detect a spike
    scored_at: int | None = None  # the step whose weights were validated last
    records: int = 0  # lines of the metrics log


def collect_state(processes: Processes, model: nn.Module, optimizer: Any) -> State:
    """Collect weights, optimizer, scaler and random states on the main process. All processes must call it."""
    random_states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        random_states["torch_cuda_manual_seed"] = [torch.cuda.get_rng_state()]  # of this process's card
    state = {RANDOM_STATES.format(rank): states for rank, states in enumerate(processes.gather(random_states))}
    if processes.accelerator.scaler is not None:
        state[_SCALER] = processes.accelerator.scaler.state_dict()
    plain: nn.Module = processes.accelerator.unwrap_model(model)
    if not processes.sharded:
        return {WEIGHTS: plain.state_dict(), _OPTIMIZER: optimizer.state_dict(), **state}
    weights = OrderedDict(get_model_state_dict(plain, options=_FULL))
    by_name: Any = get_optimizer_state_dict(plain, optimizer.optimizer, options=_FULL)
    optimizer_state: dict[str, Any] = {}
    if processes.is_main:  # parameters by their number in the order of the groups, as Optimizer.state_dict has them
        names = [name for group in by_name["param_groups"] for name in group["params"]]
        optimizer_state = _rekeyed(by_name, {name: number for number, name in enumerate(names)})
    return {WEIGHTS: weights, _OPTIMIZER: optimizer_state, **state}


def _rekeyed(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with each parameter's key replaced by ``keys[key]``."""
    groups = [{**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {keys[key]: moments for key, moments in state["state"].items()}, "param_groups": groups}


class Checkpoints:
    """The ``checkpoints/`` folder of a run: its last two states, each in a folder ``NUMBER-step-STEP``.

    Each is complete: weights, optimizer, schedule, scaler, random states, position, checksums of all of them, and
    ``best.safetensors``, the best weights so far (a hard link if possible). Nothing is unpickled with code execution.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / CHECKPOINTS_FOLDER
        self._good: list[Path] = []  # written or verified by this process, oldest first

    @property
    def best(self) -> Path:
        """The best weights so far. Raises ArtifactError if there are none."""
        file = self._good[-1] / _BEST if self._good else None
        if file is None or not file.is_file():
            raise ArtifactError(f"{self._folder}: has no best weights; train again without --resume")
        return file

    def save(self, state: State, schedule: Any, position: Position, *, best: bool) -> None:
        """Write a new state from :func:`collect_state` atomically, then remove all but the last two.

        ``best``: its weights are the best so far. ``schedule`` is None for a constant learning rate.

        Raises:
            EdgeformerError: it cannot be written; the earlier states are unchanged.
            FileNotFoundError: the run's folder was removed.
        """
        # 1. Write the state
        if not self._run.is_dir():
            raise FileNotFoundError(errno.ENOENT, "was removed", str(self._run))
        number = max((int(path.name.partition("-")[0]) for path in self._states()), default=0) + 1
        path = self._folder / f"{number:06d}-step-{position.step}"
        try:
            with replacing_folder(path) as folder:
                for name, value in state.items():
                    is_weights = name == WEIGHTS
                    content = OrderedDict(value) if is_weights else value
                    save_object(content, folder / name, safe_serialization=is_weights)
                torch.save({} if schedule is None else schedule.state_dict(), folder / _SCHEDULE)
                write_json(folder / _POSITION, asdict(position))
                best_file = folder / WEIGHTS if best else self.best if position.validation else None
                if best:
                    with safe_open(folder / WEIGHTS, framework="pt") as stored:
                        is_complete = set(stored.keys()) == set(state[WEIGHTS])
                    if not is_complete:  # Accelerate left out tensors that are stored under another name
                        save_weights(state[WEIGHTS], folder / _BEST)
                        best_file = None
                if best_file is not None:
                    try:
                        (folder / _BEST).hardlink_to(best_file)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(best_file, folder / _BEST)
                files = sorted(file for file in folder.iterdir() if file.is_file())
                write_json(folder / _CHECKSUMS, {file.name: sha256_of(file) for file in files})
                # Without this, a power cut after the rename could leave a state with incomplete files.
                for file in (*files, folder / _CHECKSUMS):
                    with file.open("rb+") as handle:
                        os.fsync(handle.fileno())
                _sync_folder(folder)
            _sync_folder(self._folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors name neither file nor reason
            reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
            free = format_bytes(shutil.disk_usage(self._run).free) if self._run.is_dir() else "nothing"
            remedy = (
                f"--resume continues from {self._good[-1].name}" if self._good else "--resume starts from the beginning"
            )
            raise EdgeformerError(f"{path}: cannot be written ({reason}; {free} free on the disk); {remedy}") from error

        # 2. Remove older ones
        self._good = [*self._good, path][-_CHECKPOINTS_KEPT:]
        for folder in self._states():
            if folder not in self._good:
                shutil.rmtree(folder)

    def find(self, report: Callable[[str], None]) -> tuple[Path, bool] | None:
        """Return the newest undamaged state and whether it has the best weights; None if none was saved yet.

        ``report`` receives a message about damaged states. Raises ArtifactError if all are damaged.
        """
        problems: list[str] = []
        without_best: Path | None = None
        for folder in self._states():
            checksums: dict[str, str] = {}
            with suppress(OSError, ValueError, TypeError):  # the file of checksums is damaged
                checksums = dict(json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8")))
            damaged = [_CHECKSUMS]
            if {_POSITION, _SCHEDULE, RANDOM_STATES.format(0)} <= checksums.keys():
                names = sorted(checksums, key=_BEST.__eq__)  # the best weights last
                files = ((name, folder / name) for name in names)
                damaged = [name for name, file in files if not file.is_file() or sha256_of(file) != checksums[name]]
            if not damaged:
                if problems:
                    report(f"{'; '.join(problems)}; continuing from the previous checkpoint: {folder}")
                return folder, True
            problems.append(f"{folder / damaged[0]}: damaged (its checksum differs)")
            if damaged == [_BEST] and without_best is None:
                without_best = folder
        if not problems:
            return None
        if without_best is None:
            raise ArtifactError(f"{'; '.join(problems)}; no intact checkpoint is left; train again without --resume")
        # Both states may share the file of the best weights.
        remedy = f"continuing from {without_best}; the best weights are selected again from there on"
        report(f"{'; '.join(problems)}; {remedy}")
        return without_best, False

    def load(
        self, folder: Path, processes: Processes, model: nn.Module, optimizer: Any, schedule: Any, *, has_best: bool
    ) -> Position:
        """Load the state that :meth:`find` returned into what was prepared. Raises ArtifactError if that fails."""
        # 1. Load the state
        self._good = [folder]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the unpickler: what it refuses is an error
                plain: nn.Module = processes.accelerator.unwrap_model(model)
                optimizer_state = load_without_code(folder / _OPTIMIZER, map_location="cpu")
                if processes.sharded:
                    weights: dict[str, Any] = load_file(folder / WEIGHTS)
                    # The file stores a shared tensor under one of its names; the model expects all of them.
                    parameters = list(plain.named_parameters(remove_duplicate=False))
                    stored_names = {parameter: name for name, parameter in parameters if name in weights}
                    weights |= {
                        name: weights[stored_names[value]] for name, value in parameters if value in stored_names
                    }
                    set_model_state_dict(plain, weights, options=_FULL)
                    inner = optimizer.optimizer  # in Accelerate's wrapper
                    names = {parameter: name for name, parameter in plain.named_parameters()}
                    ordered = [names[parameter] for group in inner.param_groups for parameter in group["params"]]
                    by_name = _rekeyed(optimizer_state, dict(enumerate(ordered)))
                    set_optimizer_state_dict(plain, inner, by_name, options=_FULL)
                else:
                    load_model(plain, folder / WEIGHTS)
                    optimizer.load_state_dict(optimizer_state)
                if processes.accelerator.scaler is not None:
                    processes.accelerator.scaler.load_state_dict(load_without_code(folder / _SCALER))
                random_file = folder / RANDOM_STATES.format(processes.rank)
                if random_file.is_file():
                    states = load_without_code(random_file)
                    random.setstate(states["random_state"])
                    np.random.set_state(states["numpy_random_seed"])
                    torch.set_rng_state(states["torch_manual_seed"])
                    if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
                        torch.cuda.set_rng_state(states["torch_cuda_manual_seed"][0])
                schedule_state = load_without_code(folder / _SCHEDULE)
                if schedule is not None:
                    schedule.load_state_dict(schedule_state)
            position = Position(**json.loads((folder / _POSITION).read_text(encoding="utf-8")))
        except pickle.UnpicklingError:
            problem = "could run code, because it has more than tensors and numbers, and is not read"
            raise ArtifactError(f"{folder}: {problem}; train again without --resume") from None
        except Exception as error:  # torch, safetensors and accelerate raise many types
            reason = str(error).partition("\n")[0]
            raise ArtifactError(f"{folder}: cannot be loaded: {type(error).__name__}: {reason}") from None

        # 2. Forget the score of weights that are missing
        if not has_best:
            position.best_value = position.best_epoch = None
            position.validation = {}
        return position

    def _states(self) -> list[Path]:
        states = [path for path in self._folder.glob("*") if re.fullmatch(r"\d+-step-\d+", path.name)]
        return sorted(states, key=lambda path: int(path.name.partition("-")[0]), reverse=True)


def _sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    if os.name == "posix":  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
