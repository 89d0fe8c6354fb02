import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeformer.data.batching import (
    IGNORED,
    WINDOW_BATCHES,
    collate,
    few_lengths,
    lengthened,
    ordered_batches,
    plan_batches,
)
from edgeformer.data.encoding import Encoded

LENGTHS = st.lists(st.integers(1, 60), max_size=300).map(lambda values: np.array(values, dtype=np.int64))


def padding(batches, lengths) -> int:
    return sum(int((lengths[batch].max() - lengths[batch]).sum()) for batch in batches)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 99), st.integers(0, 99), st.booleans())
def test_every_row_once_and_the_same_every_time(lengths, size, seed, epoch, bucketed):
    batches = plan_batches(lengths, size, seed=seed, epoch=epoch, bucketed=bucketed)
    rows = [row for batch in batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert all(0 < len(batch) <= size for batch in batches)
    assert len(batches) == -(-len(lengths) // size)
    again = plan_batches(lengths, size, seed=seed, epoch=epoch, bucketed=bucketed)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("bucketed", [True, False])
def test_seed_and_epoch_change_the_plan(bucketed):
    lengths = np.arange(500) % 40 + 1
    plans = [
        [batch.tolist() for batch in plan_batches(lengths, 8, seed=seed, epoch=epoch, bucketed=bucketed)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert plans[0] != plans[1] != plans[2] != plans[0]


def test_buckets_hardly_pad_and_stay_in_random_order():
    lengths = np.random.default_rng(0).integers(1, 60, 16 * WINDOW_BATCHES * 3)
    bucketed = plan_batches(lengths, 16, seed=0, epoch=0, bucketed=True)
    shuffled = plan_batches(lengths, 16, seed=0, epoch=0, bucketed=False)
    assert padding(bucketed, lengths) < 0.1 * padding(shuffled, lengths)
    means = np.array([lengths[batch].mean() for batch in bucketed])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


def test_evaluation_batches_start_with_the_longest():
    lengths = np.array([3, 9, 1, 9, 5])
    assert [batch.tolist() for batch in ordered_batches(lengths, 2)] == [[1, 3], [4, 0], [2]]
    assert ordered_batches(np.array([], dtype=np.int64), 2) == []


def test_rows_of_one_length_keep_their_order():
    """An unstable sort differs between processors, and so would a run from its repetition."""
    turns = np.arange(400) % 2
    order = [row for batch in ordered_batches(turns, 16) for row in batch.tolist()]
    assert order == [*range(1, 400, 2), *range(0, 400, 2)]
    shuffled = plan_batches(turns, 16, seed=3, epoch=1, bucketed=False)
    place = {row: place for place, row in enumerate(row for batch in shuffled for row in batch.tolist())}
    for batch in plan_batches(turns, 16, seed=3, epoch=1, bucketed=True):
        for length in (0, 1):
            places = [place[row] for row in batch.tolist() if turns[row] == length]
            assert places == sorted(places)


def test_lengths_may_be_unsigned():
    batches = ordered_batches(np.array([3, 9, 0], dtype=np.uint32), 2)
    assert [batch.tolist() for batch in batches] == [[1, 0], [2]]
    assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_holds_at_least_one_row(size):
    with pytest.raises(ValueError, match="batch_size"):
        plan_batches(np.array([1]), size, seed=0, epoch=0, bucketed=False)
    with pytest.raises(ValueError, match="batch_size"):
        ordered_batches(np.array([1]), size)


def test_collate_pads_to_the_longest_of_the_batch():
    ids = np.array([5, 6, 7, 5, 5, 8, 9, 1], dtype=np.int32)
    encoded = Encoded(ids, np.array([0, 3, 4, 8]), np.array([0, 1, 0]), 0)
    batch = collate(encoded, np.array([1, 0]), pad_id=99)
    assert batch["input_ids"].tolist() == [[5, 99, 99], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


def test_no_rows_make_an_empty_batch():
    encoded = Encoded(np.array([5], dtype=np.int32), np.array([0, 1]), np.array([0]), 0)
    batch = collate(encoded, np.array([], dtype=np.int64), pad_id=0)
    assert {array.shape for array in batch.values()} == {(0, 0)}


@pytest.mark.parametrize(("longest", "count", "expected"), [(10, 3, [4, 7, 10]), (3, 8, [1, 2, 3]), (1024, 1, [1024])])
def test_lengths_are_few_and_reach_the_longest_row(longest, count, expected):
    assert few_lengths(longest, count).tolist() == expected


def test_padding_behind_a_batch_is_no_text_and_predicts_nothing():
    rows = {name: np.ones((2, 3), dtype=np.int64) for name in ("input_ids", "attention_mask", "targets", "positions")}
    longer = lengthened({**rows, "labels": np.ones((2, 4), dtype=np.int64)}, 5, pad=7)
    behind = {"input_ids": 7, "attention_mask": 0, "targets": IGNORED, "positions": 0}
    assert longer["labels"].shape == (2, 4), "labels are no tokens"
    for name, filling in behind.items():
        assert longer[name].tolist() == [[1, 1, 1, filling, filling]] * 2
    assert lengthened(rows, 3, pad=7)["input_ids"].shape == (2, 3)
