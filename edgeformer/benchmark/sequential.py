"""A sequential test that asks of a growing sample again and again, and still errs as seldom as it says.

The sample holds one log ratio per round, candidate to baseline, each from two fresh processes. Asked is its median: a
round in which the machine hiccupped may be as far off as it likes. A round's ratio lies above the true median as often
as below, whatever its distribution, so the number of ratios above it is a fair coin's, and the interval between the
order statistics that a fair coin passes too seldom holds the median (the interval of the sign test). Looking after
every second round would spend the error many times over; it is spread over the looks by an error spending function,
in the form that comes close to Pocock's constant boundaries (Lan and DeMets, Discrete sequential boundaries for
clinical trials, Biometrika 70, 1983), and the chance to have crossed any boundary is counted exactly. Howard and Ramdas
(Sequential estimation of quantiles, Bernoulli 28, 2022) have such intervals without an end; a gate has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import e, exp, inf, log
from typing import Literal

import numpy as np

ERROR = 0.05
"""The chance that any interval of a run ever misses the truth, for all that one gate measures together."""
FEWEST_ROUNDS, MOST_ROUNDS, EVERY = 6, 60, 2
"""Looked at after every second round: one of each order of the two."""

Change = Literal["slower", "faster", "no different", "not known"]
Decision = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class Interval:
    """What is known of the slowdown: 0.1 is 10 % more time. Its ends hold together over all looks of a run."""

    middle: float
    low: float
    high: float

    @property
    def ends(self) -> dict[str, float]:
        """``low`` and ``high``; empty where the sample is too small to have any."""
        return {"low": self.low, "high": self.high} if self.high < inf and self.low > -1 else {}

    def change(self, most: float) -> Change:
        """What can be said of the direction.

        No different is what lies within half of the slowdown that is allowed, to either side: an interval that merely
        holds zero may hold a tenth more as well.

        Args:
            most: the largest slowdown that is allowed, e.g. 0.05.
        """
        if self.low > 0:
            return "slower"
        if self.high < 0:
            return "faster"
        return "no different" if -most / 2 < self.low and self.high < most / 2 else "not known"

    def decision(self, most: float) -> Decision:
        """Against the largest slowdown that is allowed.

        A small slowdown is either found, or known to be less than half of what is allowed; else the next round is
        needed. So a candidate that is slower by a part of what is allowed is not waved through unseen.

        Args:
            most: the largest slowdown that is allowed, e.g. 0.05.
        """
        if self.low > most:
            return "fail"
        if self.high < most and (self.low > 0 or self.high < most / 2):
            return "pass"
        return "undecided"


def interval(log_ratios: Sequence[float], error: float = ERROR) -> Interval:
    """The median slowdown and the interval that holds it at this look and at all others of the run.

    Args:
        log_ratios: candidate to baseline, one per round, in the order in which they were measured.
        error: the chance that an interval of the run misses it.

    Returns:
        Without ends (0 to infinity as a ratio) where the sample is too small to have any.
    """
    count = min(len(log_ratios), MOST_ROUNDS) // EVERY * EVERY  # only at those was the error counted
    ordered = sorted(log_ratios[:count])
    beyond = _boundaries(error).get(count, -1)
    ends = (ordered[beyond], ordered[count - 1 - beyond]) if beyond >= 0 else (-inf, inf)
    middle = float(np.median(ordered)) if ordered else 0.0
    low, high = (exp(end) - 1 if end < inf else inf for end in ends)
    return Interval(exp(middle) - 1, low, high)


def fewest_rounds(error: float = ERROR) -> int:
    """Rounds before which no interval has ends; the smaller the error, the more.

    Args:
        error: the chance that an interval of the run misses.
    """
    return min(_boundaries(error), default=MOST_ROUNDS)


@lru_cache(maxsize=16)
def _boundaries(error: float) -> dict[int, int]:
    """Look (a number of rounds) → boundary: ``heads <= boundary`` of a fair coin ends on one side.

    Counted is the chance of every number of heads among the sequences that no earlier look has ended. Both sides may
    be crossed, so each gets half of the error.
    """
    found: dict[int, int] = {}
    alive, spent = np.ones(1), 0.0
    for rounds in range(1, MOST_ROUNDS + 1):
        alive = (np.append(alive, 0.0) + np.append(0.0, alive)) / 2
        if rounds < FEWEST_ROUNDS or rounds % EVERY:
            continue
        allowed = error / 2 * log(1 + (e - 1) * rounds / MOST_ROUNDS)
        passed = spent + np.cumsum(alive)
        boundary = int(np.searchsorted(passed, allowed, side="right")) - 1
        if boundary >= 0:
            found[rounds], spent = boundary, float(passed[boundary])
            alive[: boundary + 1] = 0.0
    return found
