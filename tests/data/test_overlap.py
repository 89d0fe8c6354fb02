import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeformer.artifacts.progress import SILENT
from edgeformer.data import splits as overlap
from edgeformer.data.cleaning import clean
from edgeformer.data.splits import contained_pairs, number_words

WORDS = st.sampled_from(["a", "b", "c", "the", "film", "Film!", "!!", "é"])
TEXTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=14)


def inside(inner: list[str], outer: list[str]) -> bool:
    return any(outer[start : start + len(inner)] == inner for start in range(len(outer) - len(inner) + 1))


def count(train, test):
    (result,) = overlap.count_overlaps(train, {"set": test}, "sets", SILENT)
    return result


def oracle(test: list[str], train: list[str]) -> tuple[int, int]:
    training = [clean(text) for text in train]
    duplicates = contained = 0
    for text in map(clean, test):
        if text in training:
            duplicates += 1
            continue
        words = text.split()
        is_inside = bool(words) and any(inside(words, other.split()) for other in training)
        is_around = any(len(other.split()) >= 3 and inside(other.split(), words) for other in training)
        contained += is_inside or is_around
    return duplicates, contained


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS)
def test_counts_equal_a_plain_search(test, train):
    result = count(train, test)
    assert (result.duplicates, result.contained) == oracle(test, train)
    assert (result.test_set, result.test_rows) == ("set", len(test))


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from([1, 7, 2_000_000]))
@example(["x a b c"], ["x a b", "c x", "a b c"], 7)  # in a row only across two texts
@example(["x a b c"], ["a b c x a b x a b x"], 7)  # in a row only from the end to the start
def test_pairs_equal_a_plain_search(needles, haystacks, chunk):
    numbers: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_CHUNK_PLACES", chunk)
        result = contained_pairs(number_words(needles, numbers), number_words(haystacks, numbers))
    expected = {
        (a, b)
        for a, needle in enumerate(needles)
        for b, haystack in enumerate(haystacks)
        if needle.split() and inside(needle.split(), haystack.split())
    }
    pairs = list(zip(*(side.tolist() for side in result), strict=True))
    assert set(pairs) == expected
    assert len(pairs) == len(expected)


def test_hash_collisions_change_no_result(monkeypatch):
    hash_runs = overlap._hash_runs

    def colliding(texts, width):
        hashes, places = hash_runs(texts, width)
        return hashes % np.uint64(2), places

    monkeypatch.setattr(overlap, "_hash_runs", colliding)
    test, train = ["a b c d", "x y", "b c", "q"], ["z a b c d", "y x b", "c q b c r"]
    result = count(train, test)
    assert (result.duplicates, result.contained) == oracle(test, train) == (0, 3)


def test_examples_of_overlap():
    train = ["The film is a joy .", "good film", "so very good"]
    result = count(train, ["THE FILM is a joy!!! .", "the film is a joy  ."])
    assert (result.duplicates, result.contained) == (1, 0)
    assert count(train, ["a joy"]).contained == 1
    assert count(train, ["it is so very good indeed"]).contained == 1
    # A training text of two words inside a test text is no leak, and parts of words do not count.
    assert count(train, ["a good film indeed", "jo"]).contained == 0
