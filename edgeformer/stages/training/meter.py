"""Averages of a few optimizer steps, for the progress bar and metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field


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
