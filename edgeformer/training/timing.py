"""Timed steps of a training in a child process, so that this process does not import torch.

``python -m edgeformer.training.timing RECIPE CACHE SECONDS auto|cpu`` prints one JSON object, and writes encoded data
into CACHE.
"""

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

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.system.memory import keep_heap

TIMED_S = 6.0
"""Seconds of training that are timed."""
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS = 3, 8, 200
_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the products of a step; a teacher adds one forward pass."""


@dataclass(frozen=True)
class TrainingTime:
    """Estimated time of a training.

    Attributes:
        training_s: all steps of all epochs.
        scoring_s: validation after each epoch, and every test set once.
        starting_s: imports, reading data, building the model.
        steps, timed_steps: of the training, and how many were timed.
    """

    training_s: float
    scoring_s: float
    starting_s: float
    steps: int
    timed_steps: int

    @property
    def total_s(self) -> float:
        """Seconds of the command ``train``."""
        return self.starting_s + self.training_s + self.scoring_s


def time_steps(
    recipe: Recipe,
    cache: Path,
    environment: Mapping[str, str] = os.environ,
    accelerator: Literal["auto", "cpu"] = "auto",
) -> TrainingTime:
    """Time some steps of ``recipe`` in a child process.

    Args:
        cache: folder of encoded data.
        environment: variables of the child.
        accelerator: as for `train`.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or the child died; with its message.
    """
    # A temporary folder, because another command may time the same recipe at the same time.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        write_text(path, recipe.to_yaml())
        arguments = [str(path), str(cache.absolute()), str(TIMED_S), accelerator]
        child = subprocess.run(
            [sys.executable, "-m", "edgeformer.training.timing", *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={"OMP_PROC_BIND": "true", **environment},
        )  # fmt: skip
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = child.stderr.strip().splitlines() or ["no answer"]
        raise InputError(f"{recipe.name}: its steps cannot be timed: {lines[-1]}") from None
    if "error" in answer:
        raise InputError(str(answer["error"]))
    return TrainingTime(**answer)


def probe(recipe: Recipe, cache: Path, seconds: float, started: float, *, use_cpu: bool = False) -> TrainingTime:
    """Time steps of ``recipe``, drawn from all over an epoch, and the scoring of its smallest set.

    A step counts by the tokens of its batch, padding included: batches of similar length differ in size.

    Args:
        cache: folder of encoded data.
        seconds: limit of the timed steps; eight steps are always taken.
        started: ``time.monotonic()`` at the start of the process.
        use_cpu: even if there is a card.

    Raises:
        InputError: recipe, data or tokenizer cannot be used.
    """
    # Only the child process imports torch.
    from edgeformer.models import model_spec_of
    from edgeformer.models.adapter import BuildTarget
    from edgeformer.training.distributed import connect
    from edgeformer.training.objective import Objective, without_teacher
    from edgeformer.training.step import Stepper

    has_teacher = getattr(recipe.training, "teacher", None) is not None
    recipe = model_spec_of(recipe).adapter.pinned(without_teacher(recipe) if has_teacher else recipe)
    # A training compiles once, which takes as long as all timed steps.
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"compile": None})})
    processes = connect(recipe, "cpu" if use_cpu else "auto", sharded=False)
    objective = Objective(recipe, cache, BuildTarget(processes.device.type, processes.precision), SILENT)
    epochs, plan, prepared = recipe.training.epochs, objective.steps(0), objective.prepared
    stepper = Stepper(objective, processes, len(plan) * epochs)
    starting_s = time.monotonic() - started
    order = np.random.default_rng(recipe.seed).permutation(len(plan))
    lengths = [prepared.train.sizes(plan[int(step)]) for step in order]
    tokens = np.array([float(len(rows) * rows.max(initial=1)) for rows in lengths], dtype=np.float64)
    position, steps, steps_s = stepper.initial_position(), 0, 0.0
    stepper.model.train()
    for number, step in enumerate(np.resize(order, WARM_UP_STEPS + MAX_STEPS)):
        if number == WARM_UP_STEPS:
            steps, steps_s = 0, 0.0
        if number >= WARM_UP_STEPS + MIN_STEPS and steps_s > seconds:
            break
        mark = time.perf_counter()
        stepper.take(plan[int(step)], position, lambda size: None)
        steps, steps_s = steps + 1, steps_s + time.perf_counter() - mark
    timed_tokens = np.resize(tokens, WARM_UP_STEPS + steps)[WARM_UP_STEPS:].sum()
    training_s = steps_s / timed_tokens * tokens.sum() * epochs * (1 + _FORWARD_SHARE * has_teacher)
    sets = {"validation": prepared.validation, **prepared.tests}
    set_tokens = {name: float(rows.lengths.sum()) for name, rows in sets.items()}
    smallest = min(set_tokens, key=lambda name: set_tokens[name])
    mark = time.perf_counter()
    objective.evaluate(objective.model, smallest)
    token_s = (time.perf_counter() - mark) / max(1.0, set_tokens[smallest])
    scoring_s = token_s * (set_tokens["validation"] * (epochs - 1) + sum(set_tokens.values()))
    return TrainingTime(training_s, scoring_s, starting_s, len(plan) * epochs, steps)


def main() -> None:
    """Time the recipe of the command line and print the result as JSON."""
    started = time.monotonic()
    path, cache, seconds, accelerator = sys.argv[1:5]
    try:
        recipe = load_recipe(path)
        with keep_heap(recipe.training.batch_size * recipe.data.tokens_at_once):
            result = probe(recipe, Path(cache), float(seconds), started, use_cpu=accelerator == "cpu")
    except EdgeformerError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(error.exit_code)
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
