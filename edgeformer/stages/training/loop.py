"""The training loop: epochs of optimizer steps, validation, best weights, early stopping, resumable state."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from edgeformer.data.batching import ordered_batches
from edgeformer.data.encoding import Encoded
from edgeformer.data.prepare import PreparedData
from edgeformer.schema.errors import EdgeformerError
from edgeformer.schema.manifest import ClassificationScore
from edgeformer.schema.progress import Progress
from edgeformer.schema.recipe import Recipe
from edgeformer.stages.training.batches import Batch, PlannedBatches, drop_tokens, to_batch, training_loader
from edgeformer.stages.training.checkpoints import Checkpoints, Position
from edgeformer.stages.training.interrupt import StopRequest
from edgeformer.stages.training.metrics_log import MetricsLog
from edgeformer.stages.training.optimization import LearningRate, build_optimizer
from edgeformer.tasks.classification import score

EVALUATION_BATCH = 128


@torch.inference_mode()
def evaluate(model: nn.Module, encoded: Encoded, pad_id: int, device: torch.device) -> ClassificationScore:
    """Scores of ``model`` in float32 on all rows of ``encoded``; leaves the model in evaluation mode."""
    model.eval()
    logits = np.empty((len(encoded), 0), dtype=np.float32)
    for rows in ordered_batches(encoded.lengths, EVALUATION_BATCH):
        batch = to_batch(encoded, rows, pad_id)
        output = model(batch["input_ids"].to(device), attention_mask(batch, device)).cpu().numpy()
        if not logits.size:
            logits = np.empty((len(encoded), output.shape[-1]), dtype=np.float32)
        logits[rows] = output
    return score(logits, encoded.labels)


def attention_mask(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """The batch's mask on ``device``; None where no row is padded, which lets SDPA take its fastest path."""
    mask = batch["attention_mask"]
    return None if bool(mask.all()) else mask.to(device)


@dataclass
class Outcome:
    """How the loop ended."""

    position: Position
    interrupted: bool


class TrainingLoop:
    """One run's loop. ``run()`` may be called once; everything it needs to go on later is in the checkpoint."""

    def __init__(self, recipe: Recipe, data: PreparedData, model: nn.Module, accelerator: Accelerator) -> None:
        self._recipe, self._config, self._data = recipe, recipe.training, data
        self._accelerator = accelerator
        self._sampler = PlannedBatches(data.train.lengths, self._config, recipe.seed)
        loader = training_loader(data.train, self._sampler, data.special.pad)
        optimizer = build_optimizer(model, self._config.optimizer)
        self._model, self._optimizer, self._loader = accelerator.prepare(model, optimizer, loader)
        self.steps_per_epoch = -(-len(self._sampler) // self._config.accumulation)
        self.total_steps = self.steps_per_epoch * self._config.epochs
        self._rate = LearningRate(optimizer, self._config.schedule, self.total_steps)
        self._loss = nn.CrossEntropyLoss(label_smoothing=self._config.label_smoothing)
        self._special = self._special_ids().to(accelerator.device)
        self.position = Position()
        self.checkpoints: Checkpoints | None = None

    def _special_ids(self) -> torch.Tensor:
        added = self._data.tokenizer.get_added_tokens_decoder()
        return torch.tensor(sorted(number for number, token in added.items() if token.special))

    @property
    def _kept(self) -> Checkpoints:
        assert self.checkpoints is not None, "set checkpoints before run() or resume()"
        return self.checkpoints

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
        return self.position

    def run(self, stop: StopRequest, log: MetricsLog, progress: Progress, max_steps: int | None = None) -> Outcome:
        """Train until the recipe's epochs, early stopping, ``max_steps``, or a stop request."""
        limit = min(self.total_steps, max_steps or self.total_steps)
        while self.position.epoch < self._config.epochs and self.position.step < limit and not self._stagnates():
            complete = self._epoch(stop, log, progress, limit)
            if stop:
                self._save()
                return Outcome(self.position, interrupted=True)
            self._validate(log, progress)
            if complete:
                self.position.epoch += 1
                self.position.batch, self.position.epoch_loss_sum, self.position.epoch_batches = 0, 0.0, 0
            self._save()
            if not complete:
                break
        if self._stagnates():
            progress.message("stopping early: validation loss no longer improves")
        return Outcome(self.position, interrupted=False)

    def _save(self) -> None:
        self._kept.save(self._accelerator, self._rate, self.position)

    def _epoch(self, stop: StopRequest, log: MetricsLog, progress: Progress, limit: int) -> bool:
        """Steps of one epoch, from ``position.batch`` on; True when the epoch is complete."""
        position = self.position
        self._model.train()
        loader = self._remaining_batches()
        total = len(self._sampler) * self._config.batch_size
        progress.start(f"Epoch {position.epoch + 1}/{self._config.epochs}", total, "samples")
        progress.advance(position.batch * self._config.batch_size)
        meter = _Meter()
        try:
            mark = time.perf_counter()
            for batch in loader:
                rate = self._rate.current
                loss = self._step(batch)
                rows = len(batch["labels"])
                mark, seconds = time.perf_counter(), time.perf_counter() - mark  # the loader's time included
                meter.add(loss, rows, seconds)
                position.batch += 1
                position.samples += rows
                position.seconds += seconds
                position.epoch_loss_sum += loss
                position.epoch_batches += 1
                progress.advance(rows, loss=meter.loss, samples_per_s=meter.samples_per_second, lr=rate)
                if not self._accelerator.sync_gradients:
                    continue
                position.step += 1
                if position.step % self._config.log_every == 0:
                    epoch = position.epoch + position.batch / len(self._sampler)
                    log.record("step", position.step, epoch, {**meter.averages(), "lr": rate})
                    meter = _Meter()
                if stop or position.step >= limit:
                    return position.batch == len(self._sampler)
        finally:
            progress.finish()
        return True

    def _remaining_batches(self) -> Any:
        position = self.position
        self._sampler.set_epoch(position.epoch)
        loader = self._loader
        if position.batch:
            loader = self._accelerator.skip_first_batches(loader, position.batch)
        # Accelerate counts its own iterations and would hand that count to the sampler.
        loader.set_epoch(position.epoch)
        return loader

    def _step(self, batch: Batch) -> float:
        ids = batch["input_ids"]
        if self._config.token_dropout:
            ids = drop_tokens(batch, self._config.token_dropout, self._data.special.unk, self._special)
        with self._accelerator.accumulate(self._model):
            logits = self._model(ids, attention_mask(batch, self._accelerator.device))
            loss = self._loss(logits.float(), batch["labels"])
            self._accelerator.backward(loss)
            if self._accelerator.sync_gradients and self._config.clip_norm is not None:
                self._accelerator.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)
            self._optimizer.step()
            if self._accelerator.sync_gradients and not self._accelerator.optimizer_step_was_skipped:
                self._rate.after_step()
            self._optimizer.zero_grad()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise EdgeformerError(
                f"training diverged after step {self.position.step}: the loss is {value}; "
                "lower training.optimizer.lr or training.clip_norm"
            )
        return value

    def _validate(self, log: MetricsLog, progress: Progress) -> None:
        position = self.position
        started = time.perf_counter()
        result = evaluate(self.plain_model, self._data.validation, self._data.special.pad, self._accelerator.device)
        position.seconds += time.perf_counter() - started
        self._rate.after_epoch(result.loss)
        train_loss = position.epoch_loss_sum / max(1, position.epoch_batches)
        passes = position.epoch + position.batch / len(self._sampler)
        log.record(
            "epoch",
            position.step,
            passes,
            {
                "train_loss": train_loss,
                "val_loss": result.loss,
                "val_accuracy": result.accuracy,
                "val_f1": result.f1,
            },
        )
        value = result.loss if self._config.select_by == "loss" else -result.accuracy
        better = position.best_value is None or value < position.best_value
        if better:
            position.best_epoch, position.best_value = position.epoch + 1, value
            position.validation = result.model_dump()
            self._kept.save_best(self.plain_model)
        progress.message(
            f"epoch {position.epoch + 1}: train loss {train_loss:.4f}, validation loss {result.loss:.4f}, "
            f"accuracy {result.accuracy:.4f}{' (best so far)' if better else ''}"
        )
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


class _Meter:
    """Averages since the last log line."""

    def __init__(self) -> None:
        self._loss, self._rows, self._seconds, self._batches = 0.0, 0, 0.0, 0

    def add(self, loss: float, rows: int, seconds: float) -> None:
        self._loss += loss
        self._rows += rows
        self._seconds += seconds
        self._batches += 1

    @property
    def loss(self) -> float:
        return self._loss / max(1, self._batches)

    @property
    def samples_per_second(self) -> float:
        return self._rows / self._seconds if self._seconds else 0.0

    def averages(self) -> dict[str, float]:
        return {"loss": self.loss, "samples_per_s": self.samples_per_second}
