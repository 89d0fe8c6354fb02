"""Time that a training still takes: its steps, validation after every epoch, and the test sets at its end."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

from torch import nn

from edgeformer.artifacts.progress import Progress, bar
from edgeformer.system.memory import kept
from edgeformer.training import checkpoint, metrics
from edgeformer.training.checkpoint import Checkpoints, Position
from edgeformer.training.distributed import Processes
from edgeformer.training.metrics import Meter, MetricsLog, NoLog
from edgeformer.training.objective import Objective
from edgeformer.training.step import Stepper

_KEPT = 50
"""Steps whose mean is the time of a step: batches differ in length."""
_FORWARD_OF_A_STEP = 1 / 3
"""Of a row's time in a step, what scoring it takes; assumed until rows were scored."""


class RemainingTime:
    """Seconds until the end of a training, from what its steps and its scoring took so far.

    Early stopping is not foreseen.

    Args:
        steps: optimizer steps of an epoch.
        limit: the step at which training ends.
        step_rows: rows of a step.
        validation_rows: rows that are scored after every epoch, and where training ends.
        test_rows: rows that are scored at the end.
    """

    def __init__(self, steps: int, limit: int, *, step_rows: int, validation_rows: int, test_rows: int) -> None:
        self._steps, self._limit, self._step_rows = steps, limit, step_rows
        self._validation_rows, self._test_rows = validation_rows, test_rows
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._scored_rows, self._scored_s = 0, 0.0

    def stepped(self, seconds: float) -> None:
        """Count a step."""
        self._recent.append(seconds)

    def scored(self, rows: int, seconds: float) -> None:
        """Count rows that were scored."""
        self._scored_rows += rows
        self._scored_s += seconds

    def seconds(self, step: int, epoch: int, scored: int = 0) -> float | None:
        """Return the seconds that are left, or None before anything was timed.

        Args:
            step: steps that were taken.
            epoch: epochs that were trained and validated.
            scored: rows of the present validation that were scored.
        """
        step_s = sum(self._recent) / len(self._recent) if self._recent else None
        if self._scored_rows:
            row_s = self._scored_s / self._scored_rows
        elif step_s is not None:
            row_s = step_s / self._step_rows * _FORWARD_OF_A_STEP
        else:
            return None
        steps_left = max(0, self._limit - step)
        if steps_left and step_s is None:
            return None
        validations = max(0, -(-self._limit // self._steps) - epoch)
        rows = validations * self._validation_rows - scored + self._test_rows
        return steps_left * (step_s or 0.0) + max(0, rows) * row_s


# The training loop: epochs of optimizer steps, validation, best weights, early stopping, resumable state; its log.


Log = MetricsLog | NoLog


class TrainingLoop:
    """One run's loop. ``run()`` may be called once; everything it needs to go on later is in the checkpoint.

    ``checkpoints`` must be set before :meth:`run` and :meth:`resume`: a run gets its folder once all else is in place.

    Several processes share the rows of a step, and take the same step, each in its own copy or shard of the model.
    """

    checkpoints: Checkpoints

    def __init__(self, objective: Objective, processes: Processes) -> None:
        self._recipe, self._config, self._objective = objective.recipe, objective.recipe.training, objective
        self.processes, self.device = processes, processes.device
        self._rows = len(objective.prepared.train)
        self._steps = -(-self._rows // self._config.effective_batch)  # of an epoch
        self.total_steps = self._steps * self._config.epochs
        self._stepper = Stepper(objective, processes, self.total_steps)
        self._rate = self._stepper.rate
        self.position = Position(batch_size=self._config.batch_size)
        self._window = self._meter()  # steps since the last log line
        self._saved_at, self._saving_s = time.monotonic(), 0.0
        self._stopping = False

    @property
    def unused(self) -> tuple[str, ...]:
        """What the recipe asks for and this device does not have, for people."""
        return self._stepper.levers.unused

    @property
    def plain_model(self) -> nn.Module:
        """The model without Accelerate's wrapper, on the same weights (or shards): it computes in float32."""
        # Accelerate replaces the module's own forward to compute under autocast, and its unwrap_model undoes that for
        # good, training included. A shallow copy without the replacement shares every weight and leaves training alone.
        module = self.processes.plain(self._stepper.model)
        plain: nn.Module = object.__new__(type(module))  # copy.copy makes a sharded module by its constructor
        plain.__dict__.update(module.__dict__)
        plain.__dict__.pop("forward", None)
        return plain

    def whole_model(self) -> nn.Module:
        """A model for the weights of a checkpoint: the plain one, or where no process has it whole, another one."""
        return self._objective.build().to(self.device) if self.processes.sharded else self.plain_model

    def resume(self, progress: Progress) -> None:
        """Go on from the last checkpoint that is not damaged; from the beginning, if there is none yet.

        Raises:
            ArtifactError: all checkpoints are damaged, or do not fit.
        """
        found = self.processes.on_main(lambda: self.checkpoints.find(progress.message))
        if found is None:
            return
        folder, best = found

        def restore(folder: Path) -> None:
            checkpoint.load(folder, self.processes, self._stepper.model, self._stepper.optimizer)

        with self.processes.agreeing():
            self.position = self.checkpoints.load(folder, restore, self._rate, best=best)
        if not (folder / checkpoint.random_file(self.processes.rank)).is_file():  # fewer processes wrote it
            self.processes.differ(self._recipe.seed + self.position.step)
        self._window = Meter(**self.position.window)

    def run(self, stop: threading.Event, log: Log, progress: Progress, max_steps: int | None = None) -> bool:
        """Train until the recipe's epochs, early stopping, ``max_steps``, or a stop request, which makes it False."""
        with kept(self._config.batch_size * self._recipe.data.tokens_at_once):
            return self._run(stop, log, progress, max_steps)

    def _run(self, stop: threading.Event, log: Log, progress: Progress, max_steps: int | None) -> bool:
        limit, self._saved_at = min(self.total_steps, max_steps or self.total_steps), time.monotonic()
        objective = self._objective
        self._remaining = RemainingTime(
            self._steps,
            limit,
            step_rows=self._config.effective_batch,
            validation_rows=objective.rows_of("validation"),
            test_rows=sum(map(objective.rows_of, objective.prepared.tests)),
        )
        while self._has_work(limit):
            complete = self._epoch(stop, log, progress, limit)
            if self._stopping:
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

    def _has_work(self, limit: int) -> bool:
        """Whether there are steps left, or one that a stop request ended before its weights were validated."""
        position = self.position
        unscored = position.batch > 0 and position.scored_at != position.step
        return position.epoch < self._config.epochs and (position.step < limit or unscored) and not self._stagnates()

    def _save(self, *, best: bool = False) -> None:
        processes, model, started = self.processes, self._stepper.model, time.monotonic()
        if processes.any(not metrics.weights_are_finite(model))[0]:  # the last step spoiled them
            raise processes.failure(metrics.divergence(model, self.position.step, "the weights are not finite"))
        self.position.window = asdict(self._window)
        found = checkpoint.gather(processes, model, self._stepper.optimizer)
        with processes.agreeing():
            if processes.main:
                self.checkpoints.save(found, self._rate, self.position, best=best)
        self._saved_at, self._saving_s = started, time.monotonic() - started

    def _is_late(self, step_s: float) -> bool:
        """Whether to save now: one more step may end too late for a checkpoint that is written in time."""
        since, limit = time.monotonic() - self._saved_at, 60 * self._config.checkpoint_minutes
        if self._saving_s + step_s > limit / 2:  # no time is left to train in: count from the end of the last save
            return since - self._saving_s >= limit
        return since + step_s + self._saving_s > limit

    def _epoch(self, stop: threading.Event, log: Log, progress: Progress, limit: int) -> bool:
        """Steps of one epoch, from ``position.batch`` on; True when the epoch is complete."""
        position = self.position
        self._stepper.model.train()
        if not position.batch:
            self._window = self._meter()

        def halved(size: int) -> None:
            self._report_memory(size, log, progress)

        seen = position.batch * self._config.effective_batch
        last = min(self._rows, seen + max(0, limit - position.step) * self._config.effective_batch)
        with bar(progress, f"Epoch {position.epoch + 1}/{self._config.epochs}", last, "samples"):
            progress.advance(seen)
            mark = time.perf_counter()
            for rows in self._objective.steps(position.epoch)[position.batch :] if position.step < limit else ():
                rate = self._rate.current
                step = self._stepper.take(rows, position, halved)
                mark, step.seconds_sum = time.perf_counter(), time.perf_counter() - mark
                self._window.add(step)
                position.batch += 1
                position.step += 1
                position.samples += step.rows_sum
                position.seconds += step.seconds_sum
                position.training_seconds += step.seconds_sum
                position.epoch_loss_sum += step.loss_sum
                position.epoch_weight += step.weight_sum
                self._remaining.stepped(step.seconds_sum)
                figures = {"loss": self._window.loss, **self._window.speed(), "lr": rate, **self._left()}
                progress.advance(step.rows_sum, **figures)
                if position.step % self._config.log_every == 0:
                    log.record("step", position.step, self._passes(), {**self._window.averages(), "lr": rate})
                    self._window = self._meter()
                self._watch(step, log, progress)
                self._stopping, late = self.processes.any(stop.is_set(), self._is_late(step.seconds_sum))
                if self._stopping or position.step >= limit:
                    break
                if late:
                    self._save()
                    mark, position.seconds = time.perf_counter(), position.seconds + time.perf_counter() - mark
        return position.batch == self._steps

    def _left(self, scored: int = 0) -> dict[str, float]:
        """The seconds that the whole run still takes, as progress takes them; empty: not known yet."""
        left_s = self._remaining.seconds(self.position.step, self.position.epoch, scored)
        return {} if left_s is None else {"left_s": left_s}

    def _watch(self, step: Meter, log: Log, progress: Progress) -> None:
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
            if position.skipped_in_a_row >= metrics.SKIPPED_IN_A_ROW:
                raise self.processes.failure(
                    f"{position.skipped_in_a_row} steps in a row were skipped up to step {position.step}: no scaling "
                    "makes the gradient finite; the best weights and the last checkpoint are kept; use "
                    "training.precision: bf16 or fp32"
                )
            return
        position.skipped_in_a_row = 0
        if metrics.is_spike(step.loss, position.losses):
            usual = math.fsum(position.losses) / len(position.losses)
            log.record("spike", position.step, self._passes(), {"loss": step.loss, "usual_loss": usual})
            progress.message(f"loss spike at step {position.step}: {step.loss:.4g}, usual is {usual:.4g}")
        position.losses = [*position.losses, step.loss][-metrics.HISTORY :]

    def _report_memory(self, size: int, log: Log, progress: Progress) -> None:
        position, effective = self.position, self._config.effective_batch
        pieces = -(-effective // position.batch_size)
        progress.message(
            f"out of memory at step {position.step + 1}: going on with {position.batch_size} rows at a time instead of "
            f"{size} ({pieces} pieces per step; the effective batch stays {effective}), same step again"
        )
        log.record("out-of-memory", position.step + 1, self._passes(), {"batch_size": float(position.batch_size)})

    def _meter(self) -> Meter:
        return Meter(per_token=self._objective.task.unit == "tokens")

    def _passes(self) -> float:
        return self.position.epoch + self.position.batch / self._steps

    def _validate(self, log: Log, progress: Progress, *, complete: bool) -> bool:
        """Score the weights as they are; True where they are the best so far, which the next checkpoint keeps.

        Args:
            complete: an epoch has ended; where --max-steps stops in the middle of one, schedule, early stopping and
                the best epoch's number do not count it.
        """
        position, objective = self.position, self._objective
        started = mark = time.perf_counter()
        scored = 0

        def advance(count: int) -> None:
            nonlocal scored, mark
            before, mark = mark, time.perf_counter()
            self._remaining.scored(count, mark - before)
            scored += count
            progress.advance(count, **self._left(scored))

        with bar(progress, "Scoring validation", objective.rows_of("validation"), "rows"):
            result = objective.evaluate(self.plain_model, "validation", self.processes, advance)
        self.processes.settle(self._stepper.model)
        position.seconds += time.perf_counter() - started
        position.scored_at = position.step
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
