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
    _loss: float = 0.0
    _parts: dict[str, float] = field(default_factory=dict)
    _weight: int = 0
    _rows: int = 0
    _seconds: float = 0.0

    def add(self, step: StepResult, seconds: float) -> None:
        """Count one step."""
        self._loss += step.loss
        for name, value in step.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        self._weight += step.weight
        self._rows += step.rows
        self._seconds += seconds

    @property
    def loss(self) -> float:
        """Mean loss per row or token."""
        return self._loss / max(1, self._weight)

    def speed(self) -> dict[str, float]:
        """samples_per_s, and tokens_per_s where tokens are what is counted."""
        if not self._seconds:
            return {}
        speeds = {"samples_per_s": self._rows / self._seconds}
        return {**speeds, "tokens_per_s": self._weight / self._seconds} if self.per_token else speeds

    def averages(self) -> dict[str, float]:
        """Everything, by the names of metrics.jsonl."""
        parts = {name: value / max(1, self._weight) for name, value in self._parts.items()}
        return {"loss": self.loss, **parts, **self.speed()}
