"""Row: one text with its label, from a record (column → value) of any format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import Self

from edgeformer.formats.data_config import FileSource, HubSource
from edgeformer.formats.errors import DataError, did_you_mean

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
