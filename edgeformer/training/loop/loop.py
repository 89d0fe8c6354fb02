"""The training loop: epochs of optimizer steps, validation, early stopping, checkpoints; fits; the log of metrics."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.tensorboard import SummaryWriter

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.system.memory import keep_heap
from edgeformer.training.loop.checkpoint import RANDOM_STATES, WEIGHTS, Checkpoints, Position, collect_state
from edgeformer.training.loop.distributed import Processes
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import Meter, Stepper, describe_divergence, is_finite

METRICS_FILE = "metrics.jsonl"
SPIKE_WINDOW, SPIKE_MIN_STEPS, SPIKE_DEVIATIONS = 100, 20, 6.0
MAX_SKIPPED_IN_A_ROW = 32
"""Each skipped step halves the scaling factor of fp16: after so many no factor can help."""
_AVERAGED_STEPS = 50
"""Batches differ in length, so the time of a step is a mean."""
FORWARD_SHARE = 1 / 3
"""Time to score a row, as a share of its time in a step; assumed."""
SCORING_S = 120.0
"""Seconds for each set that is scored where ``max_steps`` ends a run in its first epoch, which is a trial."""


class Spike(NamedTuple):
    """A step whose loss is beyond ``limit``, and the mean of the losses before it."""

    step: int
    loss: float
    usual: float
    limit: float


class Training(ABC):
    """How a model gets its weights: in optimizer steps (:class:`TrainingLoop`), or at once (:class:`Fit`).

    Call :meth:`run` once. Set ``checkpoints`` before it and :meth:`resume`: the run's folder is created last.
    """

    checkpoints: Checkpoints
    unused: Sequence[str] = ()  # messages about requested options for speed that this device does not support
    chosen: dict[str, float] | None = None  # keys of section ``training`` whose values :meth:`run` chose
    effective_batch: int | None = None  # rows of an optimizer step; None: there are no such steps

    def __init__(self, objective: Objective, processes: Processes, total_steps: int, position: Position) -> None:
        self.objective, self.processes, self.device = objective, processes, processes.device
        self.total_steps, self.position = total_steps, position

    @property
    def plain_model(self) -> nn.Module:
        """The model, which computes in float32."""
        return self.objective.model

    @abstractmethod
    def resume(self, progress: Progress) -> None:
        """Load the newest undamaged checkpoint, if there is any. Raises ArtifactError if all are damaged or misfit."""

    @abstractmethod
    def run(
        self, stop: threading.Event, log: MetricsLog | None, progress: Progress, max_steps: int | None = None,
        max_s: float = math.inf,
    ) -> bool:  # fmt: skip
        """Train until the recipe's end or ``max_steps``; return whether that was without ``stop``.

        ``max_s``: no epoch begins after so many seconds. ``stop`` ends training after the current step. Only the main
        process has a ``log``.
        """


class TrainingLoop(Training):
    """The loop of one run; several processes share the rows of each step."""

    def __init__(self, objective: Objective, processes: Processes) -> None:
        self._config = config = objective.recipe.training
        self._rows = len(objective.prepared.train)
        self._epoch_steps = config.steps(self._rows)
        # Rows per forward pass: starts as the recipe's batch size, is halved when memory runs out, and is checkpointed.
        position = Position(batch_size=config.batch_size)
        super().__init__(objective, processes, self._epoch_steps * config.epochs, position)
        self.effective_batch = config.effective_batch
        self.stepper = Stepper(objective, processes, self.total_steps)
        self.unused = self.stepper.unused
        self._window = Meter(objective.per_token)  # steps since the last line of the log
        self._saved_at, self._saving_s = time.monotonic(), 0.0
        self._spike: Spike | None = None

    @property
    def plain_model(self) -> nn.Module:
        """The model without Accelerate's autocast, on the same weights (or shards): it computes in float32."""
        # Accelerate replaces the module's forward; its unwrap_model could only undo that for training too. A shallow
        # copy without the replacement shares every weight.
        module = self.processes.accelerator.unwrap_model(self.stepper.model)
        plain: nn.Module = object.__new__(type(module))  # copy.copy calls the constructor of a sharded module
        plain.__dict__.update(module.__dict__)
        plain.__dict__.pop("forward", None)
        return plain

    def resume(self, progress: Progress) -> None:
        checkpoint = self.processes.on_main(lambda: self.checkpoints.find(progress.message))
        if checkpoint is None:
            return
        folder, has_best = checkpoint
        processes, stepper = self.processes, self.stepper
        with processes.failing_together():
            self.position = self.checkpoints.load(
                folder, processes, stepper.model, stepper.optimizer, stepper.schedule, has_best=has_best
            )
        if not (folder / RANDOM_STATES.format(processes.rank)).is_file():  # fewer processes wrote it
            set_seed(self.objective.recipe.seed + self.position.step + processes.rank)
        self._window = Meter(**self.position.window)

    def run(
        self, stop: threading.Event, log: MetricsLog | None, progress: Progress, max_steps: int | None = None,
        max_s: float = math.inf,
    ) -> bool:  # fmt: skip
        self._log, self._progress, self._saved_at = log, progress, time.monotonic()
        self._last_step = min(self.total_steps, max_steps or self.total_steps)
        position, stopping = self.position, self._config.early_stopping
        patience = math.inf if stopping is None else stopping.patience
        with keep_heap(self._config.batch_size * self.objective.recipe.data.tokens_at_once):
            if self.objective.start_seconds and not position.step and position.scored_at is None:
                position.seconds += self.objective.start_seconds
                self._save(best=self._validate(is_complete=False))  # epoch 0: the head that the frozen start fitted
            while position.epoch < self._config.epochs and position.epochs_without_improvement < patience:
                # A stop request may have ended the last step before its weights were validated.
                is_unscored = position.batch > 0 and position.scored_at != position.step
                if position.step >= self._last_step and not is_unscored:
                    break
                if not self._train_epoch(stop):
                    self._save()
                    return False
                spike, self._spike = self._spike, None
                if spike is not None:
                    since = position.losses[spike.step - position.step - 1 :]
                    loss = statistics.median(since[-SPIKE_MIN_STEPS:])
                    if loss > spike.limit:
                        progress.message(
                            f"loss spike at step {spike.step}: {spike.loss:.4g}, and {loss:.4g} since then; the mean "
                            f"before it was {spike.usual:.4g}"
                        )
                is_complete = position.batch == self._epoch_steps
                is_best = self._validate(is_complete=is_complete)
                if is_complete:
                    position.epoch += 1
                    position.batch, position.epoch_loss_sum, position.epoch_weight = 0, 0.0, 0
                self._save(best=is_best)
                if not is_complete or position.seconds > max_s:
                    break
        if position.epochs_without_improvement >= patience:
            progress.message("stopped early: the validation score no longer improves")
        return True

    def _train_epoch(self, stop: threading.Event) -> bool:
        """Take the steps of the current epoch from ``position.batch`` on. Returns False after a stop request."""
        # 1. Resume the progress
        position, progress, effective = self.position, self._progress, self._config.effective_batch
        prepared, step_seconds = self.objective.prepared, deque[float](maxlen=_AVERAGED_STEPS)
        self.stepper.model.train()
        if not position.batch:
            self._window = Meter(self.objective.per_token)
        previous_rows = position.batch * effective
        end = min(self._rows, previous_rows + max(0, self._last_step - position.step) * effective)
        with bar(progress, f"Epoch {position.epoch + 1}/{self._config.epochs}", end, "samples"):
            progress.advance(previous_rows)
            mark = time.perf_counter()
            steps = self.objective.steps(position.epoch)[position.batch :] if position.step < self._last_step else ()
            for rows in steps:
                # 2. Take a step
                lr, size = float(self.stepper.optimizer.param_groups[0]["lr"]), position.batch_size
                step = self.stepper.take(rows, position)
                mark, step.seconds_sum = time.perf_counter(), time.perf_counter() - mark
                if position.batch_size < size:
                    micro_batches = self._config.micro_batches(position.batch_size)
                    progress.message(
                        f"out of memory at step {position.step + 1}: continuing with {position.batch_size} rows at a "
                        f"time instead of {size} ({micro_batches} micro-batches per step; the effective batch stays "
                        f"{effective})"
                    )
                    self._record("out-of-memory", {"batch_size": float(position.batch_size)}, position.step + 1)

                # 3. Report it
                self._window.add(step)
                position.batch += 1
                position.step += 1
                position.samples += step.rows_sum
                position.seconds += step.seconds_sum
                position.training_seconds += step.seconds_sum
                position.epoch_loss_sum += step.loss_sum
                position.epoch_weight += step.weight_sum
                step_seconds.append(step.seconds_sum)
                seconds = self._window.seconds_sum
                speed = {"samples_per_s": self._window.rows_sum / seconds}
                if self._window.per_token:
                    speed["tokens_per_s"] = self._window.weight_sum / seconds
                # The time left, with scoring. It is an upper bound if early stopping can still end training sooner.
                validations = math.ceil(self._last_step / self._epoch_steps) - position.epoch
                rows_left = validations * len(prepared.validation) + sum(map(len, prepared.tests.values()))
                step_s = statistics.fmean(step_seconds)
                scoring_s = FORWARD_SHARE * rows_left / effective * step_s
                if self._last_step < self._epoch_steps:
                    scoring_s = min(scoring_s, (1 + len(prepared.tests)) * SCORING_S)
                left_s = (self._last_step - position.step) * step_s + scoring_s
                stopping = self._config.early_stopping
                ends_sooner = stopping and validations > stopping.patience - position.epochs_without_improvement
                left = {"most_left_s" if ends_sooner else "left_s": left_s}
                figures = {"loss": self._window.loss, **speed, "lr": lr, **left}
                progress.advance(step.rows_sum, **figures)
                if position.step % self._config.log_every == 0:
                    weight = max(1, self._window.weight_sum)
                    parts = {name: value / weight for name, value in self._window.part_sums.items()}
                    skipped = {"skipped": float(self._window.skipped)} if self._window.skipped else {}
                    self._record("step", {"loss": self._window.loss, **parts, **speed, **skipped, "lr": lr})
                    self._window = Meter(self.objective.per_token)

                # 4. Check the loss
                if step.skipped:
                    position.skipped += 1
                    position.skipped_in_a_row += 1
                    self._record("skipped", {"skipped_steps": float(position.skipped)})
                    progress.message(
                        f"step {position.step} skipped: its gradient overflows in fp16 ({position.skipped} skipped so "
                        "far); the scaling factor is halved"
                    )
                    if position.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                        raise self.processes.failure(
                            f"{position.skipped_in_a_row} steps in a row were skipped up to step {position.step}, "
                            "because the gradient overflows in fp16 at every scaling factor; the best weights and the "
                            "last checkpoint are kept; use training.precision: bf16 or fp32"
                        )
                else:
                    recent, usual = position.losses, statistics.fmean(position.losses or [0.0])
                    limit = usual + SPIKE_DEVIATIONS * statistics.pstdev(recent or [0.0])
                    if len(recent) >= SPIKE_MIN_STEPS and step.loss > limit:
                        self._record("spike", {"loss": step.loss, "usual_loss": usual})
                        self._spike = self._spike or Spike(position.step, step.loss, usual, limit)
                    position.skipped_in_a_row, position.losses = 0, [*recent, step.loss][-SPIKE_WINDOW:]

                # 5. Save or stop, if it is time
                # Save now if after one more step a checkpoint would be too late.
                since, limit_s = time.monotonic() - self._saved_at, 60 * self._config.checkpoint_minutes
                is_late = since + step.seconds_sum + self._saving_s > limit_s
                if self._saving_s + step.seconds_sum > limit_s / 2:  # it takes most of it: count from the save's end
                    is_late = since - self._saving_s >= limit_s
                stop_requests, late_processes = self.processes.sums(stop.is_set(), is_late)
                if stop_requests:
                    return False
                if position.step >= self._last_step:
                    break
                if late_processes:
                    self._save()
                    mark, position.seconds = time.perf_counter(), position.seconds + time.perf_counter() - mark
        return True

    def _validate(self, *, is_complete: bool) -> bool:
        """Score the current weights. Returns whether they are the best so far, to be kept by the next checkpoint.

        Within an epoch that is not complete (``max_steps``), the result does not count for schedule, early stopping and
        the number of the best epoch.
        """
        position, objective, progress = self.position, self.objective, self._progress
        started, rows = time.perf_counter(), len(objective.prepared.validation)
        with bar(progress, "Scoring validation", rows, "rows"):
            # Scores of a later epoch must be comparable with earlier ones.
            max_s = math.inf if is_complete or position.epoch else SCORING_S
            score = objective.evaluate(self.plain_model, "validation", self.processes, progress, max_s=max_s)
        if self.processes.sharded:  # free the weights that the evaluation gathered
            module: Any = self.processes.accelerator.unwrap_model(self.stepper.model)
            module.reshard()
        position.seconds += time.perf_counter() - started
        position.scored_at = position.step
        if is_complete and isinstance(self.stepper.schedule, ReduceLROnPlateau):
            self.stepper.schedule.step(score.loss)
        trained = {"train_loss": position.epoch_loss_sum / position.epoch_weight} if position.epoch_weight else {}
        self._record("epoch", {**trained, **objective.task.record(score)})
        value = objective.task.criterion(score, self._config)
        best = math.inf if position.best_value is None else position.best_value
        # A metric of few rows often ties.
        is_best = math.isfinite(value) and (
            value < best or (value == best and score.loss < position.validation["loss"])
        )
        if is_best:
            position.best_epoch = position.epoch + 1 if is_complete else None if position.step else 0
            position.best_value, position.validation = value, score.model_dump()
        place = (
            f"epoch {position.epoch + 1}" if is_complete else f"step {position.step}" if position.step else "epoch 0"
        )
        losses = [f"train loss {loss:.4f}" for loss in trained.values()] + [objective.task.describe(score)]
        progress.message(f"{place}: {', '.join(losses)}{' (best so far)' if is_best else ''}")
        stopping = self._config.early_stopping
        if is_complete and stopping is not None:
            if position.stopping_loss is None or value < position.stopping_loss - stopping.min_delta:
                position.stopping_loss, position.epochs_without_improvement = value, 0
            else:
                position.epochs_without_improvement += 1
        return is_best

    def _save(self, *, best: bool = False) -> None:
        processes, model, started = self.processes, self.stepper.model, time.monotonic()
        if processes.sums(not all(map(is_finite, model.parameters())))[0]:
            message = describe_divergence(model, self.position.step, "the weights are not finite")
            raise processes.failure(message)
        self.position.window = asdict(self._window)
        state = collect_state(processes, model, self.stepper.optimizer)
        with processes.failing_together():
            if processes.is_main:
                self.checkpoints.save(state, self.stepper.schedule, self.position, best=best)
        self._saved_at, self._saving_s = started, time.monotonic() - started

    def _record(self, kind: str, values: dict[str, float], step: int | None = None) -> None:
        if self._log is not None:
            epoch = self.position.epoch + self.position.batch / self._epoch_steps
            self._log.record(kind, self.position.step if step is None else step, epoch, values)


class Fit(Training):
    """A fit by one process on the CPU. It starts anew when resumed."""

    def __init__(self, objective: Objective, processes: Processes) -> None:
        if processes.count > 1:
            raise InputError(f"{objective.recipe.name}: is fitted by one process; start it without a launcher")
        training: Any = objective.recipe.training
        super().__init__(objective, processes, training.max_iterations, Position())

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


class MetricsLog:
    """``metrics.jsonl``, one JSON object per record, and the same numbers as TensorBoard scalars.

    A resumed run drops the records after its checkpoint, which ``position`` counts, and writes them again.
    """

    def __init__(self, run: Path, position: Position) -> None:
        path, self._position = run / METRICS_FILE, position
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = lines[: position.records]
        position.records = len(lines)
        write_text(path, "".join(line + "\n" for line in lines))
        self._file = path.open("a", encoding="utf-8", newline="\n")
        self._excepthook, threading.excepthook = threading.excepthook, self._on_thread_error
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=position.step + 1)

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Append a record; ``kind`` is "step" or "epoch", …; ``epoch`` counts passes over the data (fractional)."""
        document = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        self._position.records += 1
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        try:
            self._file.close()
            self._board.close()
        finally:
            threading.excepthook = self._excepthook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Print no traceback of TensorBoard's thread: the next call raises the same error."""
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._excepthook(error)
