"""Early exit with a guarantee: the test is exact, and guarantees hold as often as stated."""

from math import lgamma, log

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from edgeformer.tasks import risk_control
from edgeformer.tasks.risk_control import Guarantee, choose_thresholds, drop_p_value, rows_needed

ROWS, DROP, LEVEL = 24, 0.25, 0.1
ACCEPTED = [
    (newly_wrong, newly_right)
    for newly_wrong in range(ROWS + 1)
    for newly_right in range(ROWS + 1 - newly_wrong)
    # A drop of 25% is never rejected by an observed drop above 12.5%: this saves most of the work.
    if newly_wrong - newly_right <= 3 and drop_p_value(newly_wrong, newly_right, ROWS, DROP) <= LEVEL
]


def outcome_probability(counts: tuple[int, int], rows: int, shares: tuple[float, float]) -> float:
    """Multinomial probability of newly wrong and newly right ``counts`` if these are their ``shares``."""
    total = lgamma(rows + 1)
    for count, share in zip((*counts, rows - sum(counts)), (*shares, 1 - sum(shares)), strict=True):
        if count and share <= 0:
            return 0.0
        total += (count * log(share) if count else 0.0) - lgamma(count + 1)
    return float(np.exp(total))


@pytest.mark.parametrize("right_share", [0.0, 0.01, 0.05, 0.2, 0.3])
def test_too_large_a_drop_is_rarely_accepted(right_share: float) -> None:
    """Exactly, over all outcomes of 24 rows, at the boundary and beyond."""
    for drop in (DROP, 0.35):
        shares = drop + right_share, right_share
        assert sum(outcome_probability(counts, ROWS, shares) for counts in ACCEPTED) <= LEVEL
    assert drop_p_value(4, 0, ROWS, DROP) > LEVEL, "outcomes outside ACCEPTED are not accepted"


def test_power_and_number_of_rows_needed() -> None:
    assert sum(outcome_probability(counts, ROWS, (0.03, 0.03)) for counts in ACCEPTED) > 0.75
    assert sum(outcome_probability(counts, ROWS, (DROP + 0.01, 0.01)) for counts in ACCEPTED) > LEVEL / 10
    # More rows than ln δ / ln(1 − ε) of the binomial, which assumes that no row is newly right.
    needed = rows_needed(0.05, 0.05)
    assert 59 < needed < 110
    assert drop_p_value(0, 0, needed, 0.05) <= 0.05 < drop_p_value(0, 0, needed - 2, 0.05)
    assert (rows_needed(0.01, 0.05), rows_needed(0.005, 0.05)) == (482, 964), "docs/guides/deploy.md says so"
    enough = rows_needed(0.01, 0.05, 6, 4, 400)
    assert enough is not None and enough > 400
    assert drop_p_value(round(6 * enough / 400), round(4 * enough / 400), enough, 0.01) <= 0.05
    assert rows_needed(0.01, 0.05, 9, 4, 400) is None, "the drop is more than 1%"


def two_exit_model(rows: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Confidence and right answers [2, n]: the less confident the first exit is, the more often it differs."""
    generator = np.random.default_rng(seed)
    confidence = generator.uniform(0.5, 1, size=rows)
    full = generator.random(rows) < 0.85
    differs = generator.random(rows) < 0.8 * (1 - confidence)
    return np.stack([confidence, np.ones(rows)]).astype(np.float32), np.stack([full ^ differs, full])


def guarantee(rows: int, seed: int, max_drop: float = 0.03) -> Guarantee | None:
    return choose_thresholds((1, 2), *two_exit_model(rows, seed), max_drop, 0.1)


def test_guarantees_hold() -> None:
    """Of 100 calibration sets at most δ, plus chance, choose thresholds whose true drop is too large."""
    confidence, right = two_exit_model(200_000, 7)
    true_drop = {
        threshold: float(right[1].mean() - np.where(confidence[0] >= threshold, right[0], right[1]).mean())
        for threshold in risk_control.THRESHOLDS
    }
    assert max(true_drop.values()) > 0.1, "the loosest threshold must violate the guarantee"
    guarantees = [guarantee(500, seed) for seed in range(100)]
    thresholds = [result.thresholds[1] for result in guarantees if result is not None and result.thresholds]
    assert len(thresholds) > 80 and min(thresholds) < 0.9
    assert sum(true_drop[threshold] > 0.03 for threshold in thresholds) <= 17  # 99.5% quantile at δ = 10%


def test_more_rows_allow_more_exits() -> None:
    small, large = guarantee(200, 1), guarantee(6000, 1)
    assert small is not None and large is not None and large.shares[0] > small.shares[0]
    assert guarantee(60, 1) is None, "too few rows"
    full = np.ones(1000, dtype=bool)
    confidence = np.stack([np.full(1000, 0.95), full]).astype(np.float32)
    useless = choose_thresholds((1, 2), confidence, np.stack([~full, full]), 0.02, 0.05)
    assert useless is not None and useless.thresholds == {} and useless.stopped_by == (1000, 0)
    assert guarantee(500, 1, max_drop=0.001) is None


def test_a_confident_wrong_exit_is_skipped() -> None:
    """One threshold for all exits would fail at the first exit; a sequence starts at the second."""
    rows, generator = 2000, np.random.default_rng(3)
    full = generator.random(rows) < 0.9
    confidence = np.stack([np.full(rows, 0.999), generator.uniform(0.7, 1, rows), np.ones(rows)]).astype(np.float32)
    right = np.stack([generator.random(rows) < 0.5, full, full])
    result = choose_thresholds((2, 4, 6), confidence, right, 0.02, 0.05)
    assert result is not None and set(result.thresholds) == {4}
    assert result.shares[0] == 0 and result.shares[1] > 0.9
    assert result.level == 0.025 and result.lost == result.won == 0


@pytest.mark.parametrize(("hits", "rows"), [(393, 422), (0, 5), (5, 5), (1, 1), (930, 1000), (17, 40)])
def test_share_interval_equals_scipy(hits: int, rows: int) -> None:
    expected = binomtest(hits, rows).proportion_ci(0.95, method="exact")
    assert risk_control.share_interval(hits, rows, 0.025) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_bootstrap_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = np.random.default_rng(7).normal(5.0, 2.0, 400)
    half = 1.96 * values.std() / np.sqrt(len(values))
    interval = risk_control.bootstrap_interval(lambda rows: values[rows].mean(), len(values))
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05)
    assert risk_control.bootstrap_interval(lambda rows: 1.0, len(values)) == (1.0, 1.0)
