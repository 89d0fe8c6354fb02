"""Early exit, computed offline: what every exit answered is noted once, and any thresholds are tried on those notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
"""Top probabilities that are tried as one threshold for all exits."""


Rule = Literal["confidence", "cosine"]
"""What lets one leave at an exit: the top probability of its answer; or the cosine between its hidden states before and
after that loop."""


def exit_logits(loop: int) -> str:
    """What a model that answers at several exits calls its logits after ``loop``."""
    return f"logits_exit{loop}"


@dataclass(frozen=True)
class Departures:
    """What comes of letting rows or tokens leave at the first exit that is sure enough of them.

    Attributes:
        loss: mean over all, nats.
        right: share of right answers; None where that was not noted.
        mean_loops: loops that each takes on average.
        share: loop → share of those that leave there; sums to 1.
    """

    loss: float
    right: float | None
    mean_loops: float
    share: dict[str, float]


def first_exits(exits: Sequence[int], sure: NDArray[np.floating], thresholds: Mapping[int, float]) -> NDArray[np.intp]:
    """Where each leaves, as a place in ``exits``, [n]: the first exit that is sure enough of it, or else the last one.

    Args:
        exits: loops that answer, in rising order.
        sure: top probability at each of them, [exits, n].
        thresholds: loop → threshold; nobody leaves at an exit without one, everybody at the last.
    """
    asked = np.array([thresholds.get(loop, np.inf) for loop in exits], dtype=sure.dtype)
    leaves = sure >= asked[:, None]
    leaves[-1] = True
    first: NDArray[np.intp] = leaves.argmax(axis=0)
    return first


class ExitNotes:
    """Loss, top probability and perhaps more of every answer at every exit, 12 to 17 bytes for each.

    Top probabilities are kept as they are compared when texts really leave, in float64: rounded to float32, one just
    below a threshold reaches it, and at 1 a whole crowd would leave that never does.

    Args:
        exits: loops that answer, in rising order; whoever is left leaves at the last one.
    """

    def __init__(self, exits: Sequence[int]) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must rise, not {list(exits)}")
        self.exits = tuple(exits)
        self._losses: dict[int, list[Float32s]] = {loop: [] for loop in self.exits}
        self._sure: dict[Rule, dict[int, list[NDArray[np.floating]]]] = {
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
        """Note the answers of one exit to the next rows or tokens.

        Args:
            loop: the exit.
            losses: nats, [n].
            confidence: top probability, [n].
            right: whether the likeliest answer is the right one, [n]; None throughout: not a matter of right or wrong.
            cosine: between the hidden states before and after the exit's loop, [n]; None throughout: not known.
        """
        self._losses[loop].append(losses.astype(np.float32))
        self._sure["confidence"][loop].append(confidence.astype(np.float64))
        if cosine is not None:
            self._sure["cosine"][loop].append(cosine.astype(np.float32))
        if right is not None:
            self._right[loop].append(right)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """By which :meth:`leave` can let them leave."""
        return tuple(rule for rule, noted in self._sure.items() if any(noted.values()))

    def confidences(self) -> NDArray[np.float64]:
        """Top probability of every answer, [exits, n]. Raises ValueError as :meth:`leave`."""
        return self._stacked(self._sure["confidence"])

    def rights(self) -> NDArray[np.bool_]:
        """Whether every answer is the right one, [exits, n]. Raises ValueError as :meth:`leave`, or if none can be."""
        return self._stacked(self._right)

    def leave(self, thresholds: Mapping[int, float], rule: Rule = "confidence") -> Departures:
        """Let everyone leave at the first exit whose top probability, or cosine, reaches its threshold.

        Args:
            thresholds: loop → threshold; nobody leaves at an exit without one, everybody at the last.
            rule: what is compared with it.

        Raises:
            ValueError: nothing was noted, or not the same rows at every exit.
        """
        losses = self._stacked(self._losses)
        first = first_exits(self.exits, self._stacked(self._sure[rule]), thresholds)
        everyone = np.arange(losses.shape[1])
        counts = np.bincount(first, minlength=len(self.exits)) / len(first)
        right = self._stacked(self._right)[first, everyone].mean() if any(self._right.values()) else None
        return Departures(
            loss=float(losses[first, everyone].mean(dtype=np.float64)),
            right=None if right is None else float(right),
            mean_loops=float(np.dot(counts, self.exits)),
            share={str(loop): float(count) for loop, count in zip(self.exits, counts, strict=True)},
        )

    def _stacked(self, notes: Mapping[int, Sequence[NDArray[Any]]]) -> NDArray[Any]:
        """[exits, n]."""
        if not all(notes.values()):
            raise ValueError("nothing was noted, or not at every exit")
        return np.stack([np.concatenate(notes[loop]) for loop in self.exits])
