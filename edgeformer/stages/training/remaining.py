"""Time that a training still takes: its steps, validation after every epoch, and the test sets at its end."""

from __future__ import annotations

from collections import deque

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
