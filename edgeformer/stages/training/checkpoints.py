"""Resumable training state: written atomically, checksummed, never unpickled with code execution allowed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load as load_without_code

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import replacing_folder, sha256_of, write_json
from edgeformer.stages.training.optimization import LearningRate

_STATE, _SUMS, _SCHEDULE, _BEST = "state.json", "sha256.json", "schedule.pt", "best.safetensors"


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


class Checkpoints:
    """The ``checkpoints/`` folder of a run: ``last/`` (everything to go on) and ``best.safetensors``."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "checkpoints"
        self._last, self.best = self._folder / "last", self._folder / _BEST

    def save(self, accelerator: Accelerator, rate: LearningRate, position: Position) -> None:
        """Replace ``last/``; the previous one stays until the new one is complete."""
        with replacing_folder(self._last) as folder:
            accelerator.save_state(str(folder), safe_serialization=True)
            torch.save(rate.state_dict(), folder / _SCHEDULE)
            write_json(folder / _STATE, asdict(position))
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            sums: dict[str, object] = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
            if self.best.is_file():
                sums[_BEST] = sha256_of(self.best)
            write_json(folder / _SUMS, sums)

    def restore(self, accelerator: Accelerator, rate: LearningRate) -> Position:
        """Load ``last/`` into what was prepared. Raises ArtifactError where it is missing, or a file was changed."""
        # A process that was killed between the two renames of a replacement leaves the previous state beside it.
        aside = sorted(self._folder.glob(f".{self._last.name}.*.old/{self._last.name}"))
        folder = next((folder for folder in (self._last, *aside) if (folder / _SUMS).is_file()), None)
        if folder is None:
            raise ArtifactError(f"{self._last}: no checkpoint to resume from; train again without --resume")
        try:
            sums: dict[str, str] = dict(json.loads((folder / _SUMS).read_text(encoding="utf-8")))
        except ValueError:
            raise ArtifactError(f"{folder / _SUMS}: damaged (not JSON); train again without --resume") from None
        for name, expected in sums.items():
            path = self.best if name == _BEST else folder / name
            if not path.is_file() or sha256_of(path) != expected:
                raise ArtifactError(f"{path}: damaged (its sha256 changed); train again without --resume")
        accelerator.load_state(str(folder))
        rate.load_state_dict(load_without_code(folder / _SCHEDULE))
        return Position(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
