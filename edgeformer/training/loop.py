"""The training loop: epochs of optimizer steps, validation, early stopping, checkpoints, and the remaining time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import asdict

from torch import nn

from edgeformer.artifacts.progress import Progress, bar
from edgeformer.system.memory import keep_heap
from edgeformer.training import metrics
from edgeformer.training.checkpoint import Checkpoints, collect_state, random_states_file
from edgeformer.training.distributed import Processes
from edgeformer.training.metrics import Meter, MetricsLog
from edgeformer.training.objective import Objective
from edgeformer.training.step import Stepper

_AVERAGED_STEPS = 50
"""Batches differ in length, so the time of a step is a mean."""
_FORWARD_SHARE = 1 / 3
"""Time to score a row, as a share of its time in a step; assumed until rows have been scored."""


class RemainingTime:
    """Estimate of the seconds until a training ends, from its steps and its scoring so far.

    Early stopping is not predicted.

    Args:
        epoch_steps: optimizer steps of an epoch.
        last_step: the step after which training ends.
        step_rows: rows of a step.
        validation_rows: rows scored after every epoch, and after the last step.
        test_rows: rows scored at the end.
    """

    def __init__(
        self, epoch_steps: int, last_step: int, *, step_rows: int, validation_rows: int, test_rows: int
    ) -> None:
        self._epoch_steps, self._last_step, self._step_rows = epoch_steps, last_step, step_rows
        self._validation_rows, self._test_rows = validation_rows, test_rows
        self._step_seconds: deque[float] = deque(maxlen=_AVERAGED_STEPS)
        self._scored_rows, self._scoring_s = 0, 0.0

    def add_step(self, seconds: float) -> None:
        """Count a step."""
        self._step_seconds.append(seconds)

    def add_scoring(self, rows: int, seconds: float) -> None:
        """Count scored rows."""
        self._scored_rows += rows
        self._scoring_s += seconds

    def seconds(self, step: int, epoch: int, scored: int = 0) -> float | None:
        """Return the remaining seconds, or None before anything was timed.

        Args:
            step: steps so far.
            epoch: epochs that were trained and validated.
            scored: rows of the current validation that were scored.
        """
        step_s = sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None
        if self._scored_rows:
            row_s = self._scoring_s / self._scored_rows
        elif step_s is not None:
            row_s = step_s / self._step_rows * _FORWARD_SHARE
        else:
            return None
        steps = max(0, self._last_step - step)
        if steps and step_s is None:
            return None
        validations = max(0, -(-self._last_step // self._epoch_steps) - epoch)
        rows = validations * self._validation_rows - scored + self._test_rows
        return steps * (step_s or 0.0) + max(0, rows) * row_s


class TrainingLoop:
    """The loop of one run. Call :meth:`run` once; a checkpoint holds everything that a later process needs to go on.

    Set ``checkpoints`` before :meth:`run` and :meth:`resume`: the run's folder is created last.

    Several processes share the rows of each step, and take it in their own copy or shard of the model.
    """

    checkpoints: Checkpoints

    def __init__(self, objective: Objective, processes: Processes) -> None:
        self._recipe, self._config, self._objective = objective.recipe, objective.recipe.training, objective
        self.processes, self.device = processes, processes.device
        self._rows = len(objective.prepared.train)
        self._epoch_steps = -(-self._rows // self._config.effective_batch)
        self.total_steps = self._epoch_steps * self._config.epochs
        self._stepper = Stepper(objective, processes, self.total_steps)
        self.position = self._stepper.initial_position()
        self._window = objective.new_meter()  # steps since the last line of the log
        self._saved_at, self._saving_s = time.monotonic(), 0.0

    @property
    def unused_options(self) -> tuple[str, ...]:
        """Messages about options for speed that this device does not support."""
        return self._stepper.speed.unused

    @property
    def plain_model(self) -> nn.Module:
        """The model without Accelerate's autocast, on the same weights (or shards): it computes in float32."""
        # Accelerate replaces the module's forward; its unwrap_model could only undo that for training too. A shallow
        # copy without the replacement shares every weight.
        module = self.processes.unwrap(self._stepper.model)
        plain: nn.Module = object.__new__(type(module))  # copy.copy calls the constructor of a sharded module
        plain.__dict__.update(module.__dict__)
        plain.__dict__.pop("forward", None)
        return plain

    def unsharded_model(self) -> nn.Module:
        """Return a model that can load the weights of a checkpoint: the plain one, or a new one if it is sharded."""
        return self._objective.build().to(self.device) if self.processes.sharded else self.plain_model

    def resume(self, progress: Progress) -> None:
        """Load the newest undamaged checkpoint, if there is any. Raises ArtifactError if all are damaged or misfit."""
        checkpoint = self.processes.on_main(lambda: self.checkpoints.find(progress.message))
        if checkpoint is None:
            return
        folder, has_best = checkpoint
        model, optimizer, rate = self._stepper.model, self._stepper.optimizer, self._stepper.rate
        with self.processes.failing_together():
            self.position = self.checkpoints.load(folder, self.processes, model, optimizer, rate, has_best=has_best)
        if not (folder / random_states_file(self.processes.rank)).is_file():  # fewer processes wrote it
            self.processes.seed_other_ranks(self._recipe.seed + self.position.step)
        self._window = Meter(**self.position.window)

    def run(
        self, stop: threading.Event, log: MetricsLog | None, progress: Progress, max_steps: int | None = None
    ) -> bool:
        """Train until the recipe's epochs, early stopping or ``max_steps``.

        Args:
            stop: ends training after the current step.
            log: None in all processes but the main one.

        Returns:
            Whether training ended without ``stop``.
        """
        self._log, self._progress, self._saved_at = log, progress, time.monotonic()
        last_step = min(self.total_steps, max_steps or self.total_steps)
        objective = self._objective
        self._remaining = RemainingTime(
            self._epoch_steps,
            last_step,
            step_rows=self._config.effective_batch,
            validation_rows=objective.count_rows("validation"),
            test_rows=sum(map(objective.count_rows, objective.prepared.tests)),
        )
        with keep_heap(self._config.batch_size * self._recipe.data.tokens_at_once):
            while self.position.epoch < self._config.epochs and not self._stagnates():
                position = self.position
                # A stop request may have ended the last step before its weights were validated.
                is_unscored = position.batch > 0 and position.scored_at != position.step
                if position.step >= last_step and not is_unscored:
                    break
                if not self._train_epoch(stop, last_step):
                    self._save()
                    return False
                is_complete = position.batch == self._epoch_steps
                is_best = self._validate(is_complete=is_complete)
                if is_complete:
                    position.epoch += 1
                    position.batch, position.epoch_loss_sum, position.epoch_weight = 0, 0.0, 0
                self._save(best=is_best)
                if not is_complete:
                    break
        if self._stagnates():
            progress.message("stopping early: validation loss no longer improves")
        return True

    def _train_epoch(self, stop: threading.Event, last_step: int) -> bool:
        """Take the steps of the current epoch from ``position.batch`` on. Returns False after a stop request."""
        position, progress, rows_per_step = self.position, self._progress, self._config.effective_batch
        self._stepper.model.train()
        if not position.batch:
            self._window = self._objective.new_meter()
        rows_before = position.batch * rows_per_step
        end = min(self._rows, rows_before + max(0, last_step - position.step) * rows_per_step)
        with bar(progress, f"Epoch {position.epoch + 1}/{self._config.epochs}", end, "samples"):
            progress.advance(rows_before)
            mark = time.perf_counter()
            steps = self._objective.steps(position.epoch)[position.batch :] if position.step < last_step else ()
            for rows in steps:
                lr = self._stepper.rate.current
                step = self._stepper.take(rows, position, self._report_out_of_memory)
                mark, step.seconds_sum = time.perf_counter(), time.perf_counter() - mark
                self._window.add(step)
                position.batch += 1
                position.step += 1
                position.samples += step.rows_sum
                position.seconds += step.seconds_sum
                position.training_seconds += step.seconds_sum
                position.epoch_loss_sum += step.loss_sum
                position.epoch_weight += step.weight_sum
                self._remaining.add_step(step.seconds_sum)
                figures = {"loss": self._window.loss, **self._window.speed(), "lr": lr, **self._remaining_field()}
                progress.advance(step.rows_sum, **figures)
                if position.step % self._config.log_every == 0:
                    self._record("step", {**self._window.averages(), "lr": lr})
                    self._window = self._objective.new_meter()
                self._check_loss(step)
                is_stopping, is_late = self.processes.any(stop.is_set(), self._is_late(step.seconds_sum))
                if is_stopping:
                    return False
                if position.step >= last_step:
                    break
                if is_late:
                    self._save()
                    mark, position.seconds = time.perf_counter(), position.seconds + time.perf_counter() - mark
        return True

    def _validate(self, *, is_complete: bool) -> bool:
        """Score the current weights. Returns whether they are the best so far, to be kept by the next checkpoint.

        Args:
            is_complete: an epoch has ended. Within an epoch (``max_steps``), the result does not count for schedule,
                early stopping and the number of the best epoch.
        """
        position, objective, progress = self.position, self._objective, self._progress
        started = mark = time.perf_counter()
        scored = 0

        def advance(count: int) -> None:
            nonlocal scored, mark
            previous, mark = mark, time.perf_counter()
            self._remaining.add_scoring(count, mark - previous)
            scored += count
            progress.advance(count, **self._remaining_field(scored))

        with bar(progress, "Scoring validation", objective.count_rows("validation"), "rows"):
            score = objective.evaluate(self.plain_model, "validation", self.processes, advance)
        self.processes.reshard(self._stepper.model)
        position.seconds += time.perf_counter() - started
        position.scored_at = position.step
        if is_complete:
            self._stepper.rate.after_epoch(score.loss)
        train_loss = position.epoch_loss_sum / max(1, position.epoch_weight)
        self._record("epoch", {"train_loss": train_loss, **objective.task.record(score)})
        value = objective.task.criterion(score, self._config)
        is_best = math.isfinite(value) and (position.best_value is None or value < position.best_value)
        if is_best:
            position.best_epoch, position.best_value = position.epoch + 1 if is_complete else None, value
            position.validation = score.model_dump()
        place = f"epoch {position.epoch + 1}" if is_complete else f"step {position.step}"
        description = f"{objective.task.describe(score)}{' (best so far)' if is_best else ''}"
        progress.message(f"{place}: train loss {train_loss:.4f}, {description}")
        stopping = self._config.early_stopping
        if is_complete and stopping is not None:
            if position.stopping_loss is None or score.loss < position.stopping_loss - stopping.min_delta:
                position.stopping_loss, position.epochs_without_improvement = score.loss, 0
            else:
                position.epochs_without_improvement += 1
        return is_best

    def _stagnates(self) -> bool:
        stopping = self._config.early_stopping
        return stopping is not None and self.position.epochs_without_improvement >= stopping.patience

    def _save(self, *, best: bool = False) -> None:
        processes, model, started = self.processes, self._stepper.model, time.monotonic()
        if processes.any(not metrics.weights_are_finite(model))[0]:
            problem = "the weights are not finite"
            raise processes.failure(metrics.describe_divergence(model, self.position.step, problem))
        self.position.window = asdict(self._window)
        state = collect_state(processes, model, self._stepper.optimizer)
        with processes.failing_together():
            if processes.is_main:
                self.checkpoints.save(state, self._stepper.rate, self.position, best=best)
        self._saved_at, self._saving_s = started, time.monotonic() - started

    def _is_late(self, step_s: float) -> bool:
        """Return whether to save now because after one more step a checkpoint would be too late."""
        since, limit = time.monotonic() - self._saved_at, 60 * self._config.checkpoint_minutes
        if self._saving_s + step_s > limit / 2:  # saving takes most of the limit: count from the end of the last save
            return since - self._saving_s >= limit
        return since + step_s + self._saving_s > limit

    def _check_loss(self, step: Meter) -> None:
        """Report a skipped step or a loss spike. Raises EdgeformerError after too many skipped steps in a row."""
        position = self.position
        if step.skipped:
            position.skipped += 1
            position.skipped_in_a_row += 1
            self._record("skipped", {"skipped_steps": float(position.skipped)})
            self._progress.message(
                f"step {position.step} skipped: fp16 cannot hold its gradient ({position.skipped} skipped so far); "
                "the scaling factor is halved"
            )
            if position.skipped_in_a_row >= metrics.MAX_SKIPPED_IN_A_ROW:
                raise self.processes.failure(
                    f"{position.skipped_in_a_row} steps in a row were skipped up to step {position.step}: no scaling "
                    "makes the gradient finite; the best weights and the last checkpoint are kept; use "
                    "training.precision: bf16 or fp32"
                )
            return
        position.skipped_in_a_row = 0
        if metrics.is_spike(step.loss, position.losses):
            usual = math.fsum(position.losses) / len(position.losses)
            self._record("spike", {"loss": step.loss, "usual_loss": usual})
            self._progress.message(f"loss spike at step {position.step}: {step.loss:.4g}, usual is {usual:.4g}")
        position.losses = [*position.losses, step.loss][-metrics.SPIKE_WINDOW :]

    def _report_out_of_memory(self, size: int) -> None:
        position, effective = self.position, self._config.effective_batch
        pieces = -(-effective // position.batch_size)
        self._progress.message(
            f"out of memory at step {position.step + 1}: going on with {position.batch_size} rows at a time instead of "
            f"{size} ({pieces} pieces per step; the effective batch stays {effective}), same step again"
        )
        self._record("out-of-memory", {"batch_size": float(position.batch_size)}, position.step + 1)

    def _record(self, kind: str, values: dict[str, float], step: int | None = None) -> None:
        position = self.position
        if self._log is not None:
            epoch = position.epoch + position.batch / self._epoch_steps
            self._log.record(kind, position.step if step is None else step, epoch, values)

    def _remaining_field(self, scored: int = 0) -> dict[str, float]:
        """Return the remaining seconds of the run as ``Progress.advance`` takes them; empty while unknown."""
        seconds = self._remaining.seconds(self.position.step, self.position.epoch, scored)
        return {} if seconds is None else {"left_s": seconds}
