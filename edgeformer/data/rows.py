"""Row: one text with its label, and how a record (column → value) of any format becomes one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from edgeformer.formats.data_config import FileSource, HubSource
from edgeformer.formats.errors import DataError

Record = tuple[str, Mapping[str, object]]
"""Where a record is ("reviews.csv, line 7"), and its values by column."""


@dataclass(frozen=True)
class Row:
    """A text, its label as the source has it (None: unlabelled), and where it was found, for messages."""

    text: str
    label: str | int | None
    where: str


def rows_of(records: Iterable[Record], source: FileSource | HubSource) -> Iterator[Row]:
    """Pick text and label out of each record.

    Raises:
        DataError: a column is missing, a text is not text, or a row has no label and may not be skipped.
    """
    for where, values in records:
        label = _label(where, values, source)
        if label is None and source.skip_unlabelled:
            continue
        if label is None and (source.label is not None or source.label_value is not None):
            raise DataError(
                f"{where}: has no label in column {source.label!r}; fill it in, "
                "or set skip_unlabelled: true for this source to leave such rows out"
            )
        yield Row(_text(where, values, source.text), label, where)


def missing_column(where: str, kind: str, name: str, columns: Iterable[str]) -> DataError:
    """The error for a source whose ``kind`` column (text or label) is not among ``columns``."""
    have = list(columns)
    near = difflib.get_close_matches(name, have, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(have) if have else "none"
    return DataError(f"{where}: no column {name!r}; {hint}columns: {listed}; set the source's {kind}: to one of them")


def _label(where: str, values: Mapping[str, object], source: FileSource | HubSource) -> str | int | None:
    if source.label_value is not None:
        return source.label_value
    if source.label is None:
        return None
    if source.label not in values:
        raise missing_column(where, "label", source.label, values)
    value = values[source.label]
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer():  # pandas writes whole numbers so beside missing ones
        return int(value)
    if isinstance(value, (str, int)):
        return int(value) if isinstance(value, bool) else value
    kind = type(value).__name__
    raise DataError(f"{where}: column {source.label!r} holds a {kind}; a label is a name or a whole number")


def _text(where: str, values: Mapping[str, object], column: str) -> str:
    if column not in values:
        raise missing_column(where, "text", column, values)
    text = values[column]
    if not isinstance(text, str):
        kind = "nothing" if text is None else f"a {type(text).__name__}"
        raise DataError(f"{where}: column {column!r} holds {kind}; it must hold text")
    if not text.isascii():
        _check_unicode(where, text)
    return text


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{where}: character {error.start + 1} is half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X}), not text; repair or remove this row"
        ) from None
