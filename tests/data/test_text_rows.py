import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.data.batching import IGNORED, Packer, cut_paragraphs, packed_rows, paragraph_rows, text_batch
from edgeformer.data.encoding import Encoded

BOUNDARY = 99
paragraphs = st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=12)
lengths = st.integers(1, 40)


def encoded(texts) -> Encoded:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    return Encoded(ids, offsets, np.zeros(len(texts), dtype=np.int64), 0)


def row(rows, index):
    return rows.ids[rows.offsets[index] : rows.offsets[index + 1]].tolist()


def stream_of(texts):
    return [BOUNDARY, *(token for text in texts for token in (*text, BOUNDARY))]


@given(paragraphs, lengths)
def test_packed_rows_predict_every_token_exactly_once(texts, length):
    rows = packed_rows(encoded(texts), 7, BOUNDARY, length)
    stream = stream_of(texts)
    all_rows = [row(rows, index) for index in range(len(rows))]
    assert [token for tokens in all_rows for token in tokens[1:]] == stream[1:]
    assert [token for tokens in all_rows for token in tokens[:-1]] == stream[:-1]
    assert all(size == length for size in rows.lengths[:-1])
    assert 1 <= rows.lengths[-1] <= length
    assert (rows.tokens, rows.paragraphs, rows.truncated, rows.words) == (len(stream) - 1, len(texts), 0, 7)


@given(st.lists(paragraphs, min_size=1, max_size=5), lengths)
def test_rows_are_full_as_soon_as_their_tokens_are_there_whatever_pieces_they_come_in(pieces, length):
    packer, stream, found = Packer(BOUNDARY, length), [BOUNDARY], []
    for number, texts in enumerate(pieces, start=1):
        last = number == len(pieces)
        rows = packer.rows(encoded(texts), number, last=last)
        stream += stream_of(texts)[1:]
        found += [(row(rows, i), rows.starts[slice(*rows.offsets[i : i + 2])].tolist()) for i in range(len(rows))]
        assert len(found) == -(-(len(stream) - 1) // length) if last else len(found) == (len(stream) - 1) // length
        assert (rows.words, rows.paragraphs, rows.tokens) == (number, len(texts), sum(rows.lengths))
        assert rows.sizes(np.arange(len(rows))).tolist() == [
            len(tokens) for tokens, _ in found[len(found) - len(rows) :]
        ]
    whole = packed_rows(encoded([text for texts in pieces for text in texts]), 0, BOUNDARY, length)
    starts = [whole.starts[slice(*whole.offsets[i : i + 2])].tolist() for i in range(len(whole))]
    assert found == [(row(whole, i), starts[i]) for i in range(len(whole))]


@given(paragraphs, lengths)
def test_packed_places_count_from_the_boundary_or_the_rows_start(texts, length):
    rows = packed_rows(encoded(texts), 0, BOUNDARY, length)
    assert rows.starts is not None
    assert rows.starts.dtype == np.int32
    for index in range(len(rows)):
        expected = []
        for token in row(rows, index):
            expected.append(0 if not expected or token == BOUNDARY else expected[-1] + 1)
        assert rows.starts[rows.offsets[index] : rows.offsets[index + 1]].tolist() == expected


@given(paragraphs, lengths)
def test_a_paragraph_is_a_row_between_two_boundaries(texts, length):
    rows = paragraph_rows(encoded(texts), 7, BOUNDARY, length)
    whole = [[BOUNDARY, *text, BOUNDARY] for text in texts]
    assert [row(rows, index) for index in range(len(rows))] == [tokens[: length + 1] for tokens in whole]
    assert rows.truncated == sum(len(tokens) > length + 1 for tokens in whole)
    assert rows.tokens == sum(min(len(tokens) - 1, length) for tokens in whole)
    assert rows.lengths.tolist() == [min(len(tokens) - 1, length) for tokens in whole]
    assert (rows.starts, rows.words, rows.paragraphs) == (None, 7, len(texts))


@settings(max_examples=50)
@given(paragraphs, lengths, st.booleans(), st.randoms(use_true_random=False))
def test_a_batch_holds_its_rows_and_predicts_nothing_behind_them(texts, length, packed, random):
    make = packed_rows if packed else paragraph_rows
    rows = make(encoded(texts), 0, BOUNDARY, length)
    indices = np.array(random.choices(range(len(rows)), k=5))
    batch = text_batch(rows, indices, BOUNDARY)
    width = max(rows.lengths[indices])
    assert set(batch) == ({"input_ids", "targets", "positions"} if packed else {"input_ids", "targets"})
    assert {(array.shape, array.dtype) for array in batch.values()} == {((5, width), np.dtype(np.int64))}
    for line, index in enumerate(indices):
        tokens = row(rows, index)
        behind = width - len(tokens) + 1
        assert batch["input_ids"][line].tolist() == tokens[:-1] + [BOUNDARY] * behind
        assert batch["targets"][line].tolist() == tokens[1:] + [IGNORED] * behind
        if packed:
            places = rows.starts[rows.offsets[index] : rows.offsets[index + 1] - 1].tolist()
            assert batch["positions"][line].tolist() == places + [0] * behind


def test_the_published_protocol_predicts_padding_too():
    rows = paragraph_rows(encoded([[1, 2], [3]]), 0, BOUNDARY, 8)
    batch = text_batch(rows, np.array([0, 1]), BOUNDARY, pad_to=5)
    assert batch["input_ids"].tolist() == [[99, 1, 2, 99, 99], [99, 3, 99, 99, 99]]
    assert batch["targets"].tolist() == [[1, 2, 99, 99, 99], [3, 99, 99, 99, 99]]
    with pytest.raises(ValueError, match="a row of 3 inputs cannot be padded to 2"):
        text_batch(rows, np.array([0]), BOUNDARY, pad_to=2)


def test_by_hand():
    rows = packed_rows(encoded([[1, 2, 3], [4]]), 0, BOUNDARY, 4)
    assert [row(rows, 0), row(rows, 1)] == [[99, 1, 2, 3, 99], [99, 4, 99]]
    batch = text_batch(rows, np.array([0, 1]), BOUNDARY)
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3, 99], [4, 99, IGNORED, IGNORED]]
    split = packed_rows(encoded([[1, 2, 3], [4]]), 0, BOUNDARY, 3)
    assert [row(split, index) for index in range(2)] == [[99, 1, 2, 3], [3, 99, 4, 99]]
    assert text_batch(split, np.array([1]), BOUNDARY)["positions"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("make", [packed_rows, paragraph_rows])
def test_a_token_takes_four_bytes_and_no_rows_make_an_empty_batch(make):
    rows = make(encoded([[1, 2], [3]]), 0, BOUNDARY, 8)
    assert rows.ids.dtype == np.int32
    batch = text_batch(rows, np.array([], dtype=np.int64), BOUNDARY)
    assert {(array.shape, array.dtype) for array in batch.values()} == {((0, 0), np.dtype(np.int64))}


def test_a_row_may_fill_the_padded_length():
    rows = paragraph_rows(encoded([[1, 2]]), 0, BOUNDARY, 8)
    assert text_batch(rows, np.array([0]), BOUNDARY, pad_to=3)["input_ids"].tolist() == [[99, 1, 2]]


def test_cut_paragraphs_are_told_by_their_numbers():
    found = cut_paragraphs(encoded([[1, 2, 3, 4], [3], [1, 2, 3]]), 4)
    assert (found.tolist(), found.dtype) == ([0], np.dtype(np.int64))
