"""Early exit, evaluated offline: the answers of every exit are recorded once; thresholds are applied to the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
"""Top probabilities that are tried as one threshold for all exits."""

Rule = Literal["confidence", "cosine"]
"""Value compared with a threshold: top probability of the answer, or cosine of the hidden states before and after the
loop."""


def exit_logits(loop: int) -> str:
    """Return the output name of the logits after ``loop`` in a model with several exits."""
    return f"logits_exit{loop}"


@dataclass(frozen=True)
class EarlyExitResult:
    """Result of early exit at given thresholds over a set of rows or tokens.

    Attributes:
        loss: mean loss, nats.
        right: share of right answers; None if it was not recorded.
        mean_loops: mean number of loops per row or token.
        share: loop → share that exits there; sums to 1.
    """

    loss: float
    right: float | None
    mean_loops: float
    share: dict[str, float]


def first_exits(
    exits: Sequence[int], confidence: NDArray[np.floating], thresholds: Mapping[int, float]
) -> NDArray[np.intp]:
    """Return the index into ``exits`` of the first exit whose confidence reaches its threshold, or the last, [n].

    Args:
        exits: loops that answer, in rising order.
        confidence: [exits, n].
        thresholds: loop → threshold. No row exits where it is missing; every remaining row exits at the last loop.
    """
    limits = np.array([thresholds.get(loop, np.inf) for loop in exits], dtype=confidence.dtype)
    reached = confidence >= limits[:, None]
    reached[-1] = True
    first: NDArray[np.intp] = reached.argmax(axis=0)
    return first


class ExitRecords:
    """Records loss, confidence and optional values of every answer at every exit; 12 to 17 bytes per answer.

    Confidence stays in float64, as sessions compare it. Rounded to float32, a value just below a threshold would reach
    it, and many values just below 1 would equal 1.

    Args:
        exits: loops that answer, in rising order; remaining rows exit at the last one.
    """

    def __init__(self, exits: Sequence[int]) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must rise, not {list(exits)}")
        self.exits = tuple(exits)
        self._losses: dict[int, list[NDArray[np.float32]]] = {loop: [] for loop in self.exits}
        self._values: dict[Rule, dict[int, list[NDArray[np.floating]]]] = {
            rule: {loop: [] for loop in self.exits} for rule in get_args(Rule)
        }
        self._right: dict[int, list[NDArray[np.bool_]]] = {loop: [] for loop in self.exits}

    def add(
        self,
        loop: int,
        losses: NDArray[np.floating],
        confidence: NDArray[np.floating],
        right: NDArray[np.bool_] | None = None,
        cosine: NDArray[np.floating] | None = None,
    ) -> None:
        """Record the answers of one exit to the next rows or tokens.

        Args:
            loop: the exit.
            losses: nats, [n].
            confidence: top probability, [n].
            right: whether the likeliest answer is right, [n]; None in all calls: not applicable.
            cosine: cosine of the hidden states before and after the loop, [n]; None in all calls: unknown.
        """
        self._losses[loop].append(losses.astype(np.float32))
        self._values["confidence"][loop].append(confidence.astype(np.float64))
        if cosine is not None:
            self._values["cosine"][loop].append(cosine.astype(np.float32))
        if right is not None:
            self._right[loop].append(right)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules for which values were recorded."""
        return tuple(rule for rule, values in self._values.items() if any(values.values()))

    def confidences(self) -> NDArray[np.float64]:
        """Return the top probability of every answer, [exits, n]. Raises ValueError as :meth:`leave`."""
        return self._stack(self._values["confidence"])

    def rights(self) -> NDArray[np.bool_]:
        """Return whether every answer is right, [exits, n]. Raises ValueError as :meth:`leave`."""
        return self._stack(self._right)

    def leave(self, thresholds: Mapping[int, float], rule: Rule = "confidence") -> EarlyExitResult:
        """Let each row exit at the first loop whose value under ``rule`` reaches its threshold.

        Args:
            thresholds: loop → threshold, see :func:`first_exits`.

        Raises:
            ValueError: no answers were recorded, or not the same rows at every exit.
        """
        losses = self._stack(self._losses)
        first = first_exits(self.exits, self._stack(self._values[rule]), thresholds)
        all_rows = np.arange(losses.shape[1])
        shares = np.bincount(first, minlength=len(self.exits)) / len(first)
        has_right = any(self._right.values())
        return EarlyExitResult(
            loss=float(losses[first, all_rows].mean(dtype=np.float64)),
            right=float(self._stack(self._right)[first, all_rows].mean()) if has_right else None,
            mean_loops=float(np.dot(shares, self.exits)),
            share={str(loop): float(share) for loop, share in zip(self.exits, shares, strict=True)},
        )

    def _stack(self, values: Mapping[int, Sequence[NDArray[Any]]]) -> NDArray[Any]:
        """Return the values as [exits, n]."""
        if not all(values.values()):
            raise ValueError("nothing was noted, or not at every exit")
        return np.stack([np.concatenate(values[loop]) for loop in self.exits])
