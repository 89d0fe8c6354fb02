"""Overlap: texts that are contained in other texts, word for word. Counts the test texts that training has seen.

Each needle is looked up by its rarest run of up to three words. Most needles have a run that occurs in no or one place,
so that few places are compared in full. Runs are matched by sorted 64-bit hashes. Every match is compared word by word,
so that a hash collision costs time, never correctness.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.manifest import OverlapCount
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.data.cleaning import clean

Int64s = NDArray[np.int64]
_RUN_WORDS = 3
_CHUNK_PLACES = 2_000_000
_CHUNK_CHARACTERS = 2_000_000
"""Of training texts that are compared at once."""
_UNKNOWN_WORD = -1
"""Number of every word that no other set has."""
_MIN_WORDS = 3
"""A training text inside a test text counts from this many words on: "the film" in a review is no leak."""


@dataclass(frozen=True)
class WordTexts:
    """Texts as word numbers: text ``i`` is ``words[starts[i]:starts[i + 1]]``."""

    words: Int64s
    starts: Int64s

    @classmethod
    def joined(cls, texts: Iterable[list[int]]) -> WordTexts:
        """Return texts of lists of word numbers."""
        words: list[int] = []
        starts = [0]
        for text in texts:
            words.extend(text)
            starts.append(len(words))
        return cls(np.array(words, dtype=np.int64), np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int64s:
        """Words per text, int64 [n]."""
        return np.diff(self.starts)

    @property
    def text_of_word(self) -> Int64s:
        """Number of the text of each word, int64 [words]."""
        return np.repeat(np.arange(len(self)), self.lengths)


def number_words(texts: Iterable[str], numbers: dict[str, int]) -> WordTexts:
    """Split cleaned texts at white space, and number their words.

    Args:
        numbers: word → its number; new words are added with the next numbers.
    """
    return WordTexts.joined([numbers.setdefault(word, len(numbers)) for word in text.split()] for text in texts)


def contained_pairs(needles: WordTexts, haystacks: WordTexts) -> tuple[Int64s, Int64s]:
    """Return all pairs (needle, haystack) such that the haystack contains the needle's words in a row, or equals it.

    Returns:
        Needle and haystack numbers, int64 [pairs] each, every pair once. Empty needles are in no text.
    """
    pairs = [np.empty(0, dtype=np.int64)]
    widths = np.minimum(needles.lengths, _RUN_WORDS)
    for width in range(1, _RUN_WORDS + 1):
        group = np.flatnonzero(widths == width)
        if len(group):
            pairs.extend(_search(needles, group, haystacks, width))
    return np.divmod(np.unique(np.concatenate(pairs)), max(len(haystacks), 1))


def _hash_runs(texts: WordTexts, width: int) -> tuple[NDArray[np.uint64], Int64s]:
    """Return the hash and the first word of every run of ``width`` words inside one text."""
    count = max(0, len(texts.words) - width + 1)
    words = texts.words.astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(width):
        hashes = (hashes ^ words[offset : offset + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    text_of_word = texts.text_of_word
    inside = np.flatnonzero(text_of_word[:count] == text_of_word[width - 1 :])
    return hashes[inside], inside


def _search(needles: WordTexts, group: Int64s, haystacks: WordTexts, width: int) -> list[Int64s]:
    """Return the pairs of the needles in ``group``, by runs of ``width`` words, as needle × haystacks + haystack."""
    hashes, places = _hash_runs(haystacks, width)
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    anchors, first, last = _rarest_runs(needles, group, hashes, width)
    counts = last - first
    has_match = counts > 0
    group, anchors, first, counts = group[has_match], anchors[has_match], first[has_match], counts[has_match]
    text_of_word = haystacks.text_of_word
    pairs = []
    # A bounded number of places at once.
    windows = (np.cumsum(counts) - counts) // _CHUNK_PLACES
    edges = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(counts)]
    for part in itertools.starmap(slice, itertools.pairwise(edges)):
        index = np.repeat(np.arange(part.start, part.stop), counts[part])
        ends = np.cumsum(counts[part])
        offset = np.arange(len(index)) - np.repeat(ends - counts[part], counts[part])
        begins = places[first[index] + offset] - anchors[index]
        candidates = group[index]
        matches = _matching(needles, candidates, haystacks, begins, text_of_word)
        pairs.append(np.unique(candidates[matches] * len(haystacks) + text_of_word[begins[matches]]))
    return pairs


def _rarest_runs(
    needles: WordTexts, group: Int64s, hashes: NDArray[np.uint64], width: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the offset of the rarest run of each needle in ``group``, and the range of its matches in ``hashes``."""
    run_hashes, starts = _hash_runs(needles, width)
    text_of_run = needles.text_of_word[starts]
    in_group = np.zeros(len(needles), dtype=bool)
    in_group[group] = True
    selected = in_group[text_of_run]
    run_hashes, starts, text_of_run = run_hashes[selected], starts[selected], text_of_run[selected]
    # Each hash is looked up once and in order: a binary search per run, all over the table, takes far longer.
    distinct, inverse = np.unique(run_hashes, return_inverse=True)
    first = np.searchsorted(hashes, distinct, side="left")[inverse]
    last = np.searchsorted(hashes, distinct, side="right")[inverse]
    # Sorted by needle, then by number of matches: the first run of each needle is its rarest.
    order = np.lexsort((last - first, text_of_run))
    _, first_of_needle = np.unique(text_of_run[order], return_index=True)
    rarest = order[first_of_needle]
    run_of_needle = np.full(len(needles), -1, dtype=np.int64)
    run_of_needle[text_of_run[rarest]] = rarest
    runs = run_of_needle[group]
    return starts[runs] - needles.starts[group], first[runs], last[runs]


def _matching(
    needles: WordTexts, candidates: Int64s, haystacks: WordTexts, begins: Int64s, text_of_word: Int64s
) -> Int64s:
    """Return which candidates (needle ``candidates[k]`` at word ``begins[k]``) match completely inside one haystack."""
    lengths = needles.lengths[candidates]
    active = np.flatnonzero((begins >= 0) & (begins + lengths <= len(haystacks.words)))
    active = active[text_of_word[begins[active]] == text_of_word[begins[active] + lengths[active] - 1]]
    matches = [active[:0]]
    offset = 0
    while len(active):
        equal = needles.words[needles.starts[candidates[active]] + offset] == haystacks.words[begins[active] + offset]
        active = active[equal]
        offset += 1
        is_complete = lengths[active] == offset
        matches.append(active[is_complete])
        active = active[~is_complete]
    return np.concatenate(matches)


class OverlapCounter:
    """Counts the texts of other sets that training has seen, all cleaned: equal texts, and further overlapping texts.

    An overlapping text is one of any length inside a training text, word for word and in a row, or one around a
    training text of three words or more. Every row counts at most once. In memory are the texts of the other sets and
    some of the training texts.

    Args:
        other_sets: set → its texts.
    """

    def __init__(self, other_sets: Mapping[str, Sequence[str]]) -> None:
        self._numbers: dict[str, int] = {}
        self._sets = {
            name: np.array([self._numbers.setdefault(clean(text), len(self._numbers)) for text in texts], np.int64)
            for name, texts in other_sets.items()
        }
        self._words: dict[str, int] = {}
        self._numbered = number_words(self._numbers, self._words)
        self._is_equal, self._overlaps = (np.zeros(len(self._numbers), dtype=bool) for _ in range(2))
        self._pending: dict[str, None] = {}
        self._characters = 0

    def add(self, training: Iterable[str]) -> None:
        """Add training texts."""
        for text in training:
            cleaned = clean(text)
            self._pending[cleaned] = None
            self._characters += len(cleaned)
            if self._characters > _CHUNK_CHARACTERS:
                self._compare()

    def _compare(self) -> None:
        texts, self._pending, self._characters = self._pending, {}, 0
        self._is_equal[[self._numbers[text] for text in texts if text in self._numbers]] = True
        words = [[self._words.get(word, _UNKNOWN_WORD) for word in text.split()] for text in texts]
        inside, _ = contained_pairs(self._numbered, WordTexts.joined(words))
        self._overlaps[inside] = True
        needles = [text for text in words if len(text) >= _MIN_WORDS and _UNKNOWN_WORD not in text]
        _, around = contained_pairs(WordTexts.joined(needles), self._numbered)
        self._overlaps[around] = True

    def counts(self) -> tuple[OverlapCount, ...]:
        """Return the counts of each other set, after all training texts."""
        self._compare()
        contained = self._overlaps & ~self._is_equal
        return tuple(
            OverlapCount(
                test_set=name,
                test_rows=len(texts),
                duplicates=int(self._is_equal[texts].sum()),
                contained=int(contained[texts].sum()),
            )
            for name, texts in self._sets.items()
        )


def count_overlaps(
    train: Iterable[str], other_sets: Mapping[str, Sequence[str]], sets_name: str, progress: Progress
) -> tuple[OverlapCount, ...]:
    """Count overlaps as :class:`OverlapCounter` does.

    Args:
        other_sets: set → its texts.
        sets_name: of these sets together, for the progress bar.
    """
    with bar(progress, f"Comparing {sets_name} with the training set", None, "texts"):
        counter = OverlapCounter(other_sets)
        for text in train:
            counter.add((text,))
            progress.advance()
        return counter.counts()
