"""The training loop: epochs of optimizer steps, validation, best weights, early stopping, resumable state."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn

from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.progress import Progress
from edgeformer.stages.training.checkpoints import Checkpoints, Position
from edgeformer.stages.training.interrupt import StopRequest
from edgeformer.stages.training.memory_here import RandomState, is_out_of_memory
from edgeformer.stages.training.metrics import Meter, MetricsLog, StepResult
from edgeformer.stages.training.objective import Objective, PlannedBatches, training_loader
from edgeformer.stages.training.optimization import LearningRate, build_optimizer


@dataclass
class Outcome:
    """How the loop ended."""

    position: Position
    interrupted: bool


class TrainingLoop:
    """One run's loop. ``run()`` may be called once; everything it needs to go on later is in the checkpoint.

    An optimizer step is planned as a whole (``batch_size`` × ``accumulation`` rows) and computed ``batch_size`` rows at
    a time. When memory runs out, the step is repeated with half as many at a time: the same rows, the same gradient.
    """

    def __init__(self, objective: Objective, accelerator: Accelerator) -> None:
        recipe, model = objective.recipe, objective.model
        self._recipe, self._config, self._objective = recipe, recipe.training, objective
        self._accelerator = accelerator
        lengths, rows = objective.lengths, recipe.training.batch_size * recipe.training.accumulation
        self._sampler = PlannedBatches(lengths, rows, recipe.seed, bucketed=recipe.training.batching == "bucketed")
        loader = training_loader(len(lengths), self._sampler)
        optimizer = build_optimizer(model, self._config.optimizer)
        self._model, self._optimizer, self._loader = accelerator.prepare(model, optimizer, loader)
        self.total_steps = len(self._sampler) * self._config.epochs
        self._rate = LearningRate(optimizer, self._config.schedule, self.total_steps)
        self.position = Position(batch_size=self._config.batch_size)
        self._window = self._meter()  # steps since the last log line
        self.checkpoints: Checkpoints | None = None

    @property
    def _kept(self) -> Checkpoints:
        assert self.checkpoints is not None, "set checkpoints before run() or resume()"
        return self.checkpoints

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def plain_model(self) -> nn.Module:
        """The model without Accelerate's wrapper, on the same weights: it computes in float32."""
        # Accelerate replaces the module's own forward to compute under autocast, and its unwrap_model undoes that for
        # good, training included. A shallow copy without the replacement shares every weight and leaves training alone.
        wrapped: nn.Module = self._accelerator.unwrap_model(self._model)
        plain = copy.copy(wrapped)
        plain.__dict__.pop("forward", None)
        return plain

    def resume(self) -> Position:
        """Go on from the last checkpoint. Raises ArtifactError."""
        self.position = self._kept.restore(self._accelerator, self._rate)
        self._window = Meter(**self.position.window)
        return self.position

    def run(self, stop: StopRequest, log: MetricsLog, progress: Progress, max_steps: int | None = None) -> Outcome:
        """Train until the recipe's epochs, early stopping, ``max_steps``, or a stop request."""
        limit = min(self.total_steps, max_steps or self.total_steps)
        while self.position.epoch < self._config.epochs and self.position.step < limit and not self._stagnates():
            complete = self._epoch(stop, log, progress, limit)
            if stop:
                self._save()
                return Outcome(self.position, interrupted=True)
            self._validate(log, progress, complete=complete)
            if complete:
                self.position.epoch += 1
                self.position.batch, self.position.epoch_loss_sum, self.position.epoch_weight = 0, 0.0, 0
            self._save()
            if not complete:
                break
        if self._stagnates():
            progress.message("stopping early: validation loss no longer improves")
        return Outcome(self.position, interrupted=False)

    def _save(self) -> None:
        self.position.window = asdict(self._window)
        self._kept.save(self._accelerator, self._rate, self.position)

    def _epoch(self, stop: StopRequest, log: MetricsLog, progress: Progress, limit: int) -> bool:
        """Steps of one epoch, from ``position.batch`` on; True when the epoch is complete."""
        position, steps = self.position, len(self._sampler)
        self._model.train()
        loader = self._remaining_steps()
        progress.start(f"Epoch {position.epoch + 1}/{self._config.epochs}", len(self._objective.lengths), "samples")
        progress.advance(position.batch * self._sampler.batch_size)
        if not position.batch:
            self._window = self._meter()
        try:
            mark = time.perf_counter()
            for rows in loader:
                rate = self._rate.current
                result = self._step(rows.cpu().numpy(), log, progress)
                mark, seconds = time.perf_counter(), time.perf_counter() - mark  # the loader's time included
                self._window.add(result, seconds)
                self._count(result, seconds)
                progress.advance(result.rows, loss=self._window.loss, **self._window.speed(), lr=rate)
                if position.step % self._config.log_every == 0:
                    log.record("step", position.step, self._passes(), {**self._window.averages(), "lr": rate})
                    self._window = self._meter()
                if stop or position.step >= limit:
                    return position.batch == steps
        finally:
            progress.finish()
        return True

    def _meter(self) -> Meter:
        return Meter(per_token=self._objective.task.unit == "tokens")

    def _passes(self) -> float:
        return self.position.epoch + self.position.batch / len(self._sampler)

    def _count(self, result: StepResult, seconds: float) -> None:
        position = self.position
        position.batch += 1
        position.step += 1
        position.samples += result.rows
        position.seconds += seconds
        position.training_seconds += seconds
        position.epoch_loss_sum += result.loss
        position.epoch_weight += result.weight

    def _remaining_steps(self) -> Any:
        position = self.position
        self._sampler.set_epoch(position.epoch)
        loader = self._loader
        if position.batch:
            loader = self._accelerator.skip_first_batches(loader, position.batch)
        # Accelerate counts its own iterations and would hand that count to the sampler.
        loader.set_epoch(position.epoch)
        return loader

    def _step(self, rows: NDArray[np.int64], log: MetricsLog, progress: Progress) -> StepResult:
        """One optimizer step on ``rows``; again with half as many rows at a time while memory runs out."""
        start = RandomState.now()
        while True:
            try:
                return self._attempt(rows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the handler, where nothing refers to the failed attempt's tensors any more.
            self._halve(log, progress)
            start.restore()

    def _halve(self, log: MetricsLog, progress: Progress) -> None:
        position = self.position
        self._optimizer.zero_grad()
        size = min(position.batch_size, self._sampler.batch_size)
        if size == 1:
            raise EdgeformerError(
                f"out of memory at step {position.step + 1} with a single row at a time; use "
                f"training.checkpointing: loop, a shorter data.{self._recipe.data.length_key}, or see edgeformer plan"
            )
        position.batch_size = size // 2
        pieces = -(-self._sampler.batch_size // position.batch_size)
        progress.message(
            f"out of memory at step {position.step + 1}: going on with {position.batch_size} rows at a time instead of "
            f"{size} ({pieces} pieces per step; the effective batch stays {self._sampler.batch_size}), same step again"
        )
        log.record("out-of-memory", position.step + 1, self._passes(), {"batch_size": float(position.batch_size)})

    def _attempt(self, rows: NDArray[np.int64]) -> StepResult:
        device, size = self._accelerator.device, self.position.batch_size
        batches = [self._objective.batch(rows[at : at + size], device) for at in range(0, len(rows), size)]
        weight = sum(batch.weight for batch in batches)
        total, parts = 0.0, dict[str, float]()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # Several processes exchange gradients once per step, with the last piece.
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._model):
                with self._accelerator.autocast():
                    losses = self._objective.losses(self._model, batch.tensors)
                self._accelerator.backward(losses.total / max(1, weight))
            total += float(losses.total.detach())
            for name, value in losses.parts.items():
                parts[name] = parts.get(name, 0.0) + float(value.detach())
        if not math.isfinite(total):
            raise EdgeformerError(
                f"training diverged after step {self.position.step}: the loss is {total}; "
                "lower training.optimizer.lr or training.clip_norm"
            )
        self._update()
        return StepResult(total, parts, weight, len(rows))

    def _update(self) -> None:
        if self._config.clip_norm is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)
        self._optimizer.step()
        if not self._accelerator.optimizer_step_was_skipped:
            self._rate.after_step()
        self._optimizer.zero_grad()

    def _validate(self, log: MetricsLog, progress: Progress, *, complete: bool) -> None:
        """Score the weights as they are, and keep them if they are the best so far.

        Args:
            complete: an epoch has ended; where --max-steps stops in the middle of one, schedule, early stopping and
                the best epoch's number do not count it.
        """
        position, objective = self.position, self._objective
        started = time.perf_counter()
        result = objective.evaluate(self.plain_model, "validation", self._accelerator.device)
        position.seconds += time.perf_counter() - started
        if complete:
            self._rate.after_epoch(result.loss)
        train_loss = position.epoch_loss_sum / max(1, position.epoch_weight)
        log.record("epoch", position.step, self._passes(), {"train_loss": train_loss, **objective.task.record(result)})
        value = objective.criterion(result)
        better = position.best_value is None or value < position.best_value
        if better:
            position.best_epoch, position.best_value = position.epoch + 1 if complete else None, value
            position.validation = result.model_dump()
            self._kept.save_best(self.plain_model)
        where = f"epoch {position.epoch + 1}" if complete else f"step {position.step}"
        described = objective.task.describe(result)
        progress.message(f"{where}: train loss {train_loss:.4f}, {described}{' (best so far)' if better else ''}")
        if complete:
            self._count_stagnation(result.loss)

    def _count_stagnation(self, loss: float) -> None:
        stopping, position = self._config.early_stopping, self.position
        if stopping is None:
            return
        if position.stopping_loss is None or loss < position.stopping_loss - stopping.min_delta:
            position.stopping_loss, position.epochs_without_improvement = loss, 0
        else:
            position.epochs_without_improvement += 1

    def _stagnates(self) -> bool:
        stopping = self._config.early_stopping
        return stopping is not None and self.position.epochs_without_improvement >= stopping.patience
