"""Resumable training state: written atomically, checksummed, never unpickled with code execution allowed.

``checkpoints/`` holds the last two states of a run, ``NUMBER-step-STEP/`` each. Every one is complete in itself:
weights, optimizer, schedule, scaler, random states, position, and ``best.safetensors``, the best weights so far. Those
are a hard link where the file system has them, so that no weights are written twice. Earlier versions kept one state,
``last/``, with the best weights beside it; it is read as well.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load as load_without_code
from safetensors import SafetensorError, safe_open
from torch import Tensor

from edgeformer.families.saving import save_weights
from edgeformer.formats.errors import ArtifactError, EdgeformerError
from edgeformer.formats.files import replacing_folder, sha256_of, write_json
from edgeformer.formats.units import format_bytes
from edgeformer.stages.training import state as states
from edgeformer.stages.training.optimization import LearningRate

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

    def save(self, state: states.State, rate: LearningRate, position: Position, *, best: bool) -> None:
        """Write a new state, and remove all but the last two once it is complete.

        Args:
            state: see :func:`edgeformer.stages.training.state.gather`.
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
            states.write(state, folder)
            torch.save(rate.state_dict(), folder / _SCHEDULE)
            write_json(folder / _STATE, asdict(position))
            if best:
                _keep(state[states.WEIGHTS], folder)
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
    if not {_STATE, _SCHEDULE, states.random_file(0)} <= sums.keys():
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
    with safe_open(folder / states.WEIGHTS, framework="pt") as stored:
        names = set(stored.keys())
    if names == set(weights):  # Accelerate leaves out what is stored under another name already
        _link(folder / states.WEIGHTS, folder / _BEST)
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
