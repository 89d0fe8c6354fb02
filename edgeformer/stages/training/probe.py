"""How long a training will take: a few of its real steps, timed in a process of their own.

``python -m edgeformer.stages.training.probe RECIPE CACHE SECONDS auto|cpu`` prints one JSON object, and leaves nothing
behind.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeformer.families import family_of, load_recipe
from edgeformer.families.network import Place
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.progress import SILENT
from edgeformer.formats.recipe import Recipe
from edgeformer.machine.heap import kept
from edgeformer.stages.training.checkpoints import Position
from edgeformer.stages.training.connection import connect
from edgeformer.stages.training.objective import Objective
from edgeformer.stages.training.stepper import Stepper
from edgeformer.stages.training.teacher import without_teacher
from edgeformer.stages.training.timing import TrainingTime

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
    recipe = family_of(recipe).network.pinned(without_teacher(recipe) if taught else recipe)
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
