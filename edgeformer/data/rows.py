"""Row: one text with its label, from a record (column → value) of any format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from edgeformer.artifacts.data_config import FileSource, HubSource
from edgeformer.artifacts.errors import DataError, did_you_mean

Record = tuple[str, Mapping[str, object]]
"""Where a record is ("reviews.csv, line 7"), and its values by column."""

Text = str | tuple[str, str]
"""What one row is about: a text, or a pair of texts, which a tokenizer joins by its own template."""


class Unreadable(str):
    """What stands where a text should be, as JSON has it, and ``problem``: why it is none."""

    def __new__(cls, shown: str, problem: str) -> Self:
        made = super().__new__(cls, shown)
        made.problem = problem
        return made

    problem: str


LONGEST_NAME = 80
"""Characters of a column's name or of a label that a message repeats."""


Label = str | int | float | tuple[str | int, ...]
"""As a source has it: a name or a number; where a row can have several labels, also a list of them."""


@dataclass(frozen=True)
class Row:
    """A text or a pair, its label as the source has it (None: unlabelled), and where it was found, for messages.

    ``values`` are those of the whole record by column, where the reader keeps them.
    """

    text: Text
    label: Label | None
    where: str
    values: Mapping[str, object] | None = field(default=None, compare=False, repr=False)


Told = Callable[[Row], None]
"""Is told of a row that is left out."""


def rows_of(
    records: Iterable[Record], source: FileSource | HubSource, separator: str | None = None, *, blanks: bool = False
) -> Iterator[Row]:
    """Pick text and label out of each record.

    Args:
        separator: rows have none, one or several labels, and this stands between them; None: one each.
        blanks: a text that is not there (null) is an empty one, what is no text is :class:`Unreadable`, and rows keep
            the values of their records.

    Raises:
        DataError: a column is missing, a text is not text, or a row has no label and may not be skipped.
    """
    for where, values in records:
        label = _label(where, values, source) if separator is None else _labels(where, values, source, separator)
        if source.skip_unlabelled and (label is None or _is_unlabelled(values, source)):
            continue
        if label is None and (source.label is not None or source.label_value is not None):
            raise DataError(
                f"{where}: has no label in column {source.label!r}; fill it in, "
                "or set skip_unlabelled: true for this source to leave such rows out"
            )
        text = _text(where, values, source.text, blanks)
        second = None if source.text_pair is None else _text(where, values, source.text_pair, blanks)
        yield Row(text if second is None else (text, second), label, where, values if blanks else None)


def in_one(text: Text) -> str:
    """A text as it is; both of a pair, with a space between them: for counts of words and letters, not for a model."""
    return text if isinstance(text, str) else " ".join(text)


def alike(text: Text) -> str:
    """The same for texts that differ in capitals and white space only."""
    return "\0".join(" ".join(part.casefold().split()) for part in ((text,) if isinstance(text, str) else text))


def is_empty(text: Text) -> bool:
    """Whether there is nothing but white space in it; of a pair, in both."""
    return not (text if isinstance(text, str) else "".join(text)).strip()


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: the first ones, none of them too long to be read."""
    have = list(names)
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in have[:most]]
    return ", ".join([*shown, *([f"… ({len(have):,} in all)"] if len(have) > most else [])])


def missing_column(where: str, kind: str, name: str, columns: Iterable[str]) -> DataError:
    """The error for a source whose ``kind`` column (text or label) is not among ``columns``."""
    have = list(columns)
    shown = f"{did_you_mean(name, have)}columns: {listed(have) if have else 'none'}"
    return DataError(f"{where}: no column {name!r}; {shown}; set the source's {kind}: to one of them")


def _is_unlabelled(values: Mapping[str, object], source: FileSource | HubSource) -> bool:
    """Whether a row has a column of labels and nothing in it, also where all rows are given one label."""
    return source.label is not None and source.label in values and _says_nothing(values[source.label])


def _says_nothing(value: object) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def _label(where: str, values: Mapping[str, object], source: FileSource | HubSource) -> str | int | float | None:
    if source.label_value is not None:
        return source.label_value
    if source.label is None:
        return None
    if source.label not in values:
        raise missing_column(where, "label", source.label, values)
    value = values[source.label]
    if _says_nothing(value):
        return None
    if isinstance(value, float) and value.is_integer():  # pandas writes whole numbers so beside missing ones
        return int(value)
    if isinstance(value, (str, int, float)):
        return int(value) if isinstance(value, bool) else value
    raise DataError(f"{where}: column {source.label!r} holds {a_kind(value)}; a label is a name or a number")


def _labels(
    where: str, values: Mapping[str, object], source: FileSource | HubSource, separator: str
) -> tuple[str | int, ...] | None:
    """An empty cell is none of the labels; with ``skip_unlabelled`` nobody labelled the row."""
    value = source.label_value if source.label is None or source.label_value is not None else None
    if value is None and source.label is not None:
        listed_ = values.get(source.label)
        if isinstance(listed_, (list, tuple)):
            if not all(isinstance(one, (str, int)) for one in listed_):
                raise DataError(f"{where}: column {source.label!r} holds a list; its items must be names or numbers")
            return tuple(listed_)
        found = _label(where, values, source)
        if found is None and source.skip_unlabelled:
            return None
        value = int(found) if isinstance(found, float) else found
    if isinstance(value, str):
        return tuple(name for part in value.split(separator) if (name := part.strip()))
    return () if value is None else (value,)


def _text(where: str, values: Mapping[str, object], column: str, blanks: bool) -> str:
    if column not in values:
        raise missing_column(where, "text", column, values)
    text = values[column]
    if text is None and blanks:
        return ""
    problem = _no_text(text, column)
    if problem is not None:
        if blanks:
            return Unreadable(json.dumps(text, default=str), problem)
        raise DataError(f"{where}: {problem}")
    return str(text)


def _no_text(value: object, column: str) -> str | None:
    """Why a value is no text; None: it is one."""
    if not isinstance(value, str):
        kind = "nothing" if value is None else a_kind(value)
        return f"column {column!r} holds {kind}; it must hold text"
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            return (
                f"character {error.start + 1} is half of a surrogate pair "
                f"(U+{ord(value[error.start]):04X}), not text; repair or remove this row"
            )
    return None


def a_kind(value: object) -> str:
    """What a value is, for a message: "an int", "a list"."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


# Rows with their labels as numbers: the sets that splits cut, and what they are called by their content.


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
