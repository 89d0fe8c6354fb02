"""Training without steps: a model that is fitted to all rows at once, its memory, and its time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import MemoryUse
from edgeformer.artifacts.plan import Plan, PlannedTime
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import FitSize
from edgeformer.system.memory import host_free_bytes
from edgeformer.training.checkpoint import WEIGHTS, Checkpoints, Position
from edgeformer.training.distributed import Processes
from edgeformer.training.duration import TIMED_RANGE, planned_data
from edgeformer.training.loop import MetricsLog
from edgeformer.training.objective import Objective
from edgeformer.training.teacher import without_teacher

_RESERVE_BYTES = 96 << 20
"""Rows, tokenizer, and what SciPy copies: a fit of SST-2 took 194 MiB beyond the libraries, of which 106 predicted."""
_TIMED_ITERATIONS = 10
_EXPECTED_ITERATIONS, _CANDIDATES = 80, 6
"""Iterations of a fit, and fits of ``regularization: auto``: 224 to 608 iterations in all on five sets."""


class Fit:
    """A fit, with the interface of :class:`~edgeformer.training.loop.TrainingLoop`. It starts anew when resumed."""

    checkpoints: Checkpoints
    device = torch.device("cpu")
    unused: tuple[str, ...] = ()
    chosen: dict[str, float] | None = None
    """Values of the keys of section ``training`` after the fit."""

    def __init__(self, objective: Objective, processes: Processes) -> None:
        if processes.count > 1:
            raise InputError(f"{objective.recipe.name}: is fitted by one process; start it without a launcher")
        self.objective, self.processes = objective, processes
        training: Any = objective.recipe.training
        self.total_steps: int = training.max_iterations
        self.position = Position()

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model."""
        return self.objective.model

    def resume(self, progress: Progress) -> None:
        """Say that the fit begins again."""
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
        objective.recipe = recipe = _with_values(objective.recipe, chosen)
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


def _with_values(recipe: Recipe, values: Mapping[str, float]) -> Recipe:
    """Return the recipe with these values in section ``training``."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=dict(values))})


def _predict_seconds(recipe: Recipe, cache: Path) -> float:
    """Predict the seconds of a training without a teacher from its preparation and from some iterations of the fit."""
    started = time.perf_counter()
    has_teacher = getattr(recipe.training, "teacher", None) is not None
    objective = Objective(without_teacher(recipe) if has_teacher else recipe, cache, SILENT)
    prepared, training, adapter = objective.prepared, cast(Any, objective.recipe.training), objective.model_spec.adapter
    prepared_s = time.perf_counter() - started
    started, ends = time.perf_counter(), list[float]()

    def advance(loss: float) -> bool:
        ends.append(time.perf_counter())
        return True

    cast(Any, adapter).fit(objective.model, objective.recipe, prepared, _TIMED_ITERATIONS, advance)
    fitted_s = time.perf_counter() - started
    expected = _EXPECTED_ITERATIONS * (_CANDIDATES if training.regularization == "auto" else 1)
    further = max(0, min(expected, training.max_iterations) - len(ends))
    seconds: float = prepared_s + fitted_s + further * (ends[-1] - ends[0]) / max(1, len(ends) - 1)
    return seconds


def check_fit_memory(objective: Objective, *, ignore_memory: bool) -> MemoryUse:
    """Predict the peak of a fit whose rows were read. Raises InputError if it exceeds free memory, unless ignored."""
    train = objective.prepared.train
    rows = len(train)
    adapter: Any = objective.model_spec.adapter
    size: FitSize = adapter.fit_size(objective.recipe, rows, int(train.sizes(np.arange(rows)).sum()))
    breakdown = size.memory.model_copy(update={"reserve": _RESERVE_BYTES})
    budget, source = host_free_bytes()
    if breakdown.peak_bytes > budget and not ignore_memory:
        raise InputError(
            f"{objective.recipe.name}: the fit would take {format_bytes(breakdown.peak_bytes)} at its peak "
            f"(predicted), and {format_bytes(budget)} are {source}; raise model.minimum_count, take fewer rows "
            "(data.rows), or fit anyway with --ignore-memory"
        )
    return MemoryUse(
        device="cpu",
        predicted_peak_bytes=breakdown.peak_bytes,
        predicted_reserve_bytes=breakdown.reserve,
        budget_bytes=budget,
    )


def plan_fit(recipe: Recipe, device: DeviceProfile, logits_cache: Path, progress: Progress = SILENT) -> Plan:
    """Predict peak memory and time of a fit, on the CPU of any device.

    ``logits_cache``: folder of teachers' logits.
    """
    adapter: Any = model_spec_of(recipe).adapter
    with TemporaryDirectory() as folder:
        data = planned_data(recipe, Path(folder), progress, logits_cache)
        seconds = 0.0
        if data.rows_from == "data":
            with bar(progress, "Timing some iterations", None, ""):
                seconds = _predict_seconds(data.recipe, Path(folder)) + data.teacher_s
    memory = device.usable_memory_bytes or device.memory_bytes
    if device.kind == "cuda" or memory is None:
        budget, source = host_free_bytes()
    else:
        budget, source = memory.value, f"memory of {device.title}: {memory.source}"
    tokens = data.tokens * data.rows
    size: FitSize = adapter.fit_size(data.recipe, data.rows, tokens)
    breakdown = size.memory.model_copy(update={"reserve": _RESERVE_BYTES})
    fits = breakdown.peak_bytes <= budget
    training: Any = recipe.training
    time_ = PlannedTime(
        status="estimated", rows=data.rows, rows_from=data.rows_from, steps=training.max_iterations,
        low_s=TIMED_RANGE[0] * seconds, high_s=TIMED_RANGE[1] * seconds,
        basis=f"{_TIMED_ITERATIONS} iterations, timed on this host; {data.text}{data.teacher_text}",
    )  # fmt: skip
    if data.rows_from != "data":
        reason = data.problem or f"only a fit of some rows tells the time, and the data was not read: {data.text}"
        time_ = PlannedTime(status="unavailable", rows=data.rows, basis=reason)
    left = budget - breakdown.peak_bytes
    return Plan(
        recipe=recipe.name,
        device=device.name,
        parameters=size.parameters,
        precision="fp32",
        status="pass" if fits else "fail",
        fits=fits,
        peak_bytes=breakdown.peak_bytes,
        budget_bytes=budget,
        budget_source=source,
        breakdown=breakdown,
        time=time_,
        reason=f"fits: at the peak at least {format_bytes(left)} of {format_bytes(budget)} are left"
        if fits
        else f"does not fit: up to {format_bytes(-left)} more than the {format_bytes(budget)} there are",
        notes=(
            "the training text decides the number of weights, and this plan takes the most there can be",
            *data.notes,
        ),
    )
