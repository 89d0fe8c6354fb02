"""Some steps of a training, timed in a process of their own, without torch in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import Place
from edgeformer.system.memory import kept
from edgeformer.training.checkpoint import Position
from edgeformer.training.distributed import connect
from edgeformer.training.objective import Objective
from edgeformer.training.step import Stepper
from edgeformer.training.teacher import without_teacher

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
    command = [sys.executable, "-m", "edgeformer.training.timing"]
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


# How long a training will take: a few of its real steps, timed in a process of their own.
#
# ``python -m edgeformer.training.timing RECIPE CACHE SECONDS auto|cpu`` prints one JSON object, and leaves
# nothing
# behind.


WARM_UP, LEAST_STEPS, MOST_STEPS = 3, 8, 200
_FORWARD_OF_A_STEP = 1 / 3
"""Of a step's products a third are the forward pass's; a teacher computes one more of them."""


def probe(recipe: Recipe, cache: Path, seconds: float, began: float, *, cpu: bool = False) -> TrainingTime:
    """Train some steps of ``recipe``, drawn from all over an epoch, and score its smallest set.

    A step counts by the tokens of its batch, padding included: batches of similar length differ by as much.

    Args:
        cache: where encoded data is kept between runs.
        seconds: stop after so long; eight steps are taken all the same.
        began: ``time.monotonic()`` when the process did.
        cpu: whatever card there is.

    Raises:
        InputError: recipe, data or tokenizer cannot be used.
    """
    taught = getattr(recipe.training, "teacher", None) is not None
    recipe = model_spec_of(recipe).adapter.pinned(without_teacher(recipe) if taught else recipe)
    # Compiling takes as long as all that is timed here, and is done once in a training.
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"compile": None})})
    processes = connect(recipe, "cpu" if cpu else "auto", sharded=False)
    objective = Objective(recipe, cache, Place(processes.device.type, processes.precision), SILENT)
    epochs, plan = recipe.training.epochs, objective.steps(0)
    stepper = Stepper(objective, processes, len(plan) * epochs)
    starting_s = time.monotonic() - began
    order = np.random.default_rng(recipe.seed).permutation(len(plan))
    sizes = np.array([_padded(objective, plan[int(step)]) for step in order], dtype=np.float64)
    position, timed, spent = Position(batch_size=recipe.training.batch_size), 0, 0.0
    stepper.model.train()
    for number, step in enumerate(np.resize(order, WARM_UP + MOST_STEPS)):
        if number == WARM_UP:
            timed, spent = 0, 0.0
        if number >= WARM_UP + LEAST_STEPS and spent > seconds:
            break
        mark = time.perf_counter()
        stepper.take(plan[int(step)], position, lambda size: None)
        timed, spent = timed + 1, spent + time.perf_counter() - mark
    measured = np.resize(sizes, WARM_UP + timed)[WARM_UP:].sum()
    training_s = spent / measured * sizes.sum() * epochs * (1 + _FORWARD_OF_A_STEP * taught)
    scoring_s = _scoring(objective, epochs)
    return TrainingTime(training_s, scoring_s, starting_s, len(plan) * epochs, timed)


def _padded(objective: Objective, rows: NDArray[np.int64]) -> float:
    lengths = objective.prepared.train.sizes(rows)
    return float(len(lengths) * lengths.max(initial=1))


def _scoring(objective: Objective, epochs: int) -> float:
    """Seconds for validation after each epoch and all test sets, by the smallest set's seconds per token."""
    prepared = objective.prepared
    sets = {"validation": prepared.validation, **prepared.tests}
    tokens = {name: float(rows.lengths.sum()) for name, rows in sets.items()}
    smallest = min(tokens, key=lambda name: tokens[name])
    mark = time.perf_counter()
    objective.evaluate(objective.model, smallest)
    rate = (time.perf_counter() - mark) / max(1.0, tokens[smallest])
    return rate * (tokens["validation"] * (epochs - 1) + sum(tokens.values()))


def main() -> None:
    """Probe the recipe of the command line."""
    began = time.monotonic()
    path, cache, seconds, accelerator = sys.argv[1:5]
    try:
        recipe = load_recipe(path)
        with kept(recipe.training.batch_size * recipe.data.tokens_at_once):
            found = probe(recipe, Path(cache), float(seconds), began, cpu=accelerator == "cpu")
    except EdgeformerError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(error.exit_code)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
