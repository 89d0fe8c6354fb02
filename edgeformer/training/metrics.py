"""Sums of training steps, their log, and the checks for losses and gradients that are not finite or too large."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard import SummaryWriter

from edgeformer.artifacts.files import write_text
from edgeformer.training.checkpoint import Position

METRICS_FILE = "metrics.jsonl"
SPIKE_WINDOW, SPIKE_MIN_STEPS, SPIKE_DEVIATIONS = 100, 20, 6.0
MAX_SKIPPED_IN_A_ROW = 32
"""Each skipped step halves the scaling factor of fp16: after so many no factor can help."""


def is_spike(loss: float, recent: list[float]) -> bool:
    """Return whether a step's mean loss is over 6 standard deviations above the mean of at least 20 recent steps."""
    if len(recent) < SPIKE_MIN_STEPS:
        return False
    return loss > statistics.fmean(recent) + SPIKE_DEVIATIONS * statistics.pstdev(recent)


def describe_divergence(model: nn.Module, step: int, problem: str) -> str:
    """Return the message that ends training at ``step``, with the first parameter that is not finite."""
    place = ""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            place = f"; the first layer with weights that are not finite is {name}"
            break
        if parameter.grad is not None and not _is_finite(parameter.grad):
            place = f"; the first layer with a gradient that is not finite is {name}"
            break
    return (
        f"training diverged at step {step}: {problem}{place}; the weights of the last checkpoint and the best ones are "
        "kept; lower training.optimizer.lr or training.clip_norm"
    )


def weights_are_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite."""
    return all(map(_is_finite, model.parameters()))


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # this process's shard
    return bool(torch.isfinite(local).all())


@dataclass
class Meter:
    """Sums over optimizer steps. ``per_token``: the weight counts tokens instead of rows."""

    per_token: bool
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    weight_sum: int = 0
    rows_sum: int = 0
    seconds_sum: float = 0.0
    skipped: int = 0

    def add(self, step: Meter) -> None:
        """Add the sums of one step."""
        self.loss_sum += step.loss_sum
        for name, value in step.part_sums.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + value
        self.weight_sum += step.weight_sum
        self.rows_sum += step.rows_sum
        self.seconds_sum += step.seconds_sum
        self.skipped += step.skipped

    @property
    def loss(self) -> float:
        """Mean loss per row or token."""
        return self.loss_sum / max(1, self.weight_sum)

    def speed(self) -> dict[str, float]:
        """Return ``samples_per_s``, and ``tokens_per_s`` if the weight counts tokens."""
        if not self.seconds_sum:
            return {}
        speeds = {"samples_per_s": self.rows_sum / self.seconds_sum}
        return {**speeds, "tokens_per_s": self.weight_sum / self.seconds_sum} if self.per_token else speeds

    def averages(self) -> dict[str, float]:
        """Return loss, parts of the loss and speed, by their keys in ``metrics.jsonl``."""
        parts = {name: value / max(1, self.weight_sum) for name, value in self.part_sums.items()}
        skipped = {"skipped": float(self.skipped)} if self.skipped else {}
        return {"loss": self.loss, **parts, **self.speed(), **skipped}


class MetricsLog:
    """``metrics.jsonl``, one JSON object per record, and the same numbers as TensorBoard scalars.

    A resumed run drops the records after its checkpoint and writes them again.

    Args:
        run: the run's folder.
        position: counts the records.
        report: receives a message if TensorBoard's files cannot be written; training goes on without them.
    """

    def __init__(self, run: Path, position: Position, report: Callable[[str], None]) -> None:
        self._path, self._position, self._report = run / METRICS_FILE, position, report
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        lines = lines[: position.records]
        position.records = len(lines)
        write_text(self._path, "".join(line + "\n" for line in lines))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._board: SummaryWriter | None = None
        self._excepthook, threading.excepthook = threading.excepthook, self._on_thread_error
        with self._tolerating_tensorboard_errors():
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=position.step + 1)

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Append a record; ``kind`` is "step" or "epoch", …; ``epoch`` counts passes over the data (fractional)."""
        document = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        self._position.records += 1
        if self._board is not None:
            with self._tolerating_tensorboard_errors():
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            with self._tolerating_tensorboard_errors():
                self._board.close()
        threading.excepthook = self._excepthook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Print no traceback of TensorBoard's thread: the next call raises the same error."""
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._excepthook(error)

    @contextlib.contextmanager
    def _tolerating_tensorboard_errors(self) -> Iterator[None]:
        """Report an error of TensorBoard and go on without it. Raises OSError if the run's files are gone too."""
        try:
            yield
        except OSError as error:
            self._board = None
            if not self._path.exists():
                raise
            reason = f"TensorBoard's files cannot be written ({error.strerror or error})"
            self._report(f"{self._path.parent}: {reason}; {METRICS_FILE} has the same numbers")
