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

from edgeformer.data.cleaning import clean
from edgeformer.formats.manifest import OverlapCount
from edgeformer.formats.progress import Progress, bar

Int64s = NDArray[np.int64]
_ANCHOR_WORDS = 3
_CHUNK = 2_000_000
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
    flat: list[int] = []
    starts = [0]
    for text in texts:
        flat.extend([numbers.setdefault(word, len(numbers)) for word in text.split()])
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


def count_overlaps(
    train: Sequence[str], others: Mapping[str, Sequence[str]], called: str, progress: Progress
) -> tuple[OverlapCount, ...]:
    """Count texts that training has seen, all of them cleaned: equal ones, and further ones that overlap.

    A further one is a text of any length inside a training text, word for word and in a row, or a text around a
    training text of three words or more. Every row counts at most once.

    Args:
        others: set → its texts.
        called: what the sets are called together, for the bar.
    """
    overlap = []
    with bar(progress, f"Comparing {called} with the training set", len(others), "sets"):
        seen = dict.fromkeys(clean(text) for text in train)
        numbers: dict[str, int] = {}
        whole = number_words(seen, numbers)
        long = number_words((text for text in seen if text.count(" ") >= MIN_WORDS - 1), numbers)
        for name, texts in others.items():
            cleaned = [clean(text) for text in texts]
            further = list(dict.fromkeys(text for text in cleaned if text not in seen))
            numbered = number_words(further, numbers)
            inside, _ = contained_pairs(numbered, whole)
            _, around = contained_pairs(long, numbered)
            touched = {further[index] for index in np.union1d(inside, around).tolist()}
            duplicates, contained = (sum(text in found for text in cleaned) for found in (seen, touched))
            overlap.append(
                OverlapCount(test_set=name, test_rows=len(texts), duplicates=duplicates, contained=contained)
            )
            progress.advance()
    return tuple(overlap)
