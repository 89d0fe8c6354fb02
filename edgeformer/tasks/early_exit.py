"""Offline evaluation of early exit: outputs of every exit are recorded once, then thresholds are applied to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import InputError

SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
"""Top probabilities that are evaluated as a common threshold of all exits."""

Rule = Literal["confidence", "cosine"]
"""Value compared with a threshold: top probability of the answer, or cosine of the hidden states before and after the
loop."""


def exit_logits(loop: int) -> str:
    """Return the output name of the logits after ``loop`` in a model with several exits."""
    return f"logits_exit{loop}"


@dataclass(frozen=True)
class EarlyExit:
    """Leave at the first exit whose top probability is at least max(floor, start · decay^(loop − 1)) (paper B, eq. 6).

    The released code counts loops from zero, so loop 1 has ``start`` itself.

    Attributes:
        start: threshold at loop 1.
        floor: smallest threshold.
        decay: factor per loop.

    Raises:
        InputError: a value is out of its range.
    """

    start: float = 0.92
    floor: float = 0.80
    decay: float = 0.98

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.start), ("floor", self.floor), ("decay", self.decay)):
            if not 0 <= value <= 1:
                raise InputError(f"{name} must be between 0 and 1, not {value}")

    def thresholds(self, exits: Sequence[int]) -> dict[int, float]:
        """Return exit before the last → smallest top probability. The last exit handles the remaining rows."""
        return {loop: max(self.floor, self.start * self.decay ** (loop - 1)) for loop in exits[:-1]}


@dataclass(frozen=True)
class EarlyExitResult:
    """Mean loss (nats), accuracy (None: not recorded), mean loops, and loop → share of rows that exits there."""

    loss: float
    right: float | None
    mean_loops: float
    share: dict[str, float]


def is_confident(confidence: NDArray[np.floating], threshold: float | NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which rows exit: confidence, in the type in which it was computed, reaches the threshold."""
    return confidence >= threshold


def first_exits(
    exits: Sequence[int], confidence: NDArray[np.floating], thresholds: Mapping[int, float]
) -> NDArray[np.intp]:
    """Return the index into ``exits`` of the first exit whose confidence [exits, n] reaches its threshold, [n].

    No row exits at a loop without a threshold; every remaining row exits at the last loop.
    """
    limits = np.array([thresholds.get(loop, np.inf) for loop in exits], dtype=confidence.dtype)
    reached = is_confident(confidence, limits[:, None])
    reached[-1] = True
    first: NDArray[np.intp] = reached.argmax(axis=0)
    return first


class ExitRecords:
    """Records loss, confidence and optional values of every answer at the exits (in ascending order).

    Confidence stays in float64, as sessions compare it: rounded to float32, it could reach a threshold.
    """

    def __init__(self, exits: Sequence[int]) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must be increasing, not {list(exits)}")
        self.exits = tuple(exits)
        self._values: dict[str, dict[int, list[NDArray[Any]]]] = {
            name: {loop: [] for loop in self.exits} for name in ("losses", "confidence", "cosine", "right")
        }

    def add(
        self, loop: int, losses: NDArray[np.floating], confidence: NDArray[np.floating],
        right: NDArray[np.bool_] | None = None, cosine: NDArray[np.floating] | None = None,
    ) -> None:  # fmt: skip
        """Record the answers of the exit ``loop`` to the next rows or tokens, [n] each."""
        self._values["losses"][loop].append(losses.astype(np.float32))
        self._values["confidence"][loop].append(confidence.astype(np.float64))
        if cosine is not None:
            self._values["cosine"][loop].append(cosine.astype(np.float32))
        if right is not None:
            self._values["right"][loop].append(right)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules for which values were recorded."""
        rules: tuple[Rule, ...] = ("confidence", "cosine")
        return tuple(rule for rule in rules if any(self._values[rule].values()))

    def stacked(self, name: Literal["losses", "confidence", "cosine", "right"]) -> NDArray[Any]:
        """Return recorded values, [exits, n]. Raises ValueError: there are none, or not the same rows at every exit."""
        values = self._values[name]
        if not all(values.values()):
            raise ValueError("nothing was noted, or not at every exit")
        return np.stack([np.concatenate(values[loop]) for loop in self.exits])

    def leave(self, thresholds: Mapping[int, float], rule: Rule = "confidence") -> EarlyExitResult:
        """Let each row exit at the first loop whose value under ``rule`` reaches its threshold."""
        losses = self.stacked("losses")
        first = first_exits(self.exits, self.stacked(rule), thresholds)
        all_rows = np.arange(losses.shape[1])
        shares = np.bincount(first, minlength=len(self.exits)) / len(first)
        has_right = any(self._values["right"].values())
        return EarlyExitResult(
            loss=float(losses[first, all_rows].mean(dtype=np.float64)),
            right=float(self.stacked("right")[first, all_rows].mean()) if has_right else None,
            mean_loops=float(np.dot(shares, self.exits)),
            share={str(loop): float(share) for loop, share in zip(self.exits, shares, strict=True)},
        )
