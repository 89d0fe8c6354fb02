"""Numbers going wrong: losses and gradients that are not finite, and losses that leap."""

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

HISTORY, LEAST = 100, 20
DEVIATIONS = 6.0
SKIPPED_IN_A_ROW = 32
"""fp16 scaling halves its factor with each skipped step: after so many no factor is left that could help."""


def is_spike(loss: float, before: list[float]) -> bool:
    """Whether a step's mean loss is more than 6 standard deviations above the mean of the last 100 (at least 20)."""
    if len(before) < LEAST:
        return False
    return loss > statistics.fmean(before) + DEVIATIONS * statistics.pstdev(before)


def divergence(model: nn.Module, step: int, found: str) -> str:
    """Why training stops at ``step``: ``found`` is what is not finite; and the first parameter where it shows."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            place = f"; the first layer with weights that are not finite is {name}"
            break
        if parameter.grad is not None and not _finite(parameter.grad):
            place = f"; the first layer with a gradient that is not finite is {name}"
            break
    else:
        place = ""
    return (
        f"training diverged at step {step}: {found}{place}; the weights of the last checkpoint and the best ones are "
        "kept; lower training.optimizer.lr or training.clip_norm"
    )


def weights_are_finite(model: nn.Module) -> bool:
    """Whether a checkpoint of these weights would be worth keeping."""
    return all(map(_finite, model.parameters()))


def _finite(tensor: Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # this process's shard
    return bool(torch.isfinite(own).all())


# What training counts from step to step, and the log it writes.


METRICS_FILE = "metrics.jsonl"


@dataclass
class Meter:
    """Sums over one optimizer step, or several. ``per_token``: the weight counts tokens, not rows."""

    per_token: bool
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    weight_sum: int = 0
    rows_sum: int = 0
    seconds_sum: float = 0.0
    skipped: int = 0

    def add(self, step: Meter) -> None:
        """Count one step."""
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
        """samples_per_s, and tokens_per_s where tokens are what is counted."""
        if not self.seconds_sum:
            return {}
        speeds = {"samples_per_s": self.rows_sum / self.seconds_sum}
        return {**speeds, "tokens_per_s": self.weight_sum / self.seconds_sum} if self.per_token else speeds

    def averages(self) -> dict[str, float]:
        """Everything, by the names of metrics.jsonl."""
        parts = {name: value / max(1, self.weight_sum) for name, value in self.part_sums.items()}
        skipped = {"skipped": float(self.skipped)} if self.skipped else {}
        return {"loss": self.loss, **parts, **self.speed(), **skipped}


class MetricsLog:
    """One JSON object per record in ``metrics.jsonl``; its numbers also as TensorBoard scalars.

    A resumed run drops the records that were lost with the process and writes them again.

    Args:
        run: the run's folder.
        position: where training stands; it counts the records, so that a checkpoint knows which are its own.
        say: is told when TensorBoard's files cannot be written: training goes on without them.
    """

    def __init__(self, run: Path, position: Position, say: Callable[[str], None]) -> None:
        self._path, self._position, self._say = run / METRICS_FILE, position, say
        kept = self._kept()
        position.records = len(kept)
        write_text(self._path, "".join(line + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._board: SummaryWriter | None = None
        self._hook, threading.excepthook = threading.excepthook, self._on_thread_error
        with self._told():
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=position.step + 1)

    def _kept(self) -> list[str]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        if self._position.records is not None:
            return lines[: self._position.records]
        # Without a count the steps decide; a killed process may leave half a line.
        return [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self._position.step]

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Append one record: ``kind`` is "step" or "epoch", ``epoch`` counts passes over the data (fractional)."""
        document = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        self._position.records = (self._position.records or 0) + 1
        if self._board is not None:
            with self._told():
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """End the files."""
        self._file.close()
        if self._board is not None:
            with self._told():
                self._board.close()
        threading.excepthook = self._hook

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread keeps its error for the next call: no traceback on the terminal."""
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._hook(error)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Go on without TensorBoard's files where they cannot be written. Raises OSError where the run's are gone."""
        try:
            yield
        except OSError as error:
            self._board = None
            if not self._path.exists():
                raise
            reason = f"TensorBoard's files cannot be written ({error.strerror or error})"
            self._say(f"{self._path.parent}: {reason}; {METRICS_FILE} has the same numbers")


class NoLog:
    """The log of a process that leaves writing to the main one."""

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
