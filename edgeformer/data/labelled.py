"""Rows with their labels as numbers: the sets that splits cut, and what they are called by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.rows import LONGEST_NAME, Row, Text
from edgeformer.formats.errors import DataError, did_you_mean

MOST_LABELS = 62
"""Where a row can have several: the set of them is one number, a bit for each."""


@dataclass(frozen=True)
class LabelledTexts:
    """``texts`` [n] as the source has them, not cleaned; ``labels`` int64 [n], indices into data.labels.

    ``sources`` int64 [n]: the number of each row's source; None where nobody asks for it.
    """

    texts: list[Text]
    labels: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> LabelledTexts:
        """The rows at ``indices``, in that order."""
        sources = None if self.sources is None else self.sources[indices]
        return LabelledTexts([self.texts[i] for i in indices.tolist()], self.labels[indices], sources)

    @classmethod
    def joined(cls, sets: Sequence[LabelledTexts], *, apart: bool = False) -> LabelledTexts:
        """All rows, one set behind the other.

        Args:
            apart: number the sources, those of each set by themselves; a set without numbers is one source.
        """
        texts = [text for found in sets for text in found.texts]
        labels = np.concatenate([np.empty(0, np.int64), *(found.labels for found in sets)])
        if not apart:
            return cls(texts, labels)
        numbers, first = [np.empty(0, np.int64)], 0
        for found in sets:
            own = np.zeros(len(found), np.int64) if found.sources is None else found.sources
            numbers.append(own + first)
            first += int(own.max(initial=-1)) + 1
        return cls(texts, labels, np.concatenate(numbers))

    @classmethod
    def unlabelled(cls, texts: Sequence[Text]) -> LabelledTexts:
        """Texts of a language model in the form that the token cache and the fingerprints know: all labels are 0."""
        return cls(list(texts), np.zeros(len(texts), dtype=np.int64))

    def fingerprint(self) -> str:
        """sha256 over texts and labels, in order."""
        digest = Fingerprint()
        digest.add_labels(self.labels)
        digest.add_texts(self.texts)
        return digest.hexdigest()


class Fingerprint:
    """sha256 over the labels, and then the texts, of a set: all labels first, each kind in any number of pieces."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add_labels(self, labels: Sequence[int] | NDArray[np.int64]) -> None:
        """Of the next rows, as indices."""
        self._digest.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())

    def add_texts(self, texts: Iterable[Text]) -> None:
        """Of the next rows."""
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                content = part.encode("utf-8")
                self._digest.update(len(content).to_bytes(8, "little"))
                self._digest.update(content)

    def hexdigest(self) -> str:
        """Of what was added so far."""
        return self._digest.hexdigest()


def label_rows(rows: Iterable[Row], labels: Sequence[str]) -> LabelledTexts:
    """Map each row's label to its class index; of several labels (a tuple) to a number with the bits of their indices.

    A label is matched by name, then read as an index; never where a name is the number of another class: of labels
    called "1" … "5" a "4" would be the fourth in one row and the fifth in another.

    Raises:
        DataError: a label that is neither, or a row without one.
    """
    found = list(labelled(rows, labels))
    return LabelledTexts([text for text, _ in found], np.array([index for _, index in found], dtype=np.int64))


def labelled(rows: Iterable[Row], labels: Sequence[str]) -> Iterator[tuple[Text, int]]:
    """Each row's text and class index, as :func:`label_rows` finds them. Raises DataError."""
    by_name = {name: index for index, name in enumerate(labels)}
    return ((row.text, _bits(row, by_name) if isinstance(row.label, tuple) else _index(row, by_name)) for row in rows)


def label_counts(numbers: NDArray[np.int64], classes: int, *, several: bool) -> list[int]:
    """Rows of each class.

    Args:
        numbers: of :func:`label_rows`, int64 [n].
        several: they are sets of labels.
    """
    if several:
        return [int((numbers >> bit & 1).sum()) for bit in range(classes)]
    return [int(count) for count in np.bincount(numbers, minlength=classes)]


def label_sets(numbers: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Sets of labels as 0 and 1, int64 [n, classes]."""
    found: NDArray[np.int64] = numbers[:, None] >> np.arange(classes) & 1
    return found


def _bits(row: Row, by_name: dict[str, int]) -> int:
    assert isinstance(row.label, tuple)
    return sum({1 << _index(Row(row.text, one, row.where), by_name) for one in row.label})


def _shown(name: str) -> str:
    return repr(name) if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]!r}…"


def _index(row: Row, by_name: dict[str, int]) -> int:
    name = str(row.label)
    if row.label is not None:
        if name in by_name:
            return by_name[name]
        if _is_number(name) and int(name) < len(by_name) and not _misleading(by_name):
            return int(name)
    numbers = "" if _misleading(by_name) else f" (or their numbers 0 to {len(by_name) - 1})"
    problem = "has no label" if row.label is None else f"label {_shown(name)} is not in the set"
    hint = "" if row.label is None else did_you_mean(name, by_name)
    allowed = f"{hint}allowed: {', '.join(by_name)}{numbers}"
    raise DataError(f"{row.where}: {problem}; {allowed}; change the row, or data.labels")


def _is_number(name: str) -> bool:
    # isdecimal alone lets other scripts' digits through; those are names.
    return name.isascii() and name.isdecimal() and len(name) < 10


def _misleading(by_name: dict[str, int]) -> bool:
    """Whether a class is called by another one's number."""
    return any(_is_number(name) and int(name) < len(by_name) and int(name) != index for name, index in by_name.items())
