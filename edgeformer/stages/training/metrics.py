"""Figures of a run while it trains: averages over a few steps, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from edgeformer.formats.files import write_text


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: summed losses (nats), what they are sums over, and rows."""

    loss: float
    parts: dict[str, float]
    weight: int
    rows: int


@dataclass
class Meter:
    """Averages since the last log line. ``per_token``: the weight counts tokens, not rows."""

    per_token: bool
    loss_sum: float = 0.0
    part_sums: dict[str, float] = field(default_factory=dict)
    weight_sum: int = 0
    rows_sum: int = 0
    seconds_sum: float = 0.0

    def add(self, step: StepResult, seconds: float) -> None:
        """Count one step."""
        self.loss_sum += step.loss
        for name, value in step.parts.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + value
        self.weight_sum += step.weight
        self.rows_sum += step.rows
        self.seconds_sum += seconds

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
        return {"loss": self.loss, **parts, **self.speed()}


class MetricsLog:
    """One JSON object per record in ``metrics.jsonl``; its numbers also as TensorBoard scalars.

    A resumed run drops the records of steps that were lost with the process and writes them again.
    """

    def __init__(self, run: Path, resume_step: int) -> None:
        self._path = run / "metrics.jsonl"
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        # A killed process may leave half a line.
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= resume_step]
        write_text(self._path, "".join(line + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resume_step + 1)

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Append one record: ``kind`` is "step" or "epoch", ``epoch`` counts passes over the data (fractional)."""
        document = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """End the files."""
        self._file.close()
        self._board.close()
