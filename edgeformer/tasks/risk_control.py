"""Early exit with a guarantee: thresholds under which the score falls by at most ε, with confidence 1 − δ.

Learn then Test (Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test: Calibrating Predictive Algorithms to
Achieve Risk Control", 2021, arXiv:2110.01052; for early exit: Schuster et al., "Confident Adaptive Language Modeling",
2022, and Jazbec et al., "Fast yet Safe: Early-Exiting with Risk Control", 2024). Every candidate is a hypothesis "the
score falls by more than ε", which held-out rows have to reject. Candidates stand in sequences that begin with what
lets nobody leave; each sequence is tested in its order and ends at the first hypothesis that stands, so that a whole
sequence needs no more than its share of δ (fixed-sequence testing, section 4.2 there). There is one sequence per first
exit, as an early one may be useless where a later one is good, and they share δ evenly. All that was rejected is
promised at once, so that the cheapest of it may be taken.

The loss is a difference of two 0/1 losses of the same row, in {−1, 0, 1}. Hoeffding–Bentkus, which knows its range
only, would need some 15,000 rows for ε = 1 %; an exact binomial bound of the rows that are lost forgets those that are
won. So the test is the unconditional exact one of paired proportions (Hsueh, Liu and Chen, Biometrics 57, 2001): the
chance of a net loss as small as the one seen, or smaller, if the score fell by ε. That depends on the share of rows
whose two answers differ, so the largest chance within an exact confidence interval of that share counts, and the
interval's own error is added (Berger and Boos, JASA 89, 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.tasks.early_exit import first_exits

METHOD = "Learn then Test, fixed sequences, exact unconditional test of paired answers"

THRESHOLDS = (
    *(1.0, 0.9999, 0.9995, 0.999, 0.998, 0.997, 0.995, 0.9925),
    *(round(0.99 - 0.005 * step, 4) for step in range(18)),
    *(round(0.9 - 0.02 * step, 4) for step in range(31)),
)
"""Top probabilities that are tried, in this order: they are fixed before a row is seen."""

_OUTSIDE = 0.001
"""Error of the interval of the share of rows whose answers differ; a part of every p-value."""

_PLACES = 17
"""Shares that are tried in that interval, its ends among them; the chance changes smoothly in between."""

_NEGLIGIBLE = 1e-13
_MOST_ROWS = 10_000_000
_RESAMPLES = 1000


@dataclass(frozen=True)
class Promise:
    """The cheapest thresholds whose cost was shown to be at most ε.

    Attributes:
        thresholds: loop → smallest top probability that lets a row leave; empty: nobody may leave.
        lost: rows that are right with all loops and wrong with early exit.
        won: rows that are wrong with all loops and right with early exit.
        p_value: of the hypothesis that the score falls by more than ε.
        level: that it had to reach.
        shares: of the rows that leave at each exit.
        stopped_by: lost and won of the first candidate that could not be shown, of the sequence that was taken; None:
            all could.
    """

    thresholds: dict[int, float]
    lost: int
    won: int
    p_value: float
    level: float
    shares: tuple[float, ...]
    stopped_by: tuple[int, int] | None


def promise(
    exits: Sequence[int], sure: NDArray[Any], right: NDArray[np.bool_], max_drop: float, risk: float
) -> Promise | None:
    """Choose thresholds.

    Args:
        exits: loops that answer, in rising order.
        sure: top probability of every answer, [exits, n].
        right: whether it is the right one, [exits, n].
        max_drop: ε, of the share of right answers, against that of the last exit.
        risk: δ, of promising something that does not hold.

    Returns:
        None: nothing at all can be shown: there are too few rows (:func:`rows_needed`).
    """
    sequences = exits[:-1]
    best: Promise | None = None
    for first in sequences:
        found = _sequence(exits, sure, right, first, (max_drop, risk / len(sequences)))
        if found is not None and (best is None or _loops(exits, found) < _loops(exits, best)):
            best = found
    return best


def _loops(exits: Sequence[int], found: Promise) -> float:
    return float(np.dot(found.shares, exits))


def _sequence(
    exits: Sequence[int], sure: NDArray[Any], right: NDArray[np.bool_], first: int, bars: tuple[float, float]
) -> Promise | None:
    """The last of the candidates before the first that fails. ``bars``: ε, and what a p-value has to reach."""
    everyone, (max_drop, level) = np.arange(right.shape[1]), bars
    best: Promise | None = None
    for threshold in THRESHOLDS:
        thresholds = {loop: threshold for loop in exits[:-1] if loop >= first}
        leaving = first_exits(exits, sure, thresholds)
        early, full = right[leaving, everyone], right[-1]
        lost, won = int((full & ~early).sum()), int((early & ~full).sum())
        p_value = drop_p_value(lost, won, len(full), max_drop)
        if p_value > level:
            return None if best is None else Promise(**{**vars(best), "stopped_by": (lost, won)})
        shares = np.bincount(leaving, minlength=len(exits)) / len(leaving)
        kept = thresholds if shares[:-1].any() else {}
        best = Promise(kept, lost, won, p_value, level, tuple(shares.tolist()), None)
    return best


@lru_cache(maxsize=4096)
def drop_p_value(lost: int, won: int, rows: int, max_drop: float) -> float:
    """p-value of the hypothesis that the share of right answers falls by ``max_drop`` or more.

    Args:
        lost: rows that the cheaper answer gets wrong and the full one right.
        won: the reverse.
        rows: all of them, independent of each other and of the model.
        max_drop: in 0…1, without the ends.
    """
    low, high = share_interval(lost + won, rows, _OUTSIDE / 2)
    if high < max_drop:  # answers differ too rarely for such a fall
        return _OUTSIDE
    shares = np.linspace(max(low, max_drop), high, _PLACES)
    return min(1.0, _OUTSIDE + max(_chance(lost - won, rows, float(share), max_drop) for share in shares))


def rows_needed(max_drop: float, level: float) -> int:
    """The fewest rows with which anything can be shown: if on none of them the answers differ."""
    return _fewest(lambda rows: drop_p_value(0, 0, rows, max_drop) <= level, 1) or _MOST_ROWS


def rows_that_would_do(lost: int, won: int, rows: int, max_drop: float, level: float) -> int | None:
    """Rows with which a candidate would pass, if the same shares were lost and won. None: it costs more than that."""

    def passes(count: int) -> bool:
        scale = count / rows
        return drop_p_value(round(lost * scale), round(won * scale), count, max_drop) <= level

    return _fewest(passes, rows) if (lost - won) / rows < max_drop else None


def _fewest(passes: Any, least: int) -> int | None:
    high = least
    while not passes(high):
        high *= 2
        if high > _MOST_ROWS // 50:
            return None
    low = high // 2 if high > least else least - 1
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def _chance(net: int, rows: int, share: float, drop: float) -> float:
    """P(lost − won ≤ net), if a ``share`` of the rows differs and the score falls by ``drop`` ≤ ``share``."""
    spread = 12 * np.sqrt(rows * share * (1 - share)) + 40
    differ = np.arange(max(0, int(rows * share - spread)), min(rows, int(rows * share + spread)) + 1)
    weights = np.exp(_log_binomial(differ, rows, share))
    differ, weights = differ[weights > _NEGLIGIBLE], weights[weights > _NEGLIGIBLE]
    most = np.floor((net + differ) / 2).astype(np.int64)  # of the rows that differ, so many are lost at most
    least_lost = np.arange(int(differ.max()) + 1)[:, None]
    terms = np.exp(_log_binomial(least_lost, differ[None, :], (1 + drop / share) / 2))
    below = np.where(least_lost <= most[None, :], terms, 0.0).sum(axis=0)
    # What was left out of the weights counts as if it were below: never to the promise's advantage.
    return float((weights * below).sum() + max(0.0, 1 - weights.sum()))


@lru_cache(maxsize=256)
def share_interval(hits: int, rows: int, error: float) -> tuple[float, float]:
    """Return the exact confidence interval of a share (Clopper and Pearson).

    Args:
        hits: rows that count, 0 to ``rows``.
        rows: all of them, at least 1.
        error: chance that the interval misses the share, on each side.
    """
    # Not scipy.stats.binomtest: `profile` and `exits` run on devices, and the base installation has no scipy.
    low = 0.0 if hits == 0 else _where(lambda share: _at_most(rows - hits, rows, 1 - share) <= error)
    high = 1.0 if hits == rows else _where(lambda share: _at_most(hits, rows, share) > error)
    return low, high


def bootstrap_interval(statistic: Callable[[NDArray[np.int64]], float], rows: int) -> tuple[float, float]:
    """Return a 95 % interval of a statistic over rows, by resampling the rows.

    Args:
        statistic: of the rows with these numbers, int64 [rows]; some appear several times.
        rows: how many there are.
    """
    drawn = np.random.default_rng(0).integers(0, rows, size=(_RESAMPLES, rows))
    low, high = np.percentile([statistic(numbers) for numbers in drawn], [2.5, 97.5])
    return float(low), float(high)


def _where(holds: Any) -> float:
    """The share up to which something holds that does not above it."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def _at_most(hits: int, rows: int, share: float) -> float:
    return float(np.exp(_log_binomial(np.arange(hits + 1), rows, share)).sum())


def _log_binomial(hits: NDArray[Any], rows: Any, share: float) -> NDArray[np.float64]:
    """Logarithm of the chance of ``hits`` among ``rows``; −∞ where there are more hits than rows."""
    table, misses = _log_factorials(int(np.max(rows))), np.asarray(rows) - hits
    possible = misses >= 0
    misses = np.where(possible, misses, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.where(hits > 0, hits * np.log(share), 0.0) + np.where(misses > 0, misses * np.log1p(-share), 0.0)
    found = table[rows] - table[np.where(possible, hits, 0)] - table[misses] + odds
    return np.where(possible, found, -np.inf)


@lru_cache(maxsize=4)
def _log_factorials(most: int) -> NDArray[np.float64]:
    size = 1 << max(10, most.bit_length())
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
