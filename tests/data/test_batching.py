import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.data import batching
from edgeformer.data.encoding import Encoded

BOUNDARY = 99
paragraph_lists = st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=12)
row_lengths = st.integers(1, 40)


class Rows:
    """A training set of ``count`` rows without tokens; row ``i`` has ``sizes[i % len(sizes)]`` of them."""

    truncated = 0

    def __init__(self, count, sizes=tuple(range(50))):
        self.count, self.pattern = count, np.array(sizes)
        self.computed_sizes = 0

    def __len__(self):
        return self.count

    def sizes(self, numbers):
        self.computed_sizes += len(numbers)
        return self.pattern[numbers % len(self.pattern)]


def plan(rows, size=8, *, seed=0, epoch=0, bucketed=True, streamed=False):
    return batching.plan_batches(rows, size, seed=seed, epoch=epoch, bucketed=bucketed, streamed=streamed)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 99), st.booleans(), st.booleans())
def test_plan_has_every_row_once_and_repeats(count, size, seed, bucketed, streamed):
    rows = Rows(count, (3, 1, 4, 1, 5))
    options = {"bucketed": bucketed, "streamed": streamed}
    plans = (plan(rows, size, seed=seed + n, epoch=epoch, **options) for n, epoch in ((0, 0), (0, 0), (0, 1), (1, 0)))
    batches, again, *others = map(as_lists, plans)
    assert sorted(row for batch in batches for row in batch) == list(range(count))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    assert len(batches) == -(-count // size) and again == batches
    assert count < 30 or batches not in others


def test_plans_do_not_change_between_versions():
    """A resumed run continues with the batches of the version that started it."""
    options, rows = {"seed": 5, "epoch": 1}, Rows(7, (3, 1, 2))
    assert as_lists(plan(rows, 2, **options)) == [[2, 5], [3], [4, 1], [0, 6]]
    assert as_lists(plan(rows, 2, **options, bucketed=False)) == [[4, 2], [0, 6], [5, 3], [1]]
    assert as_lists(plan(rows, 2, **options, streamed=True)) == [[6, 3], [1, 4], [0], [5, 2]]
    large = as_lists(plan(Rows(5003), streamed=True))
    assert hashlib.sha256(repr(large).encode()).hexdigest()[:32] == "2a2a897b8164b8e50e4b743964c73887"


@pytest.mark.parametrize("streamed", [False, True])
def test_bucketed_batches_have_similar_lengths_in_random_order(streamed):
    rows = Rows(16 * batching.WINDOW_BATCHES * 3, np.random.default_rng(0).integers(1, 60, 1000))

    def padding(bucketed):
        sizes = [rows.sizes(batch) for batch in plan(rows, 16, bucketed=bucketed, streamed=streamed)]
        return sum(int((batch.max() - batch).sum()) for batch in sizes)

    assert padding(bucketed=True) < 0.1 * padding(bucketed=False)
    means = np.array([rows.sizes(batch).mean() for batch in plan(rows, 16, streamed=streamed)])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


def test_rows_of_equal_length_keep_their_order():
    """An unstable sort differs between processors, and a repeated run would differ from the first."""
    rows = Rows(400, (0, 1))
    order = [row for batch in batching.cut_batches(rows.sizes(np.arange(400)), 16) for row in batch.tolist()]
    assert order == [*range(1, 400, 2), *range(0, 400, 2)]
    position = np.argsort(np.concatenate(plan(rows, 16, seed=3, epoch=1, bucketed=False)))
    for batch in plan(rows, 16, seed=3, epoch=1):
        for length in (0, 1):
            assert (np.diff(position[batch[rows.sizes(batch) == length]]) > 0).all()


def test_slice_of_a_streamed_plan_is_the_rest_of_the_epoch():
    batches = as_lists(plan(Rows(5003), streamed=True))
    for start in (0, 1, 63, 64, 65, 300, len(batches) - 1, len(batches)):
        assert as_lists(plan(Rows(5003), streamed=True)[start:]) == batches[start:]
    assert plan(Rows(5003), streamed=True)[-1].tolist() == batches[-1]
    with pytest.raises(IndexError):
        plan(Rows(5003), streamed=True)[len(batches)]
    broken = Rows(10)
    broken.sizes = None
    with pytest.raises(TypeError):  # an error while a window is computed is no end
        list(plan(broken, 2, streamed=True))


def test_streamed_plan_of_a_trillion_rows_takes_the_memory_of_64_batches():
    rows = Rows(10**12)
    batches = plan(rows, streamed=True)
    numbers = [batches[number] for number in (5, 6, 10**10, 10**10 + 1)]
    assert rows.computed_sizes == 2 * 8 * batching.WINDOW_BATCHES  # two windows, each computed once
    assert len(set(np.concatenate(numbers).tolist())) == 32
    assert max(map(max, numbers)) > 10**11


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_evaluation_batches_start_with_the_longest_row(dtype):
    batches = batching.cut_batches(np.array([3, 9, 1, 9, 5], dtype=dtype), 2)
    assert as_lists(batches) == [[1, 3], [4, 0], [2]]
    assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}
    assert batching.cut_batches(np.array([], dtype=dtype), 2) == []
    with pytest.raises(ValueError, match="batch_size"):
        plan(Rows(1), 0, bucketed=False)
    with pytest.raises(ValueError, match="batch_size"):
        batching.cut_batches(np.array([1], dtype=dtype), -1)


def test_batches_are_padded_and_predict_nothing_in_the_padding() -> None:
    rows = Encoded(np.array([5, 6, 7, 5, 5, 8, 9, 1], dtype=np.int32), np.array([0, 3, 4, 8]), np.array([0, 1, 0]), 0)
    batch = batching.collate(rows, np.array([1, 0]), pad_id=99)
    assert batch["input_ids"].tolist() == [[5, 99, 99], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    empty = batching.collate(rows, np.array([], dtype=np.int64), pad_id=0)
    assert {(array.shape, array.dtype) for array in empty.values()} == {((0, 0), np.dtype(np.int64))}
    rows = {name: np.ones((2, 3), dtype=np.int64) for name in ("input_ids", "attention_mask", "targets", "positions")}
    padded = batching.pad_batch({**rows, "labels": np.ones((2, 4), dtype=np.int64)}, 5, pad=7)
    assert padded["labels"].shape == (2, 4), "labels are no tokens"
    for name, fill in {"input_ids": 7, "attention_mask": 0, "targets": batching.IGNORED, "positions": 0}.items():
        assert padded[name].tolist() == [[1, 1, 1, fill, fill]] * 2
    assert batching.pad_batch(rows, 3, pad=7)["input_ids"].shape == (2, 3)
    for longest, count, expected in ((10, 3, [4, 7, 10]), (3, 8, [1, 2, 3]), (1024, 1, [1024])):
        assert batching.padded_lengths(longest, count).tolist() == expected


def encoded(texts) -> Encoded:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    return Encoded(ids, offsets, np.zeros(len(texts), dtype=np.int64), 0)


def packed(texts, length):
    return batching.Packer(BOUNDARY, length).rows(encoded(texts), 7, last=True)


def spans(rows, name="ids"):
    """The numbers of every row in the array ``ids`` or ``starts``."""
    return [getattr(rows, name)[a:b].tolist() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


@given(paragraph_lists, row_lengths)
def test_packed_rows_predict_every_token_once(texts, length):
    rows = packed(texts, length)
    stream = [BOUNDARY, *(token for text in texts for token in (*text, BOUNDARY))]
    assert [token for row in spans(rows) for token in row[1:]] == stream[1:]
    assert [token for row in spans(rows) for token in row[:-1]] == stream[:-1]
    assert all(size == length for size in rows.lengths[:-1]) and 1 <= rows.lengths[-1] <= length
    assert (rows.tokens, rows.truncated, rows.words) == (len(stream) - 1, 0, 7)
    for row, starts in zip(spans(rows), spans(rows, "starts"), strict=True):
        documents = np.cumsum([0, *(token == BOUNDARY for token in row[1:])]).tolist()
        assert starts == [place - documents.index(number) for place, number in enumerate(documents)]
    assert (rows.ids.dtype, rows.starts.dtype) == (np.int32, np.int32)


@given(st.lists(paragraph_lists, min_size=1, max_size=5), row_lengths)
def test_packed_rows_do_not_depend_on_the_pieces(pieces, length):
    packer, packed_tokens, rows_so_far = batching.Packer(BOUNDARY, length), 0, []
    for number, texts in enumerate(pieces, start=1):
        last = number == len(pieces)
        rows = packer.rows(encoded(texts), number, last=last)
        packed_tokens += sum(len(text) + 1 for text in texts)
        rows_so_far += zip(spans(rows), spans(rows, "starts"), strict=True)
        assert len(rows_so_far) == -(-packed_tokens // length) if last else len(rows_so_far) == packed_tokens // length
        assert (rows.words, rows.tokens) == (number, sum(rows.lengths))
        assert rows.sizes(np.arange(len(rows))).tolist() == list(map(len, spans(rows)))
    rows = packed([text for texts in pieces for text in texts], length)
    assert rows_so_far == list(zip(spans(rows), spans(rows, "starts"), strict=True))


@given(paragraph_lists, row_lengths)
def test_paragraph_rows_are_cut_between_two_boundaries(texts, length):
    rows = batching.paragraph_rows(encoded(texts), 7, BOUNDARY, length)
    uncut = [[BOUNDARY, *text, BOUNDARY] for text in texts]
    assert spans(rows) == [tokens[: length + 1] for tokens in uncut]
    assert rows.truncated == sum(len(tokens) > length + 1 for tokens in uncut)
    assert rows.tokens == sum(rows.lengths)
    assert rows.lengths.tolist() == [min(len(tokens) - 1, length) for tokens in uncut]
    assert (rows.starts, rows.words, len(rows), rows.ids.dtype) == (None, 7, len(texts), np.int32)


@settings(max_examples=50)
@given(paragraph_lists, row_lengths, st.booleans(), st.randoms(use_true_random=False))
def test_text_batch_predicts_nothing_after_a_row(texts, length, is_packed, random):
    rows = packed(texts, length) if is_packed else batching.paragraph_rows(encoded(texts), 7, BOUNDARY, length)
    indices = np.array(random.choices(range(len(rows)), k=5))
    batch = batching.text_batch(rows, indices, BOUNDARY)
    width = max(rows.lengths[indices])
    assert set(batch) == ({"input_ids", "targets", "positions"} if is_packed else {"input_ids", "targets"})
    assert {(array.shape, array.dtype) for array in batch.values()} == {((5, width), np.dtype(np.int64))}
    for line, index in enumerate(indices):
        tokens = spans(rows)[index]
        padding = width - len(tokens) + 1
        assert batch["input_ids"][line].tolist() == tokens[:-1] + [BOUNDARY] * padding
        assert batch["targets"][line].tolist() == tokens[1:] + [batching.IGNORED] * padding
        if is_packed:
            assert batch["positions"][line].tolist() == spans(rows, "starts")[index][:-1] + [0] * padding


def test_scored_padding_is_predicted():
    rows = batching.paragraph_rows(encoded([[1, 2], [3]]), 7, BOUNDARY, 8)
    batch = batching.text_batch(rows, np.array([0, 1]), BOUNDARY, pad_to=5)
    assert batch["input_ids"].tolist() == [[99, 1, 2, 99, 99], [99, 3, 99, 99, 99]]
    assert batch["targets"].tolist() == [[1, 2, 99, 99, 99], [3, 99, 99, 99, 99]]
    assert batching.text_batch(rows, np.array([0]), BOUNDARY, pad_to=3)["input_ids"].tolist() == [[99, 1, 2]]
    with pytest.raises(ValueError, match="a row of 3 inputs cannot be padded to 2"):
        batching.text_batch(rows, np.array([0]), BOUNDARY, pad_to=2)


def test_lengths_and_padding_are_described():
    rows = Encoded(np.zeros(26, np.int32), np.cumsum([0, 4, 14, 4, 4]), np.zeros(4, np.int64), 0)
    # One batch: 4 · 14 tokens of which 26 are text. Two batches of similar length: 2 · 4 + 2 · 14.
    lengths = "4 to 14 tokens, half of them at most 4"
    described = batching.describe_lengths(rows, 4, bucketed=False, max_length=16)
    assert described == f"{lengths}; 54% of batches of 4 is padding"
    described, advice = batching.describe_lengths(rows, 2, bucketed=True, max_length=64).rsplit("; ", 1)
    assert described == f"{lengths}; 28% of batches of 2 is padding"
    assert advice == "data.max_length 16 would read 98% of the texts whole"
    assert [batching.length_of_most(np.array(sizes)) for sizes in ([3], [17], [20] * 99 + [500])] == [16, 24, 24]
