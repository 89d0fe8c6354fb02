"""Training without steps: a model that is fitted to all rows at once."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from torch import nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.training.loop.checkpoint import WEIGHTS, Position
from edgeformer.training.loop.distributed import Processes
from edgeformer.training.loop.loop import MetricsLog, Training
from edgeformer.training.loop.objective import Objective


class Fit(Training):
    """A fit by one process on the CPU. It starts anew when resumed."""

    def __init__(self, objective: Objective, processes: Processes) -> None:
        if processes.count > 1:
            raise InputError(f"{objective.recipe.name}: is fitted by one process; start it without a launcher")
        training: Any = objective.recipe.training
        super().__init__(objective, processes, training.max_iterations, Position())

    @property
    def plain_model(self) -> nn.Module:
        return self.objective.model

    def resume(self, progress: Progress) -> None:
        progress.message("a fit has no checkpoints: it begins again")

    def run(
        self, stop: threading.Event, log: MetricsLog | None, progress: Progress, max_steps: int | None = None,
        max_s: float = math.inf,
    ) -> bool:  # fmt: skip
        """Fit the model, and score it on the validation set; return False after a ``stop``, with nothing kept."""
        objective, position = self.objective, self.position
        adapter: Any = objective.model_spec.adapter
        iterations = min(self.total_steps, max_steps or self.total_steps)
        started = time.perf_counter()

        def advance(loss: float) -> bool:
            position.step += 1
            progress.advance(1, loss=loss)
            if log is not None:
                log.record("step", position.step, 0.0, {"loss": loss})
            return not stop.is_set()

        with bar(progress, "Fitting", iterations, "iterations"):
            chosen = adapter.fit(objective.model, objective.recipe, objective.prepared, iterations, advance)
        if stop.is_set():
            return False
        training = objective.recipe.training.model_copy(update=chosen)
        objective.recipe = recipe = objective.recipe.model_copy(update={"training": training})
        self.chosen = chosen
        values = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
        position.seconds = position.training_seconds = time.perf_counter() - started
        position.samples = position.step * len(objective.prepared.train)
        with bar(progress, "Scoring validation", len(objective.prepared.validation), "rows"):
            score = objective.evaluate(objective.model, "validation", progress=progress)
        position.epoch = position.best_epoch = 1
        position.best_value = objective.task.criterion(score, recipe.training)
        position.validation = score.model_dump()
        if log is not None:
            log.record("epoch", position.step, 1.0, objective.task.record(score))
        progress.message(f"{position.step} iterations, {values}: {objective.task.describe(score)}")
        self.checkpoints.save({WEIGHTS: objective.model.state_dict()}, None, position, best=True)
        return True
