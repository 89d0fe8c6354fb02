"""Texts that are to be answered: a file of any format, or standard input, one after the other and never all at once."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from edgeformer.artifacts.data_config import FileSource, Source
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data.records import (
    COMPRESSIONS,
    MOST_LINE_BYTES,
    as_utf8,
    check_file,
    first_lines,
    format_of,
    format_of_source,
    known_delimiter,
    lines_of,
    opened,
    said_delimiter,
)
from edgeformer.data.rows import Text
from edgeformer.data.sources import Columns, columns_of, file_source, read

WINDOW_ROWS, WINDOW_CHARACTERS = 2048, 4 << 20
"""What is in memory at once. Rows of similar length are found among so many."""
STANDARD_INPUT = "standard input"
PLAIN = "text"


class InputRow(NamedTuple):
    """One row of an input: its text or pair, where it is, for messages, and all its values by column."""

    text: Text
    where: str = ""
    values: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Unlabelled:
    """Texts that wait to be read.

    Attributes:
        name: of the file, for messages.
        pairs: they are pairs.
        expected: how many there are; None: not known.
        rows: reads them from the start. Raises DataError.
        leave: ends the reading; true: a thread waits for what may never come, and cannot be waited for.
        source: the file and its columns; None: plain text.
        columns: names of all columns, of JSON Lines those of the first record; empty: plain text.
        delimiter: between the columns of a table of text.
        bom: the text begins with a byte order mark.
    """

    name: str
    pairs: bool
    expected: int | None
    rows: Callable[[], Iterator[InputRow]]
    leave: Callable[[], bool] = lambda: False
    source: FileSource | None = None
    columns: tuple[str, ...] = ()
    delimiter: str = ","
    bom: bool = False

    def texts(self) -> Iterator[Text]:
        """The texts alone, from the start. Raises DataError."""
        return (row.text for row in self.rows())


@dataclass(frozen=True)
class Reading:
    """How a file is to be read.

    Attributes:
        parts: what the model's own data is, whose columns are looked for; empty: not known.
        columns: named ones, which win.
        format: as data sections call it; None: by the file's suffix, and of standard input one text per line.
        single: single texts only, also where the file has the columns of a pair.
    """

    parts: Mapping[str, Sequence[Source]]
    columns: Columns = field(default_factory=Columns)
    format: str | None = None
    single: bool = False


@contextlib.contextmanager
def unlabelled(path: Path | None, stdin: BinaryIO, how: Reading) -> Iterator[Unlabelled]:
    """The texts of a file, or of standard input; a line of plain text is one, also an empty line.

    Args:
        path: None: standard input. Lines are read as they come; a table is first written to a temporary file.
        stdin: its bytes.
        how: it is read.

    Raises:
        DataError: no such file, or none of its columns can be the text.
        InputError: options that do not go together.
    """
    if how.columns.text_pair is not None and how.columns.text is None:
        raise InputError("--pair COL: name the column of the first texts, too: --text COL --pair COL")
    if path is None and how.format in (None, PLAIN):
        _refuse_columns(how, STANDARD_INPUT)
        raw = _Left(stdin)
        stream = as_utf8(Path(STANDARD_INPUT), io.BufferedReader(raw), how.columns.encoding)
        yield Unlabelled(STANDARD_INPUT, False, None, lambda: _lines(Path(STANDARD_INPUT), stream), raw.leave)
        return
    if path is not None:
        yield _of_file(path, how)
        return
    with tempfile.TemporaryDirectory() as folder:
        spooled = Path(folder) / f"standard-input.{how.format}"
        with spooled.open("wb") as file:
            shutil.copyfileobj(stdin, file)
        try:
            yield _of_file(spooled, how)
        except DataError as error:
            raise DataError(str(error).replace(str(spooled), STANDARD_INPUT)) from None


def windows(
    rows: Iterable[InputRow], most_rows: int = WINDOW_ROWS, characters: int = WINDOW_CHARACTERS
) -> Iterator[list[InputRow]]:
    """Rows in groups of up to ``most_rows``, and of about ``characters`` at most: one row may have more."""
    window: list[InputRow] = []
    size = 0
    for row in rows:
        window.append(row)
        texts = (row.text,) if isinstance(row.text, str) else row.text
        size += sum(map(len, texts)) + sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(window) >= most_rows or size >= characters:
            yield window
            window, size = [], 0
    if window:
        yield window


class _Left(io.RawIOBase):
    """Standard input for a thread that can be left while it waits.

    The stream itself is locked by who waits in it, and an interpreter that ends aborts where it cannot have that lock.
    """

    def __init__(self, stdin: BinaryIO) -> None:
        self._raw: Any = getattr(stdin, "raw", stdin)
        self._waits = self._left = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._waits = True
        try:
            found: int | None = None if self._left else self._raw.readinto(buffer)
        finally:
            self._waits = False
        if self._left:
            raise InterruptedError("nobody reads it any more")
        return found

    def leave(self) -> bool:
        """From now on nothing can be read; true: somebody waits right now."""
        self._left = True
        return self._waits


def _of_file(path: Path, how: Reading) -> Unlabelled:
    check_file(path)
    kind = _format(path, how.format)
    encoding = how.columns.encoding
    if kind == PLAIN:
        _refuse_columns(how, str(path))
        return Unlabelled(str(path), False, _count(path, kind, encoding), lambda: _plain(path, encoding))
    source = _source(path, how)
    rows = lambda: (InputRow(row.text, row.where, row.values or {}) for row in read(source, blanks=True))  # noqa: E731
    kind, delimiter, bom, header_lines = format_of_source(source), ",", False, 0
    if kind in ("csv", "tsv"):
        lines = first_lines(path, encoding)
        delimiter = "\t" if kind == "tsv" else known_delimiter(iter(enumerate(lines, 1)), source.delimiter)[0]
        header_lines = source.header + (kind == "csv" and said_delimiter(lines) is not None)
        with opened(path) as file:
            marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            bom = file.read(3).startswith(marks if encoding is not None else codecs.BOM_UTF8)
    expected = _count(path, kind, encoding, delimiter, header_lines)
    columns = tuple(columns_of(source))
    pairs = source.text_pair is not None
    return Unlabelled(str(path), pairs, expected, rows, source=source, columns=columns, delimiter=delimiter, bom=bom)


def _format(path: Path, stated: str | None) -> str:
    try:
        known = format_of(path, None)
    except DataError:
        known = None
    if known is None and stated != PLAIN:
        raise InputError(
            f"{path}: its suffix does not tell the format; rename it, or say it with --input-format and pipe the file: "
            "--file -"
        )
    if stated not in (None, PLAIN, known):
        raise InputError(f"--input-format {stated}: {path} is called {known}; rename it, or leave out --input-format")
    return stated or str(known)


def _refuse_columns(how: Reading, name: str) -> None:
    for option, column in (("--text", how.columns.text), ("--pair", how.columns.text_pair)):
        if column is not None:
            raise InputError(f"{option} {column}: {name} is read as plain text, one text per line, without columns")


def _source(path: Path, how: Reading) -> FileSource:
    """The file with the columns that the model's own data has; else with well-known ones."""
    single = FileSource(kind="file", path=str(path), text_pair=None)
    own = [source for sources in how.parts.values() for source in sources]
    known = {(source.text, source.text_pair): source for source in own if source.kind != "synthetic-reviews"}
    if how.columns.text is not None:
        return file_source(path, next(iter(known.values()), None), labelled=False, columns=how.columns)
    if how.single:
        known = {key: source for key, source in known.items() if key[1] is None}
    elif not own:
        return _unknown(path, single, how.columns)
    refusals: list[DataError] = []
    found: list[FileSource] = []
    for columns, like in (known or {("", None): single}).items():
        try:
            source = file_source(path, like, labelled=False, columns=how.columns)
        except DataError as error:
            refusals.append(error)
            continue
        if (source.text, source.text_pair) == columns:
            return source
        found.append(source)
    if not found:
        raise _with_option(refusals[0])
    return found[0]


def _unknown(path: Path, single: FileSource, columns: Columns) -> FileSource:
    """Nothing is known of the model's data: pairs where the file has those, and nothing that could be a single text."""
    try:
        source = file_source(path, labelled=False, columns=columns)
    except DataError as error:
        raise _with_option(error) from None
    if source.text_pair is not None:
        with contextlib.suppress(DataError):
            other = file_source(path, single, labelled=False, columns=columns)
            raise InputError(
                f"{path}: nothing is known of this model's data, so rows could be single texts ({other.text}) or pairs "
                f"({source.text} and {source.text_pair}); say it: --text {other.text}, or --text {source.text} "
                f"--pair {source.text_pair}"
            )
    return source


def _with_option(error: DataError) -> DataError:
    named = "; columns: " not in str(error) or "--text" in str(error)
    return error if named else DataError(f"{error}; or name it: --text COLUMN")


def _plain(path: Path, encoding: str | None) -> Iterator[InputRow]:
    with opened(path, encoding) as file:
        yield from _lines(path, file)


def _lines(path: Path, file: BinaryIO) -> Iterator[InputRow]:
    """Every line, also the empty ones: answers stand on the same lines."""
    return (InputRow(line.rstrip("\r\n")) for _, line in lines_of(path, file))


def _count(path: Path, kind: str, encoding: str | None, delimiter: str = ",", header_lines: int = 0) -> int | None:
    """Count the records of a file of text: a line break inside quotes ends none.

    Args:
        header_lines: lines that are none: the header, and one that states the delimiter.

    Returns:
        None where they cannot be counted without unpacking the file.
    """
    if kind == "parquet" or path.suffix.lower() in COMPRESSIONS:
        return None
    with path.open("rb") as raw:
        file = as_utf8(path, raw, encoding)
        if kind == PLAIN:
            return sum(1 for _ in file)
        if kind != "csv":
            return sum(1 for line in file if line.strip()) - header_lines
        csv.field_size_limit(MOST_LINE_BYTES)
        lines = (line.decode("utf-8", "replace") for line in file)
        try:
            rows = sum(1 for cells in csv.reader(lines, delimiter=delimiter) if cells)
        except csv.Error:
            return None  # reading the rows says what is wrong
    return rows - header_lines
