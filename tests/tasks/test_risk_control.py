"""Thresholds with a guarantee: the test is exact, and what is promised holds as often as was promised."""

from __future__ import annotations

from math import lgamma, log

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from edgeformer.tasks.risk_control import (
    THRESHOLDS,
    Promise,
    bootstrap_interval,
    drop_p_value,
    promise,
    rows_needed,
    rows_that_would_do,
    share_interval,
)

ROWS = 24


def chance(lost: int, won: int, rows: int, losing: float, winning: float) -> float:
    """Of so many rows so many are lost and won: the multinomial distribution, written out."""
    same = rows - lost - won
    total = lgamma(rows + 1) - lgamma(lost + 1) - lgamma(won + 1) - lgamma(same + 1)
    for count, share in ((lost, losing), (won, winning), (same, 1 - losing - winning)):
        if count and share <= 0:
            return 0.0
        total += count * log(share) if count else 0.0
    return float(np.exp(total))


FALL, LEVEL = 0.25, 0.1
PASSING = [
    (lost, won)
    for lost in range(ROWS + 1)
    for won in range(ROWS + 1 - lost)
    # A loss of 25 % is never ruled out by a loss of more than 12.5 %: that saves most of the work.
    if lost - won <= 3 and drop_p_value(lost, won, ROWS, FALL) <= LEVEL
]


@pytest.mark.parametrize("winning", [0.0, 0.01, 0.05, 0.2, 0.3])
def test_a_fall_that_is_too_large_passes_as_rarely_as_was_promised(winning: float) -> None:
    """Exactly, over all outcomes of 24 rows: at the boundary, where the test is most easily deceived, and beyond."""
    for fall in (FALL, 0.35):
        assert sum(chance(lost, won, ROWS, fall + winning, winning) for lost, won in PASSING) <= LEVEL
    assert drop_p_value(4, 0, ROWS, FALL) > LEVEL, "what PASSING leaves out does not pass"


def test_the_test_is_not_blind() -> None:
    """What costs nothing passes mostly, although answers differ; what is nearly too large does so rarely."""
    assert sum(chance(lost, won, ROWS, 0.03, 0.03) for lost, won in PASSING) > 0.75
    assert sum(chance(lost, won, ROWS, FALL + 0.01, 0.01) for lost, won in PASSING) > LEVEL / 10


def test_p_values_are_those_of_the_distribution_written_out() -> None:
    """At least the chance at any share of differing answers that the interval allows."""
    lost, won, rows, fall = 3, 2, 60, 0.2
    found = drop_p_value(lost, won, rows, fall)
    reached = max(
        sum(
            chance(more, less, rows, (share + fall) / 2, (share - fall) / 2)
            for more in range(rows + 1)
            for less in range(rows + 1 - more)
            if more - less <= lost - won
        )
        for share in (0.2, 0.22, 0.25)
    )
    assert reached <= found <= 2 * reached + 0.002
    assert drop_p_value(4, 1, rows, fall) > found > drop_p_value(2, 3, rows, fall)


def test_rows_that_are_needed() -> None:
    """Of one share with no row lost: more than the binomial's ln δ / ln(1 − ε), which knows that none is won."""
    needed = rows_needed(0.05, 0.05)
    assert 59 < needed < 110
    assert drop_p_value(0, 0, needed, 0.05) <= 0.05 < drop_p_value(0, 0, needed - 2, 0.05)
    assert (rows_needed(0.01, 0.05), rows_needed(0.005, 0.05)) == (482, 964), "docs/deploy.md says so"
    enough = rows_that_would_do(6, 4, 400, 0.01, 0.05)
    assert enough is not None and enough > 400
    assert drop_p_value(round(6 * enough / 400), round(4 * enough / 400), enough, 0.01) <= 0.05
    assert rows_that_would_do(9, 4, 400, 0.01, 0.05) is None, "it costs more than 1 %"


def model(rows: int, seed: int, wrong_early: float) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Two exits: the first is wrong on top in a share of the rows, which grows as it is less sure. [2, n] each."""
    drawn = np.random.default_rng(seed)
    sure = drawn.uniform(0.5, 1, size=rows)
    full = drawn.random(rows) < 0.85
    other = drawn.random(rows) < wrong_early * 2 * (1 - sure)
    return np.stack([sure, np.ones(rows)]).astype(np.float32), np.stack([full ^ other, full])


def found_in(rows: int, seed: int, max_drop: float = 0.03) -> Promise | None:
    sure, right = model(rows, seed, 0.4)
    return promise((1, 2), sure, right, max_drop, 0.1)


def test_promises_hold() -> None:
    """Of 100 draws of held-out rows no more than δ, and what chance adds, choose thresholds that cost too much."""
    sure, right = model(200_000, 7, 0.4)
    lost = {
        threshold: float(right[1].mean() - np.where(sure[0] >= threshold, right[0], right[1]).mean())
        for threshold in THRESHOLDS
    }
    assert max(lost.values()) > 0.1, "leaving at once costs too much, or nothing could be broken"
    found = [found_in(500, seed) for seed in range(100)]
    thresholds = [one.thresholds[1] for one in found if one is not None and one.thresholds]
    assert len(thresholds) > 80 and min(thresholds) < 0.9
    assert sum(lost[threshold] > 0.03 for threshold in thresholds) <= 17  # 99.5 % of all hundreds, at δ = 10 %


def test_more_rows_let_more_leave() -> None:
    few, many = found_in(200, 1), found_in(6000, 1)
    assert few is not None and many is not None
    assert many.shares[0] > few.shares[0]
    assert found_in(60, 1) is None, "too few to show anything"
    nothing = found_in(500, 1, max_drop=0.001)
    assert nothing is None


def test_an_exit_that_is_sure_and_wrong_is_passed_over() -> None:
    """One threshold for all would stop at the first exit's mistakes; a sequence begins behind it."""
    rows = 2000
    drawn = np.random.default_rng(3)
    full = drawn.random(rows) < 0.9
    sure = np.stack([np.full(rows, 0.999), drawn.uniform(0.7, 1, rows), np.ones(rows)]).astype(np.float32)
    right = np.stack([drawn.random(rows) < 0.5, full, full])
    found = promise((2, 4, 6), sure, right, 0.02, 0.05)
    assert found is not None and set(found.thresholds) == {4}
    assert found.shares[0] == 0 and found.shares[1] > 0.9
    assert found.level == 0.025 and found.lost == found.won == 0


def test_nobody_leaves_is_told_apart_from_nothing_shown() -> None:
    """Enough rows, and an exit that is as sure as the last one and wrong: the first candidate that costs is named."""
    rows = 1000
    full = np.ones(rows, dtype=bool)
    sure = np.stack([np.full(rows, 0.95), np.ones(rows)]).astype(np.float32)
    found = promise((1, 2), sure, np.stack([~full, full]), 0.02, 0.05)
    assert found is not None and found.thresholds == {} and found.stopped_by == (rows, 0)


@pytest.mark.parametrize(("hits", "rows"), [(393, 422), (0, 5), (5, 5), (1, 1), (930, 1000), (17, 40)])
def test_the_interval_of_a_share_is_the_exact_one(hits: int, rows: int) -> None:
    expected = binomtest(hits, rows).proportion_ci(0.95, method="exact")
    assert share_interval(hits, rows, 0.025) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = np.random.default_rng(7).normal(5.0, 2.0, 400)
    low, high = bootstrap_interval(lambda rows: values[rows].mean(), len(values))
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.05) and high == pytest.approx(
        values.mean() + half, abs=0.05
    )
    assert bootstrap_interval(lambda rows: values[rows].sum() / values[rows].sum(), len(values)) == (1.0, 1.0)
