import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.progress import SILENT
from edgeformer.data import overlap
from edgeformer.data.cleaning import clean
from edgeformer.data.overlap import contained_pairs, number_words
from edgeformer.data.sources import read

WORDS = st.sampled_from(["a", "b", "c", "the", "film", "Film!", "!!", "é"])
TEXTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=14)


def inside(inner: list[str], outer: list[str]) -> bool:
    return any(outer[start : start + len(inner)] == inner for start in range(len(outer) - len(inner) + 1))


def counted_in(train, name, test):
    (counted,) = overlap.count_overlaps(train, {name: test}, "sets", SILENT)
    return counted


def oracle(test: list[str], train: list[str]) -> tuple[int, int]:
    seen = [clean(text) for text in train]
    duplicates = contained = 0
    for text in map(clean, test):
        if text in seen:
            duplicates += 1
            continue
        words = text.split()
        part_of = bool(words) and any(inside(words, other.split()) for other in seen)
        around = any(len(other.split()) >= 3 and inside(other.split(), words) for other in seen)
        contained += part_of or around
    return duplicates, contained


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS)
def test_counts_are_those_of_a_plain_search(test, train):
    counted = counted_in(train, "set", test)
    assert (counted.duplicates, counted.contained) == oracle(test, train)
    assert (counted.test_set, counted.test_rows) == ("set", len(test))


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from([1, 7, 2_000_000]))
@example(["x a b c"], ["x a b", "c x", "a b c"], 7)  # in a row only across two texts
@example(["x a b c"], ["a b c x a b x a b x"], 7)  # in a row only from the end to the start
def test_pairs_are_those_of_a_plain_search(needles, haystacks, chunk):
    numbers: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_CHUNK_PLACES", chunk)
        found = contained_pairs(number_words(needles, numbers), number_words(haystacks, numbers))
    expected = {
        (a, b)
        for a, needle in enumerate(needles)
        for b, haystack in enumerate(haystacks)
        if needle.split() and inside(needle.split(), haystack.split())
    }
    pairs = list(zip(*(side.tolist() for side in found), strict=True))
    assert set(pairs) == expected
    assert len(pairs) == len(expected)


def test_hash_collisions_cost_nothing_but_time(monkeypatch):
    honest = overlap._hash_runs

    def colliding(texts, width):
        hashes, places = honest(texts, width)
        return hashes % np.uint64(2), places

    monkeypatch.setattr(overlap, "_hash_runs", colliding)
    test, train = ["a b c d", "x y", "b c", "q"], ["z a b c d", "y x b", "c q b c r"]
    counted = counted_in(train, "set", test)
    assert (counted.duplicates, counted.contained) == oracle(test, train) == (0, 3)


def test_what_counts_and_what_does_not():
    train = ["The film is a joy .", "good film", "so very good"]
    counted = counted_in(train, "set", ["THE FILM is a joy!!! .", "the film is a joy  ."])
    assert (counted.duplicates, counted.contained) == (1, 0)
    assert counted_in(train, "set", ["a joy"]).contained == 1
    assert counted_in(train, "set", ["it is so very good indeed"]).contained == 1
    # A training text of two words inside a test text is no leak, and words are whole words.
    assert counted_in(train, "set", ["a good film indeed", "jo"]).contained == 0


@pytest.mark.data
def test_sst2_random_split_leaks(data_folder):
    source = FileSource(kind="file", path=str(data_folder / "sst2" / "train.tsv"), text="sentence")
    texts = [row.text for row in read(source)]
    np.random.default_rng(0).shuffle(texts)
    counted = counted_in(texts[6_823:], "random-split", texts[:6_823])
    # GLUE's train file holds phrases of its own sentences: nearly every row of a random test set is in training.
    assert counted.duplicates + counted.contained > 0.95 * 6_823
