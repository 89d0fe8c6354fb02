"""The training loop: epochs of optimizer steps, validation, best weights, early stopping, resumable state; its log."""

from __future__ import annotations

import copy
import math
import threading
import time
from dataclasses import asdict

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn

from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.progress import Progress, bar
from edgeformer.stages.training import health
from edgeformer.stages.training.checkpoints import Checkpoints, Position
from edgeformer.stages.training.memory import is_out_of_memory
from edgeformer.stages.training.metrics_log import Meter, MetricsLog
from edgeformer.stages.training.objective import Objective
from edgeformer.stages.training.optimization import LearningRate, build_optimizer


class TrainingLoop:
    """One run's loop. ``run()`` may be called once; everything it needs to go on later is in the checkpoint.

    ``checkpoints`` must be set before :meth:`run` and :meth:`resume`: a run gets its folder once all else is in place.

    An optimizer step is planned as a whole and computed ``batch_size`` rows at a time. When memory runs out, the step
    is repeated with half as many at a time: the same rows, the same gradient.
    """

    checkpoints: Checkpoints

    def __init__(self, objective: Objective, accelerator: Accelerator) -> None:
        recipe, model = objective.recipe, objective.model
        self._recipe, self._config, self._objective = recipe, recipe.training, objective
        self._accelerator = accelerator
        self._rows = len(objective.prepared.train)
        self._steps = -(-self._rows // self._config.effective_batch)  # of an epoch
        self.total_steps = self._steps * self._config.epochs
        optimizer = build_optimizer(model, self._config.optimizer)
        # Before Accelerate keeps the optimizer's step method, which a schedule marks as its own.
        self._rate = LearningRate(optimizer, self._config.schedule, self.total_steps)
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self.position = Position(batch_size=self._config.batch_size)
        self._window = self._meter()  # steps since the last log line
        self._saved_at = time.monotonic()
        self.device: torch.device = accelerator.device

    @property
    def plain_model(self) -> nn.Module:
        """The model without Accelerate's wrapper, on the same weights: it computes in float32."""
        # Accelerate replaces the module's own forward to compute under autocast, and its unwrap_model undoes that for
        # good, training included. A shallow copy without the replacement shares every weight and leaves training alone.
        wrapped: nn.Module = self._accelerator.unwrap_model(self._model)
        plain = copy.copy(wrapped)
        plain.__dict__.pop("forward", None)
        return plain

    def resume(self, progress: Progress) -> None:
        """Go on from the last checkpoint that is not damaged; from the beginning, if there is none yet.

        Raises:
            ArtifactError: all checkpoints are damaged, or do not fit.
        """
        position = self.checkpoints.restore(self._accelerator, self._rate, progress.message)
        if position is not None:
            self.position, self._window = position, Meter(**position.window)

    def run(self, stop: threading.Event, log: MetricsLog, progress: Progress, max_steps: int | None = None) -> bool:
        """Train until the recipe's epochs, early stopping, ``max_steps``, or a stop request, which makes it False."""
        limit, self._saved_at = min(self.total_steps, max_steps or self.total_steps), time.monotonic()
        while self.position.epoch < self._config.epochs and self.position.step < limit and not self._stagnates():
            complete = self._epoch(stop, log, progress, limit)
            if stop.is_set():
                self._save()
                return False
            better = self._validate(log, progress, complete=complete)
            if complete:
                self.position.epoch += 1
                self.position.batch, self.position.epoch_loss_sum, self.position.epoch_weight = 0, 0.0, 0
            self._save(best=better)
            if not complete:
                break
        if self._stagnates():
            progress.message("stopping early: validation loss no longer improves")
        return True

    def _save(self, *, best: bool = False) -> None:
        if not health.weights_are_finite(self._model):  # the last step spoiled them
            raise EdgeformerError(health.divergence(self._model, self.position.step, "the weights are not finite"))
        self.position.window = asdict(self._window)
        self.checkpoints.save(self._accelerator, self._rate, self.position, self.plain_model if best else None)
        self._saved_at = time.monotonic()

    def _epoch(self, stop: threading.Event, log: MetricsLog, progress: Progress, limit: int) -> bool:
        """Steps of one epoch, from ``position.batch`` on; True when the epoch is complete."""
        position = self.position
        self._model.train()
        if not position.batch:
            self._window = self._meter()
        with bar(progress, f"Epoch {position.epoch + 1}/{self._config.epochs}", self._rows, "samples"):
            progress.advance(position.batch * self._config.effective_batch)
            mark = time.perf_counter()
            for rows in self._objective.steps(position.epoch)[position.batch :]:
                rate = self._rate.current
                step = self._step(rows, log, progress)
                mark, step.seconds_sum = time.perf_counter(), time.perf_counter() - mark
                self._window.add(step)
                position.batch += 1
                position.step += 1
                position.samples += step.rows_sum
                position.seconds += step.seconds_sum
                position.training_seconds += step.seconds_sum
                position.epoch_loss_sum += step.loss_sum
                position.epoch_weight += step.weight_sum
                progress.advance(step.rows_sum, loss=self._window.loss, **self._window.speed(), lr=rate)
                if position.step % self._config.log_every == 0:
                    log.record("step", position.step, self._passes(), {**self._window.averages(), "lr": rate})
                    self._window = self._meter()
                self._watch(step, log, progress)
                if stop.is_set() or position.step >= limit:
                    break
                if time.monotonic() - self._saved_at >= 60 * self._config.checkpoint_minutes:
                    self._save()
                    mark, position.seconds = time.perf_counter(), position.seconds + time.perf_counter() - mark
        return position.batch == self._steps

    def _watch(self, step: Meter, log: MetricsLog, progress: Progress) -> None:
        """Report a step that was skipped, or whose loss leapt; so many skipped ones in a row end training."""
        position = self.position
        if step.skipped:
            position.skipped += 1
            position.skipped_in_a_row += 1
            log.record("skipped", position.step, self._passes(), {"skipped_steps": float(position.skipped)})
            progress.message(
                f"step {position.step} skipped: fp16 cannot hold its gradient ({position.skipped} skipped so far); "
                "the scaling factor is halved"
            )
            if position.skipped_in_a_row >= health.SKIPPED_IN_A_ROW:
                raise EdgeformerError(
                    f"{position.skipped_in_a_row} steps in a row were skipped up to step {position.step}: no scaling "
                    "makes the gradient finite; the best weights and the last checkpoint are kept; use "
                    "training.precision: bf16 or fp32"
                )
            return
        position.skipped_in_a_row = 0
        if health.is_spike(step.loss, position.losses):
            usual = math.fsum(position.losses) / len(position.losses)
            log.record("spike", position.step, self._passes(), {"loss": step.loss, "usual_loss": usual})
            progress.message(f"loss spike at step {position.step}: {step.loss:.4g}, usual is {usual:.4g}")
        position.losses = [*position.losses, step.loss][-health.HISTORY :]

    def _meter(self) -> Meter:
        return Meter(per_token=self._objective.task.unit == "tokens")

    def _passes(self) -> float:
        return self.position.epoch + self.position.batch / self._steps

    def _step(self, rows: NDArray[np.int64], log: MetricsLog, progress: Progress) -> Meter:
        """One optimizer step on ``rows``; again with half as many rows at a time while memory runs out."""
        # The repetition must draw the same numbers.
        cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        while True:
            try:
                return self._attempt(rows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the handler, where nothing refers to the failed attempt's tensors any more.
            self._halve(log, progress)
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
                torch.cuda.empty_cache()

    def _halve(self, log: MetricsLog, progress: Progress) -> None:
        position, effective = self.position, self._config.effective_batch
        self._optimizer.zero_grad()
        size = min(position.batch_size, effective)
        if size == 1:
            raise EdgeformerError(
                f"out of memory at step {position.step + 1} with a single row at a time; use "
                f"training.checkpointing: loop, a shorter data.{self._recipe.data.length_key}, or see edgeformer plan"
            )
        position.batch_size = size // 2
        pieces = -(-effective // position.batch_size)
        progress.message(
            f"out of memory at step {position.step + 1}: going on with {position.batch_size} rows at a time instead of "
            f"{size} ({pieces} pieces per step; the effective batch stays {effective}), same step again"
        )
        log.record("out-of-memory", position.step + 1, self._passes(), {"batch_size": float(position.batch_size)})

    def _attempt(self, rows: NDArray[np.int64]) -> Meter:
        size = self.position.batch_size
        batches = [self._objective.batch(rows[at : at + size], self.device) for at in range(0, len(rows), size)]
        step = self._meter()
        step.rows_sum, step.weight_sum = len(rows), sum(counted for _, counted in batches)
        for batch, _ in batches:
            with self._accelerator.autocast():
                losses = self._objective.losses(self._model, batch)
            self._accelerator.backward(losses.total / max(1, step.weight_sum))
            step.loss_sum += float(losses.total.detach())
            for name, value in losses.parts.items():
                step.part_sums[name] = step.part_sums.get(name, 0.0) + float(value.detach())
        scaler, norm = self._accelerator.scaler, 0.0
        if self._config.clip_norm is not None:
            norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), self._config.clip_norm))
        elif scaler is None:
            norm = health.gradient_norm(self._model)
        finite = math.isfinite(step.loss_sum) and math.isfinite(norm)
        if scaler is None and not finite:
            raise self._diverged(step)
        scale = scaler.get_scale() if scaler is not None else 0.0
        self._optimizer.step()
        # A fused optimizer skips the step by itself, which Accelerate does not notice; the scaler lowers its factor.
        if scaler is not None and scaler.get_scale() < scale:
            step = self._meter()
            step.rows_sum, step.skipped = len(rows), 1
        elif not finite:
            raise self._diverged(step)
        else:
            self._rate.after_step()
        self._optimizer.zero_grad()
        return step

    def _diverged(self, step: Meter) -> EdgeformerError:
        found = "the gradient is not finite" if math.isfinite(step.loss_sum) else f"the loss is {step.loss_sum}"
        return EdgeformerError(health.divergence(self._model, self.position.step + 1, found))

    def _validate(self, log: MetricsLog, progress: Progress, *, complete: bool) -> bool:
        """Score the weights as they are; True where they are the best so far, which the next checkpoint keeps.

        Args:
            complete: an epoch has ended; where --max-steps stops in the middle of one, schedule, early stopping and
                the best epoch's number do not count it.
        """
        position, objective = self.position, self._objective
        started = time.perf_counter()
        result = objective.evaluate(self.plain_model, "validation", self.device)
        position.seconds += time.perf_counter() - started
        if complete:
            self._rate.after_epoch(result.loss)
        train_loss = position.epoch_loss_sum / max(1, position.epoch_weight)
        log.record("epoch", position.step, self._passes(), {"train_loss": train_loss, **objective.task.record(result)})
        value = objective.task.criterion(result, self._config)
        better = math.isfinite(value) and (position.best_value is None or value < position.best_value)
        if better:
            position.best_epoch, position.best_value = position.epoch + 1 if complete else None, value
            position.validation = result.model_dump()
        where = f"epoch {position.epoch + 1}" if complete else f"step {position.step}"
        described = objective.task.describe(result)
        progress.message(f"{where}: train loss {train_loss:.4f}, {described}{' (best so far)' if better else ''}")
        stopping = self._config.early_stopping
        if complete and stopping is not None:
            if position.stopping_loss is None or result.loss < position.stopping_loss - stopping.min_delta:
                position.stopping_loss, position.epochs_without_improvement = result.loss, 0
            else:
                position.epochs_without_improvement += 1
        return better

    def _stagnates(self) -> bool:
        stopping = self._config.early_stopping
        return stopping is not None and self.position.epochs_without_improvement >= stopping.patience
