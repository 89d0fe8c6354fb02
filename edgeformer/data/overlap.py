"""How much of a test set training has already seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeformer.data.cleaning import clean
from edgeformer.data.containment import WordNumbers, contained_pairs
from edgeformer.formats.manifest import OverlapCount

MIN_WORDS = 3
"""A training text inside a test text counts from this many words on: "the film" in a review is no leak."""


class SeenTexts:
    """The training texts, cleaned and numbered once, for any number of test sets."""

    def __init__(self, train: Sequence[str]) -> None:
        texts = dict.fromkeys(clean(text) for text in train)
        self._texts = set(texts)
        self._words = WordNumbers()
        self._all = self._words.number(texts)
        self._long = self._words.number(text for text in texts if text.count(" ") >= MIN_WORDS - 1)

    def count(self, name: str, test: Sequence[str]) -> OverlapCount:
        """Count the texts of ``test`` that were seen; see :func:`count_overlap`."""
        cleaned = [clean(text) for text in test]
        duplicates = sum(text in self._texts for text in cleaned)
        others = list(dict.fromkeys(text for text in cleaned if text not in self._texts))
        numbered = self._words.number(others)
        inside, _ = contained_pairs(numbered, self._all)
        _, around = contained_pairs(self._long, numbered)
        touched = {others[index] for index in np.union1d(inside, around).tolist()}
        return OverlapCount(
            test_set=name,
            test_rows=len(test),
            duplicates=duplicates,
            contained=sum(text in touched for text in cleaned),
        )


def count_overlap(name: str, test: list[str], train: list[str]) -> OverlapCount:
    """Count test texts that training has seen, both cleaned: equal ones, and further ones that overlap.

    A further one is a test text of any length inside a training text, word for word and in a row, or a test
    text around a training text of three words or more. Every test row counts at most once.
    """
    return SeenTexts(train).count(name, test)
