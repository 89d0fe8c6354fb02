"""Some steps of a training, timed in a process of their own, without torch in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from edgeformer.formats.errors import InputError
from edgeformer.formats.files import write_text
from edgeformer.formats.recipe import Recipe

PROBE_S = 6.0
"""Seconds of training that are timed."""


@dataclass(frozen=True)
class TrainingTime:
    """What was timed, and what it means for the whole training."""

    training_s: float
    """All steps of all epochs."""
    scoring_s: float
    """Validation after each epoch, and every test set once."""
    starting_s: float
    """Imports, reading data, building the model."""
    steps: int
    timed_steps: int

    @property
    def total_s(self) -> float:
        """The whole command."""
        return self.starting_s + self.training_s + self.scoring_s


def timed(
    recipe: Recipe,
    cache: Path,
    environment: Mapping[str, str] = os.environ,
    accelerator: Literal["auto", "cpu"] = "auto",
) -> TrainingTime:
    """Time some steps in a process of their own.

    Args:
        cache: where encoded data is kept between runs.
        accelerator: as `train` takes it.
        environment: of that process.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or the process died; with what it said.
    """
    command = [sys.executable, "-m", "edgeformer.stages.training.probe"]
    # A folder of its own: another command may time the same recipe at this moment.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        write_text(path, recipe.to_yaml())
        ended = subprocess.run(
            [*command, str(path), str(cache.absolute()), str(PROBE_S), accelerator],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={"OMP_PROC_BIND": "true", **environment},
        )  # fmt: skip
    try:
        found = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = ended.stderr.strip().splitlines()
        raise InputError(f"{recipe.name}: its steps cannot be timed: {said[-1] if said else 'no answer'}") from None
    if "error" in found:
        raise InputError(str(found["error"]))
    return TrainingTime(**found)
