"""Sequential test: looks at a growing sample repeatedly and keeps its stated chance of an error.

The sample holds one log ratio per round, candidate to baseline, each from two fresh processes. The test concerns its
median, so a disturbed round may be far off. A round's ratio lies above the true median as often as below, whatever its
distribution: the number of ratios above it is that of a fair coin, and the interval between the order statistics that a
fair coin passes rarely enough holds the median (the interval of the sign test). A look after every second round would
spend the error many times; an error spending function spreads it over the looks, in the form that approximates Pocock's
constant boundaries (Lan and DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70, 1983). The
chance of having crossed any boundary is counted exactly. Howard and Ramdas (Sequential estimation of quantiles,
Bernoulli 28, 2022) have such intervals for samples without an end.
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
"""A look after every second round: one of each order of the two sides."""

Change = Literal["slower", "faster", "no different", "not known"]
Decision = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class Interval:
    """The slowdown, 0.1 for 10 % more time, and an interval that holds it at all looks of a run together."""

    middle: float
    low: float
    high: float

    @property
    def ends(self) -> dict[str, float]:
        """``low`` and ``high``; empty if the sample is too small for them."""
        return {"low": self.low, "high": self.high} if self.high < inf and self.low > -1 else {}

    def change(self, limit: float) -> Change:
        """Return the direction of the change.

        No different is an interval within half of the allowed slowdown to either side: one that merely holds zero may
        hold a tenth more as well.

        Args:
            limit: the largest slowdown that is allowed, e.g. 0.05.
        """
        if self.low > 0:
            return "slower"
        if self.high < 0:
            return "faster"
        return "no different" if -limit / 2 < self.low and self.high < limit / 2 else "not known"

    def decision(self, limit: float) -> Decision:
        """Decide whether the slowdown is at most ``limit``, e.g. 0.05.

        A pass requires that a small slowdown is either detected or known to be less than half of ``limit``. So a
        candidate that is slower by a part of ``limit`` does not pass undetected.
        """
        if self.low > limit:
            return "fail"
        if self.high < limit and (self.low > 0 or self.high < limit / 2):
            return "pass"
        return "undecided"


def interval(log_ratios: Sequence[float], error: float = ERROR) -> Interval:
    """Return the median slowdown and the interval that holds it at this look and at all others of the run.

    Args:
        log_ratios: candidate to baseline, one per round, in the order in which they were measured.
        error: the chance that an interval of the run misses it.

    Returns:
        Without ends (0 to infinity as a ratio) if the sample is too small for them.
    """
    count = min(len(log_ratios), MOST_ROUNDS) // EVERY * EVERY  # the error is counted at these looks only
    ordered = sorted(log_ratios[:count])
    boundary = _boundaries(error).get(count, -1)
    ends = (ordered[boundary], ordered[count - 1 - boundary]) if boundary >= 0 else (-inf, inf)
    middle = float(np.median(ordered)) if ordered else 0.0
    low, high = (exp(end) - 1 if end < inf else inf for end in ends)
    return Interval(exp(middle) - 1, low, high)


def fewest_rounds(error: float = ERROR) -> int:
    """Return the number of rounds before which no interval has ends; the smaller the ``error``, the more."""
    return min(_boundaries(error), default=MOST_ROUNDS)


@lru_cache(maxsize=16)
def _boundaries(error: float) -> dict[int, int]:
    """Map a look (number of rounds) to its boundary: ``heads <= boundary`` of a fair coin ends on one side.

    Counts the chance of every number of heads among the sequences that no earlier look has ended. Both sides may be
    crossed, so each gets half of the error.
    """
    boundaries: dict[int, int] = {}
    alive, spent = np.ones(1), 0.0
    for rounds in range(1, MOST_ROUNDS + 1):
        alive = (np.append(alive, 0.0) + np.append(0.0, alive)) / 2
        if rounds < FEWEST_ROUNDS or rounds % EVERY:
            continue
        allowed = error / 2 * log(1 + (e - 1) * rounds / MOST_ROUNDS)
        passed = spent + np.cumsum(alive)
        boundary = int(np.searchsorted(passed, allowed, side="right")) - 1
        if boundary >= 0:
            boundaries[rounds], spent = boundary, float(passed[boundary])
            alive[: boundary + 1] = 0.0
    return boundaries
