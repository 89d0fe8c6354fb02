"""Early exit with a guarantee: thresholds that limit the score drop to ε with confidence 1 − δ.

Method: Learn then Test (Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test: Calibrating Predictive
Algorithms to Achieve Risk Control", 2021, arXiv:2110.01052). For early exit see Schuster et al., "Confident Adaptive
Language Modeling", 2022, and Jazbec et al., "Fast yet Safe: Early-Exiting with Risk Control", 2024.

Every candidate threshold is a null hypothesis "the score falls by more than ε", which calibration rows have to reject.
Candidates are tested in a fixed sequence that starts with the strictest threshold and stops at the first hypothesis
that is not rejected, so a sequence needs no more than its share of δ (fixed-sequence testing, section 4.2). There is
one sequence per first exit, because an early exit may be useless where a later one is good; the sequences share δ
evenly. The guarantee covers all rejected candidates at once, so the cheapest of them may be used.

The loss is the difference of two 0/1 losses of the same row. The test is the exact unconditional test of paired
proportions (Hsueh, Liu and Chen, Biometrics 57, 2001): the probability of a net loss as small as observed, or smaller,
if the score fell by ε. It depends on the share of rows whose two answers differ. The p-value is the largest probability
within an exact confidence interval of that share, plus the error of the interval (Berger and Boos, JASA 89, 1994).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
"""Candidate thresholds in test order, fixed before any row is evaluated."""

_INTERVAL_ERROR = 0.001
"""Error γ of the interval of the share of rows whose answers differ; part of every p-value (Berger and Boos)."""

_MAX_ROWS = 200_000


@dataclass(frozen=True)
class Guarantee:
    """The cheapest thresholds with a score drop of at most ε."""

    thresholds: dict[int, float]  # loop → smallest top probability at which a row exits; empty: no row exits early
    lost: int  # newly wrong rows: correct with all loops, wrong with early exit
    won: int  # newly correct rows
    p_value: float  # of the hypothesis that the score drops by more than ε
    level: float  # that rejects it
    shares: tuple[float, ...]  # of the rows that exit at each exit
    stopped_by: tuple[int, int] | None  # ``lost`` and ``won`` of the first candidate not rejected; None: all were


def choose_thresholds(
    exits: Sequence[int], confidence: NDArray[Any], right: NDArray[np.bool_], max_drop: float, risk: float
) -> Guarantee | None:
    """Choose the cheapest thresholds that control the score drop, by Learn then Test; None: too few rows.

    Args:
        exits: loops that answer, in ascending order.
        confidence, right: top probability of every answer and whether it is right, [exits, n].
        max_drop: ε, the allowed drop of the share of right answers against the last exit.
        risk: δ, the probability that the guarantee is wrong.
    """
    sequences = [exits[place:-1] for place in range(len(exits) - 1)]
    level, full, all_rows = risk / len(sequences), right[-1], np.arange(right.shape[1])
    best: Guarantee | None = None
    for early_exits in sequences:
        candidate: Guarantee | None = None
        for threshold in THRESHOLDS:
            thresholds = dict.fromkeys(early_exits, threshold)
            first = first_exits(exits, confidence, thresholds)
            early = right[first, all_rows]
            newly_wrong, newly_right = int((full & ~early).sum()), int((early & ~full).sum())
            p_value = drop_p_value(newly_wrong, newly_right, len(full), max_drop)
            if p_value > level:
                if candidate is not None:
                    candidate = replace(candidate, stopped_by=(newly_wrong, newly_right))
                break
            shares = np.bincount(first, minlength=len(exits)) / len(first)
            used = thresholds if shares[:-1].any() else {}
            candidate = Guarantee(used, newly_wrong, newly_right, p_value, level, tuple(shares.tolist()), None)
        if candidate is not None and (best is None or np.dot(candidate.shares, exits) < np.dot(best.shares, exits)):
            best = candidate
    return best


@lru_cache(maxsize=4096)
def drop_p_value(newly_wrong: int, newly_right: int, rows: int, max_drop: float) -> float:
    """Return the p-value of the hypothesis that the share of right answers falls by ``max_drop`` or more.

    Exact unconditional test (Hsueh, Liu and Chen) with a restricted nuisance parameter (Berger and Boos). Rows have to
    be independent of each other and of the model.
    """
    low, high = share_interval(newly_wrong + newly_right, rows, _INTERVAL_ERROR / 2)
    if high < max_drop:  # too few rows differ for such a drop
        return _INTERVAL_ERROR
    largest, net = 0.0, newly_wrong - newly_right
    for share in np.linspace(max(low, max_drop), high, 17).tolist():  # the probability is smooth in between
        # P(newly wrong − newly right ≤ net) if a share of rows differs: differing rows D are binomial (rows, share); of
        # them, the newly wrong ones are binomial (D, (1 + max_drop / share) / 2).
        spread = 12 * np.sqrt(rows * share * (1 - share)) + 40
        differing = np.arange(max(0, int(rows * share - spread)), min(rows, int(rows * share + spread)) + 1)
        weights = np.exp(_log_binomial(differing, rows, share))
        differing, weights = differing[weights > 1e-13], weights[weights > 1e-13]
        max_wrong = np.floor((net + differing) / 2).astype(np.int64)
        wrong = np.arange(int(differing.max()) + 1)[:, None]
        terms = np.exp(_log_binomial(wrong, differing[None, :], (1 + max_drop / share) / 2))
        cumulative = np.where(wrong <= max_wrong[None, :], terms, 0.0).sum(axis=0)
        # Omitted weights count with probability 1, which can only raise the p-value.
        largest = max(largest, float((weights * cumulative).sum() + max(0.0, 1 - weights.sum())))
    return min(1.0, _INTERVAL_ERROR + largest)


def rows_needed(max_drop: float, level: float, newly_wrong: int = 0, newly_right: int = 0, rows: int = 1) -> int | None:
    """Return the smallest number of rows, within 0.5%, with which a candidate passes; None: its drop is too large.

    The shares of the candidate's result are kept; by default no answer differs, so fewer rows cannot reject anything.
    """

    def passes(count: int) -> bool:
        scale = count / rows
        return drop_p_value(round(newly_wrong * scale), round(newly_right * scale), count, max_drop) <= level

    if (newly_wrong - newly_right) / rows >= max_drop:
        return None
    high = rows
    while not passes(high):
        high *= 2
        if high > _MAX_ROWS:
            return None
    low = high // 2 if high > rows else rows - 1
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


@lru_cache(maxsize=256)
def share_interval(hits: int, rows: int, error: float) -> tuple[float, float]:
    """Return the interval of a share that misses it with probability ``error`` on each side (Clopper and Pearson)."""
    # Not scipy.stats.binomtest: `profile` and `exits` run on devices, and the base installation has no scipy.
    ends = [0.0, 1.0]
    for end, count in enumerate((rows - hits, hits)):
        if count == rows:  # the interval reaches 0 or 1
            continue
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            share = middle if end else 1 - middle
            probability = float(np.exp(_log_binomial(np.arange(count + 1), rows, share)).sum())
            low, high = (middle, high) if (probability > error) == bool(end) else (low, middle)
        ends[end] = high
    return ends[0], ends[1]


def _log_binomial(hits: NDArray[Any], rows: Any, share: float) -> NDArray[np.float64]:
    """Return the log-probability of ``hits`` among ``rows``; −∞ for more hits than rows."""
    table, misses = _log_factorials(int(np.max(rows))), np.asarray(rows) - hits
    possible = misses >= 0
    misses = np.where(possible, misses, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.where(hits > 0, hits * np.log(share), 0.0) + np.where(misses > 0, misses * np.log1p(-share), 0.0)
    log_probability = table[rows] - table[np.where(possible, hits, 0)] - table[misses] + odds
    return np.where(possible, log_probability, -np.inf)


@lru_cache(maxsize=4)
def _log_factorials(largest: int) -> NDArray[np.float64]:
    """Return the table of log n! for 0 ≤ n ≤ largest."""
    size = 1 << max(10, largest.bit_length())
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])


def bootstrap_interval(statistic: Callable[[NDArray[np.int64]], float], rows: int) -> tuple[float, float]:
    """Return a 95% percentile bootstrap interval of a statistic over rows (Efron and Tibshirani, 1993, section 13.3).

    ``statistic`` gets row numbers, int64 [rows], some of them repeated; there are 1,000 resamples.
    """
    samples = np.random.default_rng(0).integers(0, rows, size=(1000, rows))
    low, high = np.percentile([statistic(numbers) for numbers in samples], [2.5, 97.5])
    return float(low), float(high)
