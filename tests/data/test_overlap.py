from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeformer.data.cleaning import clean
from edgeformer.data.splits import OverlapCounter, TextIndex

WORDS = st.sampled_from(["a", "b", "c", "the", "film", "Film!", "!!", "é"])
TEXTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=14)


def inside(inner: list[str], outer: list[str]) -> bool:
    return any(outer[start : start + len(inner)] == inner for start in range(len(outer) - len(inner) + 1))


def count(train, test):
    counter = OverlapCounter({"set": test})
    counter.add(train)
    (result,) = counter.counts()
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
@given(TEXTS, TEXTS)
@example(["x a b c"], ["x a b", "c x", "a b c"])  # in a row only across two texts
@example(["x a b c"], ["a b c x a b x a b x"])  # in a row only from the end to the start
def test_containing_texts_equal_a_plain_search(needles, haystacks):
    index = TextIndex(haystacks)
    for needle in needles:
        words = needle.split()
        expected = [n for n, text in enumerate(haystacks) if words and inside(words, text.split())]
        assert sorted(index.containing(needle)) == expected


def test_examples_of_overlap():
    train = ["The film is a joy .", "good film", "so very good"]
    result = count(train, ["THE FILM is a joy!!! .", "the film is a joy  ."])
    assert (result.duplicates, result.contained) == (1, 0)
    assert count(train, ["a joy"]).contained == 1
    assert count(train, ["it is so very good indeed"]).contained == 1
    # A training text of two words inside a test text is no leak, and parts of words do not count.
    assert count(train, ["a good film indeed", "jo"]).contained == 0
