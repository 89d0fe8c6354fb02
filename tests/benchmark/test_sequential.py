"""The sequential test of the gate: how often it errs, counted exactly and by drawing, and what it decides."""

from itertools import product
from math import inf, log

import numpy as np
import pytest

from edgeformer.benchmark.paired_run import ERROR, EVERY, FEWEST_ROUNDS, MOST_ROUNDS, Interval, boundaries, interval

RUNS = 400


@pytest.mark.parametrize("error", [ERROR, ERROR / 4])
def test_the_boundaries_spend_no_more_than_half_of_the_error_on_a_side(error: float) -> None:
    """Every sequence of 16 coins, one by one: how many cross a boundary on their way."""
    limits = {look: boundary for look, boundary in boundaries(error).items() if look <= 16}
    coins = product((0, 1), repeat=16)
    crossed = sum(any(sum(each[:look]) <= boundary for look, boundary in limits.items()) for each in coins)
    allowed = error / 2 * log(1 + (np.e - 1) * 16 / MOST_ROUNDS)
    assert 0 < crossed / 2**16 <= allowed
    assert min(boundaries(error)) >= FEWEST_ROUNDS and all(look % EVERY == 0 for look in boundaries(error))


def test_an_interval_holds_the_truth_at_every_look_of_a_run_as_often_as_it_says() -> None:
    """Of many runs with heavy tails, of which each is looked at after every round."""
    random = np.random.default_rng(16)
    missed = 0
    for ratios in 0.02 + 0.02 * random.standard_t(2, size=(RUNS, MOST_ROUNDS)):
        looks = (interval(list(ratios[:rounds])) for rounds in range(EVERY, MOST_ROUNDS + 1, EVERY))
        missed += any(not look.low <= np.exp(0.02) - 1 <= look.high for look in looks)
    assert missed / RUNS <= ERROR + 3 * (ERROR * (1 - ERROR) / RUNS) ** 0.5
    assert missed / RUNS >= ERROR / 4, "an interval that never misses is too wide"


def decisions(slowdown: float, spread: float, runs: int = 200) -> list[tuple[str, str]]:
    """Decision and direction of simulated runs, each stopped as the gate stops."""
    random, result = np.random.default_rng(7), []
    for ratios in np.log(1 + slowdown) + spread * random.standard_t(3, size=(runs, MOST_ROUNDS)):
        bounds = Interval(0.0, -inf, inf)
        for rounds in range(EVERY, MOST_ROUNDS + 1, EVERY):
            bounds = interval(list(ratios[:rounds]))
            if bounds.decision(0.05) != "undecided":
                break
        result.append((bounds.decision(0.05), bounds.change(0.05)))
    return result


def test_slowdowns_are_decided_rightly_in_simulated_runs() -> None:
    assert not any(decision == "fail" for decision, _ in decisions(0.0, 0.02))
    assert all(decision == "fail" for decision, _ in decisions(0.10, 0.02))
    for spread in (0.01, 0.03):
        result = decisions(0.03, spread)
        assert not any(change == "faster" for _, change in result)
        observed = sum(decision == "undecided" or change == "slower" for decision, change in result)
        assert observed >= 0.95 * len(result)


@pytest.mark.parametrize(
    ("low", "high", "decision", "change"),
    [
        (0.051, 0.2, "fail", "slower"),
        (0.049, 0.2, "undecided", "slower"),
        (0.01, 0.049, "pass", "slower"),
        (-0.01, 0.049, "undecided", "not known"),  # it may be most of what is allowed, unseen
        (-0.3, 0.024, "pass", "not known"),  # no slower than allowed, but maybe much faster
        (-0.4, 0.9, "undecided", "not known"),
        (-0.01, 0.024, "pass", "no different"),
        (-0.2, -0.1, "pass", "faster"),
        (-1.0, inf, "undecided", "not known"),
    ],
)
def test_decisions(low: float, high: float, decision: str, change: str) -> None:
    bounds = Interval((low + high) / 2, low, high)
    assert (bounds.decision(0.05), bounds.change(0.05)) == (decision, change)


def test_few_rounds_have_no_interval_and_an_odd_one_waits_for_the_next_look() -> None:
    assert interval([]).high == inf and interval([0.1] * 6).high == inf
    assert interval([0.1] * 8).low == pytest.approx(np.exp(0.1) - 1)
    assert interval([0.1] * 8 + [99.0]) == interval([0.1] * 8)
