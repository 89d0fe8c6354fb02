"""Tables of text: TSV, and CSV with any delimiter; the first line names the columns, or they have numbers."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeformer.data.rows import Record, listed
from edgeformer.data.unpacking import MOST_LINE_BYTES
from edgeformer.formats.errors import DataError

Line = tuple[int, str]
"""Its number from 1, and its text with its end."""
Cells = tuple[int, list[str]]
"""Number of the line in which a row begins, and what stands in its columns."""

DELIMITERS = (",", ";", "\t", "|")
_MOST_COLUMNS = 10_000
"""A table has a dozen; every row makes a dictionary of them."""
_SAMPLE_LINES, _SAMPLE_CHARACTERS = 200, 1 << 16
"""By which a delimiter is found."""
_SAYS_DELIMITER = re.compile(r"sep=([,;\t|])\r?\n?")
"""What some spreadsheets write in front of the header."""


@dataclass(frozen=True)
class Layout:
    """How a table is written down.

    Attributes:
        delimiter: between the columns of a CSV file; None: found in its first lines.
        header: whether the first row names the columns; else these are called 1, 2, 3 …
        encoding: of the text; None: UTF-8.
    """

    delimiter: str | None = None
    header: bool = True
    encoding: str | None = None


PLAIN = Layout()


def tsv_records(path: Path, lines: Iterator[Line], layout: Layout) -> Iterator[Record]:
    """Records of a table without any quoting. Raises DataError."""
    rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in lines if line.rstrip("\r\n"))
    remedy = "a tab inside a text needs CSV or JSONL, because TSV has no quoting"
    return _records(path, rows, remedy, header=layout.header)


def csv_records(path: Path, lines: Iterator[Line], layout: Layout) -> Iterator[Record]:
    """Records of a table with quoting. Raises DataError."""
    delimiter, lines = known_delimiter(lines, layout.delimiter)
    named = {",": "a comma", ";": "a semicolon", "\t": "a tab"}.get(delimiter, repr(delimiter))
    remedy = f'put a text that holds {named} in double quotes ("...")'
    return _records(path, _rows(path, lines, delimiter), remedy, header=layout.header)


def known_delimiter(lines: Iterator[Line], stated: str | None) -> tuple[str, Iterator[Line]]:
    """The delimiter ``stated``, else the one of a CSV file's first lines; and all lines of the table."""
    sample = list(first_of_table(lines))
    said = said_delimiter([text for _, text in sample])
    if said:
        del sample[0]
    rest = next(lines, None)
    more = [] if rest is None else [rest]
    found = stated or (said or delimiter_of([text for _, text in sample], whole=rest is None))
    return found, itertools.chain(sample, more, lines)


def said_delimiter(lines: list[str]) -> str | None:
    """The delimiter that the first line states, as some spreadsheets write it."""
    said = _SAYS_DELIMITER.fullmatch(lines[0]) if lines else None
    return said[1] if said else None


def first_of_table(lines: Iterator[Line]) -> Iterator[Line]:
    """As many lines as tell the delimiter."""
    characters = 0
    for number, line in itertools.islice(lines, _SAMPLE_LINES):
        characters += len(line)
        yield number, line
        if characters > _SAMPLE_CHARACTERS:
            return


def delimiter_of(lines: list[str], *, whole: bool = True) -> str:
    """What parts the columns of a CSV file: most rows have as many as the first one, which has two at least.

    Args:
        lines: the first ones of the file, with their ends.
        whole: they are all of it; else the last row may be cut off, and does not count.

    Returns:
        A comma where nothing else does better: also of a table with one column.
    """
    best, most = ",", 0.0
    for delimiter in DELIMITERS:
        try:
            rows = [cells for cells in csv.reader(lines, delimiter=delimiter) if cells]
        except csv.Error:
            continue
        if not whole and len(rows) > 1:
            rows.pop()
        if not rows or len(rows[0]) < 2:
            continue
        share = sum(len(cells) == len(rows[0]) for cells in rows) / len(rows)
        if share > most:
            best, most = delimiter, share
    return best


def _rows(path: Path, lines: Iterator[Line], delimiter: str) -> Iterator[Cells]:
    """Rows that are not empty. Raises DataError for quotes that are not closed, and the like."""
    last = 0

    def texts() -> Iterator[str]:
        nonlocal last
        for number, line in lines:
            last = number
            yield line

    csv.field_size_limit(MOST_LINE_BYTES)  # as any line; Python's own 128 KiB are less than some texts have
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        before = last
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {before + 1}: not valid CSV: {error}; look for a double quote that is not "
                'closed or not doubled ("")'
            ) from None
        if cells is None:
            return
        if cells:
            yield before + 1, cells


def _records(path: Path, rows: Iterable[Cells], remedy: str, *, header: bool) -> Iterator[Record]:
    """Records of a table. ``remedy``: for a row with too few or too many cells."""
    names: list[str] = []
    first = "the header" if header else "the first row"
    for number, cells in rows:
        if not names:
            names = _names(path, cells) if header else [str(place) for place in range(1, len(cells) + 1)]
            if len(cells) > _MOST_COLUMNS:
                raise DataError(f"{path}, line 1: names {len(cells):,} columns; at most {_MOST_COLUMNS:,} are read")
            if header:
                continue
        if len(cells) != len(names):
            columns = f"{len(cells)} columns, {first} {len(names)} ({listed(names)})"
            raise DataError(f"{path}, line {number}: has {columns}; {remedy}")
        yield f"{path}, line {number}", dict(zip(names, cells, strict=True))


def _names(path: Path, cells: list[str]) -> list[str]:
    """Names of the columns; one without a name is called by its number. Raises DataError."""
    twice = sorted(name for name, count in Counter(cells).items() if count > 1 and name)
    if twice:
        raise DataError(
            f"{path}, line 1: column {listed(twice[:1])!r} is there twice; the first line must name each column once"
        )
    return [name or f"column {place}" for place, name in enumerate(cells, start=1)]
