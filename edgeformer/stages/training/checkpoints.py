"""Resumable training state: written atomically, checksummed, never unpickled with code execution allowed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load as load_without_code
from safetensors.torch import load_file, save_file
from torch import nn

from edgeformer.schema.errors import ArtifactError
from edgeformer.schema.files import replacing, replacing_folder, sha256_of, write_json
from edgeformer.stages.training.optimization import LearningRate

_STATE, _SUMS, _SCHEDULE = "state.json", "sha256.json", "schedule.pt"


@dataclass
class Position:
    """Where training stands; with the weights and the random states it decides everything that follows."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    samples: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stopping_loss: float | None = None
    epochs_without_improvement: int = 0
    epoch_loss_sum: float = 0.0
    epoch_batches: int = 0
    validation: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The ``checkpoints/`` folder of a run: ``last/`` (everything to go on) and ``best.safetensors``."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "checkpoints"
        self._last = self._folder / "last"
        self._best = self._folder / "best.safetensors"

    def save(self, accelerator: Accelerator, rate: LearningRate, position: Position) -> None:
        """Replace ``last/``; the previous one stays until the new one is complete."""
        with replacing_folder(self._last) as folder:
            accelerator.save_state(str(folder), safe_serialization=True)
            torch.save(rate.state_dict(), folder / _SCHEDULE)
            write_json(folder / _STATE, asdict(position))
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            sums: dict[str, object] = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
            write_json(folder / _SUMS, sums)

    def restore(self, accelerator: Accelerator, rate: LearningRate) -> Position:
        """Load ``last/`` into the prepared model, optimizer, schedule and random generators.

        Raises:
            ArtifactError: there is no checkpoint, or one of its files was changed.
        """
        if not (self._last / _SUMS).is_file():
            raise ArtifactError(f"{self._last}: no checkpoint to resume from; train again without --resume")
        sums: dict[str, str] = json.loads((self._last / _SUMS).read_text(encoding="utf-8"))
        for name, expected in sums.items():
            path = self._last / name
            if not path.is_file() or sha256_of(path) != expected:
                raise ArtifactError(f"{path}: damaged (its sha256 changed); train again without --resume")
        accelerator.load_state(str(self._last))
        rate.load_state_dict(load_without_code(self._last / _SCHEDULE))
        return Position(**json.loads((self._last / _STATE).read_text(encoding="utf-8")))

    def save_best(self, model: nn.Module) -> None:
        """Keep these weights as the best so far."""
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        with replacing(self._best) as temporary:
            save_file(state, temporary)

    def load_best(self, model: nn.Module) -> None:
        """Put the best weights into ``model``."""
        model.load_state_dict(load_file(self._best))
