"""Which texts are, word for word, a part of which others: how much of a test set training has seen, and hold-outs.

Each needle is looked up by its rarest run of up to three words: most needles have a run that occurs nowhere
or in one place, so that only few places are compared in full. Runs are found by sorting 64-bit hashes of
them; every hit is compared word by word, so a hash collision costs time, never correctness.
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
_ANCHOR_WORDS = 3
_CHUNK = 2_000_000
_COMPARED_CHARACTERS = 2_000_000
"""Of training texts that are compared at once."""
_ELSEWHERE = -1
"""The number of every word that no other set has."""
MIN_WORDS = 3
"""A training text inside a test text counts from this many words on: "the film" in a review is no leak."""


@dataclass(frozen=True)
class WordTexts:
    """Texts as word numbers: text ``i`` is ``words[starts[i]:starts[i + 1]]``."""

    words: Int64s
    starts: Int64s

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int64s:
        """Words per text, int64 [n]."""
        return np.diff(self.starts)


def number_words(texts: Iterable[str], numbers: dict[str, int]) -> WordTexts:
    """Split (cleaned) texts at white space.

    Args:
        numbers: word → its number; words that are new get the next ones.
    """
    return _flat([numbers.setdefault(word, len(numbers)) for word in text.split()] for text in texts)


def _flat(texts: Iterable[list[int]]) -> WordTexts:
    flat: list[int] = []
    starts = [0]
    for words in texts:
        flat.extend(words)
        starts.append(len(flat))
    return WordTexts(np.array(flat, dtype=np.int64), np.array(starts, dtype=np.int64))


def contained_pairs(needles: WordTexts, haystacks: WordTexts) -> tuple[Int64s, Int64s]:
    """All pairs (needle, haystack) where the needle's words stand in a row in the haystack, equal texts too.

    Returns:
        Needle and haystack numbers, int64 [pairs] each, every pair once. Empty needles are in no text.
    """
    found = [np.empty(0, dtype=np.int64)]
    widths = np.minimum(needles.lengths, _ANCHOR_WORDS)
    for width in range(1, _ANCHOR_WORDS + 1):
        group = np.flatnonzero(widths == width)
        if len(group):
            found.extend(_search(needles, group, haystacks, width))
    return np.divmod(np.unique(np.concatenate(found)), max(len(haystacks), 1))


def _runs(texts: WordTexts, width: int) -> tuple[NDArray[np.uint64], Int64s]:
    """Hash and start of every run of ``width`` words that lies inside one text."""
    count = max(0, len(texts.words) - width + 1)
    words = texts.words.astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(width):
        hashes = (hashes ^ words[offset : offset + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    text_of = np.repeat(np.arange(len(texts)), texts.lengths)
    inside = np.flatnonzero(text_of[:count] == text_of[width - 1 :])
    return hashes[inside], inside


def _search(needles: WordTexts, group: Int64s, haystacks: WordTexts, width: int) -> list[Int64s]:
    """Pairs of the needles in ``group``, by runs of ``width`` words, as needle × haystacks + haystack."""
    hashes, places = _runs(haystacks, width)
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    anchors, first, last = _rarest_runs(needles, group, hashes, width)
    counts = last - first
    known = counts > 0
    group, anchors, first, counts = group[known], anchors[known], first[known], counts[known]
    text_of = np.repeat(np.arange(len(haystacks)), haystacks.lengths)
    found = []
    # A bounded number of places at a time.
    windows = (np.cumsum(counts) - counts) // _CHUNK
    edges = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(counts)]
    for part in itertools.starmap(slice, itertools.pairwise(edges)):
        which = np.repeat(np.arange(part.start, part.stop), counts[part])
        ends = np.cumsum(counts[part])
        within = np.arange(len(which)) - np.repeat(ends - counts[part], counts[part])
        begins = places[first[which] + within] - anchors[which]
        chosen = group[which]
        hit = _equal(needles, chosen, haystacks, begins, text_of)
        found.append(np.unique(chosen[hit] * len(haystacks) + text_of[begins[hit]]))
    return found


def _rarest_runs(
    needles: WordTexts, group: Int64s, hashes: NDArray[np.uint64], width: int
) -> tuple[Int64s, Int64s, Int64s]:
    """For each needle in ``group``: the offset of its rarest run, and where its hits lie in ``hashes``."""
    own, starts = _runs(needles, width)
    text_of = np.repeat(np.arange(len(needles)), needles.lengths)[starts]
    wanted = np.zeros(len(needles), dtype=bool)
    wanted[group] = True
    keep = wanted[text_of]
    own, starts, text_of = own[keep], starts[keep], text_of[keep]
    # Looked up in order and once each: a binary search per run, all over the table, takes far longer.
    distinct, back = np.unique(own, return_inverse=True)
    first = np.searchsorted(hashes, distinct, side="left")[back]
    last = np.searchsorted(hashes, distinct, side="right")[back]
    # Sorted by needle, then by number of hits: the first run of each needle is its rarest.
    order = np.lexsort((last - first, text_of))
    _, leading = np.unique(text_of[order], return_index=True)
    best = order[leading]
    of_needle = np.full(len(needles), -1, dtype=np.int64)
    of_needle[text_of[best]] = best
    chosen = of_needle[group]
    return starts[chosen] - needles.starts[group], first[chosen], last[chosen]


def _equal(needles: WordTexts, chosen: Int64s, haystacks: WordTexts, begins: Int64s, text_of: Int64s) -> Int64s:
    """Which candidates (needle ``chosen[k]`` at word ``begins[k]``) match in full, inside one haystack."""
    lengths = needles.lengths[chosen]
    fits = (begins >= 0) & (begins + lengths <= len(haystacks.words))
    alive = np.flatnonzero(fits)
    alive = alive[text_of[begins[alive]] == text_of[begins[alive] + lengths[alive] - 1]]
    done = [alive[:0]]
    offset = 0
    while len(alive):
        same = needles.words[needles.starts[chosen[alive]] + offset] == haystacks.words[begins[alive] + offset]
        alive = alive[same]
        offset += 1
        complete = lengths[alive] == offset
        done.append(alive[complete])
        alive = alive[~complete]
    return np.concatenate(done)


class OverlapCounter:
    """Counts texts that training has seen, all of them cleaned: equal ones, and further ones that overlap.

    A further one is a text of any length inside a training text, word for word and in a row, or a text around a
    training text of three words or more. Every row counts at most once. Only the texts of the other sets, and some of
    the training texts, are in memory at once.

    Args:
        others: set → its texts.
    """

    def __init__(self, others: Mapping[str, Sequence[str]]) -> None:
        numbers: dict[str, int] = {}
        self._sets = {
            name: np.array([numbers.setdefault(clean(text), len(numbers)) for text in texts], dtype=np.int64)
            for name, texts in others.items()
        }
        self._numbers = numbers
        self._words: dict[str, int] = {}
        self._numbered = number_words(numbers, self._words)
        self._equal, self._touched = (np.zeros(len(numbers), dtype=bool) for _ in range(2))
        self._waiting: dict[str, None] = {}
        self._characters = 0

    def add(self, training: Iterable[str]) -> None:
        """Compare with more training texts."""
        for text in training:
            cleaned = clean(text)
            self._waiting[cleaned] = None
            self._characters += len(cleaned)
            if self._characters > _COMPARED_CHARACTERS:
                self._compare()

    def _compare(self) -> None:
        texts, self._waiting, self._characters = self._waiting, {}, 0
        self._equal[[self._numbers[text] for text in texts if text in self._numbers]] = True
        words = [[self._words.get(word, _ELSEWHERE) for word in text.split()] for text in texts]
        inside, _ = contained_pairs(self._numbered, _flat(words))
        self._touched[inside] = True
        long = [found for found in words if len(found) >= MIN_WORDS and _ELSEWHERE not in found]
        _, around = contained_pairs(_flat(long), self._numbered)
        self._touched[around] = True

    def counts(self) -> tuple[OverlapCount, ...]:
        """For each of the other sets, after all training texts."""
        self._compare()
        further = self._touched & ~self._equal
        return tuple(
            OverlapCount(
                test_set=name,
                test_rows=len(texts),
                duplicates=int(self._equal[texts].sum()),
                contained=int(further[texts].sum()),
            )
            for name, texts in self._sets.items()
        )


def count_overlaps(
    train: Iterable[str], others: Mapping[str, Sequence[str]], called: str, progress: Progress
) -> tuple[OverlapCount, ...]:
    """As :class:`OverlapCounter` counts.

    Args:
        others: set → its texts.
        called: what the sets are called together, for the bar.
    """
    with bar(progress, f"Comparing {called} with the training set", None, "texts"):
        counter = OverlapCounter(others)
        for text in train:
            counter.add((text,))
            progress.advance()
        return counter.counts()
