"""The order of a set whose row numbers are too many to be written down."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.data.batching import WINDOW_BATCHES, LongPlan, permuted

KEYS = np.random.default_rng(0).integers(2**64, size=8, dtype=np.uint64).tolist()


class Rows:
    """A training set of ``count`` rows, row ``i`` of ``i % 50`` tokens; remembers whose size was asked."""

    truncated = 0

    def __init__(self, count):
        self.count = count
        self.asked = 0

    def __len__(self):
        return self.count

    def sizes(self, numbers):
        self.asked += len(numbers)
        return numbers % 50

    def loaded(self, numbers):
        raise AssertionError("the order needs no tokens")


def plan(rows, size=8, *, seed=0, epoch=0, bucketed=True):
    return LongPlan(rows, size, seed=seed, epoch=epoch, bucketed=bucketed)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000))
def test_every_place_is_taken_once(count):
    assert sorted(permuted(np.arange(count), count, KEYS).tolist()) == list(range(count))


def test_neighbours_are_torn_apart_and_every_epoch_differs():
    count = 100_000
    order = permuted(np.arange(count), count, KEYS)
    # Of random numbers the correlation is 0, with a standard deviation of 1 / sqrt(count) = 0.003.
    assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.013
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.013
    quarters = np.bincount(order[:4000] // (count // 4), minlength=4)
    assert abs(quarters - 1000).max() < 140  # five standard deviations of 27
    for seed, epoch in ((0, 1), (1, 0)):
        same = [
            np.array_equal(a, b)
            for a, b in zip(plan(Rows(4000)), plan(Rows(4000), seed=seed, epoch=epoch), strict=True)
        ]
        assert not any(same)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(("count", "size"), [(1, 8), (8, 8), (513, 8), (8 * WINDOW_BATCHES, 8), (5003, 3)])
def test_every_row_is_in_one_batch(count, size, bucketed):
    batches = list(plan(Rows(count), size, bucketed=bucketed))
    assert len(batches) == len(plan(Rows(count), size)) == -(-count // size)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    again = plan(Rows(count), size, bucketed=bucketed)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_going_on_in_the_middle_gives_the_rest():
    whole = list(plan(Rows(5003)))
    for start in (0, 1, 63, 64, 65, 300, len(whole) - 1, len(whole)):
        rest = plan(Rows(5003))[start:]
        assert len(rest) == len(whole) - start
        assert all(np.array_equal(a, b) for a, b in zip(whole[start:], rest, strict=True))
    assert np.array_equal(plan(Rows(5003))[-1], whole[-1])
    with pytest.raises(IndexError):
        plan(Rows(5003))[len(whole)]


def test_bucketed_batches_are_of_similar_length_and_in_random_order():
    def spread(bucketed):
        return np.mean([np.ptp(batch % 50) for batch in plan(Rows(20_000), 16, bucketed=bucketed)])

    assert spread(True) < 4 < 30 < spread(False)
    first = [int(batch[0] % 50) for batch in plan(Rows(20_000), 16)[:WINDOW_BATCHES]]
    assert first != sorted(first)


def test_a_trillion_rows_take_the_memory_of_64_batches():
    rows = Rows(10**12)
    found = plan(rows)
    batches = [found[place] for place in (5, 6, 10**10, 10**10 + 1)]
    assert rows.asked == 2 * 8 * WINDOW_BATCHES  # two windows, each once
    assert len(set(np.concatenate(batches).tolist())) == 32
    assert max(map(max, batches)) > 10**11


def test_an_error_within_is_not_the_end():
    class Broken:
        def __len__(self):
            return 10

        def sizes(self, numbers):
            raise IndexError("numbers that are not there")

    with pytest.raises(IndexError, match="not there"):
        list(LongPlan(Broken(), 2, seed=0, epoch=0, bucketed=True))
