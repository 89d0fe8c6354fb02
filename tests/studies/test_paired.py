"""Paired comparisons of runs: exact p-values, intervals, seeds, and what is not compared."""

from itertools import product

import numpy as np
import pytest

from benchmarks.studies.paired import adjust, compare, packed, sign_flip_test, unpacked


def rights(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers of two models with so many rows of each kind."""
    ours = np.repeat([True, True, False, False], [both, first, second, neither])
    return ours, np.repeat([True, False, True, False], [both, first, second, neither])


def test_answers_survive_packing() -> None:
    right = np.random.default_rng(0).random(1821) < 0.8
    assert len(packed(right)) < 310 and (unpacked(packed(right), 1821) == right).all()


def test_exact_mcnemar_test_of_one_seed() -> None:
    """2 · P(X ≤ 5) for X ~ B(20, ½) is 0.0414: 21,700 of 2^20 outcomes, doubled."""
    ours, theirs = rights(700, 15, 5, 280)
    pair = compare("light", "baseline", "sst-test", {42: ours}, {42: theirs})
    assert pair is not None and (pair.won, pair.lost, pair.rows) == ((15,), (5,), 1000)
    assert pair.p == pytest.approx(2 * 21_700 / 2**20) and pair.difference == pytest.approx(0.01)
    assert 0 < pair.low < 0.01 < pair.high < 0.02


def test_several_seeds_share_their_rows() -> None:
    ours, theirs = rights(700, 15, 5, 280)
    runs, others = {1: ours, 2: ours, 3: theirs}, {1: theirs, 2: theirs, 3: theirs, 4: ours}
    pair = compare("a", "b", "test", runs, others)
    assert pair is not None and pair.won == (15, 15, 0)  # seed 4 has no partner
    assert pair.difference == pytest.approx(0.02 / 3)
    assert pair.p == pytest.approx(2 * 21_700 / 2**20)  # the signs of the same 20 rows, twice the difference in each
    linear = compare("a", "b", "test", {42: ours}, {1: theirs, 2: theirs})
    assert linear is not None and linear.won == (15, 15)  # a fit without a random part is compared with every seed
    assert compare("a", "b", "test", {1: ours, 2: ours}, {3: theirs, 4: theirs}) is None
    assert compare("a", "b", "test", {1: ours}, {1: theirs[:10]}) is None
    same = compare("a", "b", "test", {1: ours}, {1: ours})
    assert same is not None and same.p == 1.0 and same.low == same.high == 0.0
    ours, theirs = rights(700, 60, 15, 225)
    pair = compare("a", "b", "test", {1: ours, 2: theirs[::-1]}, {1: theirs, 2: ours[::-1]})
    assert pair is not None and (pair.won, pair.lost) == ((60, 15), (15, 60))
    assert pair.difference == 0 and pair.p == pytest.approx(1)


def test_sign_flips_of_differences_of_several_sizes() -> None:
    """All 2^6 signs of 2, 2, 1, 1, 1, −1 by hand: 6 or more in 4 of them, −6 or less in as many."""
    differences = np.array([2, 2, 1, 1, 1, -1])
    sums = [sum(s * abs(d) for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=6)]
    expected = sum(abs(total) >= differences.sum() for total in sums) / len(sums)
    assert sign_flip_test(differences) == pytest.approx(expected)
    assert sign_flip_test(np.zeros(5, dtype=int)) == 1.0


def test_holm() -> None:
    """The example of Holm's procedure: p · (number of hypotheses not yet rejected), never falling."""
    ours, theirs = rights(10, 3, 1, 6)
    pair = compare("a", "b", "test", {1: ours}, {1: theirs})
    pairs = adjust([pair.model_copy(update={"p": p}) for p in (0.04, 0.01, 0.03, 0.005)])
    assert [round(each.adjusted, 4) for each in pairs] == [0.06, 0.03, 0.06, 0.02]
