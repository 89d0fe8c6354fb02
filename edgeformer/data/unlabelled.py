"""Texts to be answered: the rows of a file of any format, or of standard input, read one after the other."""

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
    MAX_LINE_BYTES,
    as_utf8,
    check_file,
    detect_delimiter,
    first_lines,
    format_of_source,
    lines_of,
    open_data_file,
    suffix_format,
)
from edgeformer.data.rows import Text
from edgeformer.data.sources import Columns, columns_of, file_source, read

WINDOW_ROWS, WINDOW_CHARACTERS = 2048, 4 << 20
"""Limits of the rows in memory, among which rows of similar length are batched."""
_STANDARD_INPUT = "standard input"
_PLAIN = "text"


class InputRow(NamedTuple):
    """A text or pair, its place for messages, and all values of the row by column."""

    text: Text
    where: str = ""
    values: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Unlabelled:
    """Texts to be read.

    Attributes:
        name: of the file, for messages.
        pairs: the texts are pairs.
        expected: number of rows; None: unknown.
        rows: reads the rows from the start. Raises DataError.
        leave: ends the reading. Returns whether a thread is blocked in a read that may never return.
        source: the file and its columns; None: plain text.
        columns: names of all columns; of JSON Lines the keys of the first record; empty: plain text.
        delimiter: between the columns of a table.
        bom: the file begins with a byte order mark.
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
        """Yield the texts from the start. Raises DataError."""
        return (row.text for row in self.rows())


@dataclass(frozen=True)
class Reading:
    """Options of reading a file.

    Attributes:
        parts: of the model's own data, whose columns are looked for; empty: unknown.
        columns: columns that the user names.
        format: name of a format in data sections; None: by the file's suffix, and one text per line of standard input.
        single: read single texts even if the file has the columns of a pair.
    """

    parts: Mapping[str, Sequence[Source]]
    columns: Columns = field(default_factory=Columns)
    format: str | None = None
    single: bool = False


@contextlib.contextmanager
def unlabelled(path: Path | None, stdin: BinaryIO, how: Reading) -> Iterator[Unlabelled]:
    """Open the texts of a file or of standard input. Every line of plain text is a text, also an empty line.

    Args:
        path: None: standard input. Lines are read as they come; a table is copied to a temporary file first.
        stdin: standard input as bytes.

    Raises:
        DataError: no such file, or none of its columns can be the text.
        InputError: conflicting options.
    """
    if how.columns.text_pair is not None and how.columns.text is None:
        raise InputError("--pair COL: name the column of the first texts, too: --text COL --pair COL")
    if path is not None:
        yield _open_file(path, how)
    elif how.format in (None, _PLAIN):
        _refuse_columns(how, _STANDARD_INPUT)
        raw = _InterruptibleInput(stdin)
        stream = as_utf8(Path(_STANDARD_INPUT), io.BufferedReader(raw), how.columns.encoding)
        rows = lambda: _plain_rows(Path(_STANDARD_INPUT), stream)  # noqa: E731
        yield Unlabelled(_STANDARD_INPUT, False, None, rows, raw.leave)
    else:
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / f"standard-input.{how.format}"
            with copied.open("wb") as file:
                shutil.copyfileobj(stdin, file)
            try:
                yield _open_file(copied, how)
            except DataError as error:
                raise DataError(str(error).replace(str(copied), _STANDARD_INPUT)) from None


def windows(
    rows: Iterable[InputRow], most_rows: int = WINDOW_ROWS, characters: int = WINDOW_CHARACTERS
) -> Iterator[list[InputRow]]:
    """Yield rows in groups of at most ``most_rows`` and of about ``characters``; a single row may have more."""
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


class _InterruptibleInput(io.RawIOBase):
    """Standard input that the program can stop reading while a thread is blocked in a read.

    The blocked thread holds the lock of ``sys.stdin``, and an interpreter that exits aborts if it cannot get that lock.
    """

    def __init__(self, stdin: BinaryIO) -> None:
        self._raw: Any = getattr(stdin, "raw", stdin)
        self._is_reading = self._is_closed = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._is_reading = True
        try:
            size: int | None = None if self._is_closed else self._raw.readinto(buffer)
        finally:
            self._is_reading = False
        if self._is_closed:
            raise InterruptedError("reading was stopped")
        return size

    def leave(self) -> bool:
        """Refuse all further reads. Returns whether a thread is blocked in a read."""
        self._is_closed = True
        return self._is_reading


def _open_file(path: Path, how: Reading) -> Unlabelled:
    check_file(path)
    encoding = how.columns.encoding
    kind = suffix_format(path)
    if kind is None and how.format != _PLAIN:
        raise InputError(
            f"{path}: its suffix does not tell the format; rename it, or say it with --input-format and pipe the file: "
            "--file -"
        )
    if how.format not in (None, _PLAIN, kind):
        raise InputError(
            f"--input-format {how.format}: {path} is called {kind}; rename it, or leave out --input-format"
        )
    if _PLAIN in (kind, how.format):
        _refuse_columns(how, str(path))

        def plain_rows() -> Iterator[InputRow]:
            with open_data_file(path, encoding) as file:
                yield from _plain_rows(path, file)

        return Unlabelled(str(path), False, _count(path, _PLAIN, encoding), plain_rows)
    source = _source(path, how)
    rows = lambda: (InputRow(row.text, row.where, row.values or {}) for row in read(source, blanks=True))  # noqa: E731
    kind, delimiter, bom, extra_lines = format_of_source(source), ",", False, 0
    if kind in ("csv", "tsv"):
        extra_lines = int(source.header)
        delimiter = "\t"
        if kind == "csv":
            lines = enumerate(first_lines(path, encoding))
            delimiter, table_lines = detect_delimiter(lines, source.delimiter)
            extra_lines += next(table_lines, (0, ""))[0]  # 1 if the first line states the delimiter
        with open_data_file(path) as file:
            marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            bom = file.read(3).startswith(marks if encoding is not None else codecs.BOM_UTF8)
    expected = _count(path, kind, encoding, delimiter, extra_lines)
    columns = tuple(columns_of(source))
    pairs = source.text_pair is not None
    return Unlabelled(str(path), pairs, expected, rows, source=source, columns=columns, delimiter=delimiter, bom=bom)


def _refuse_columns(how: Reading, name: str) -> None:
    for option, column in (("--text", how.columns.text), ("--pair", how.columns.text_pair)):
        if column is not None:
            raise InputError(f"{option} {column}: {name} is read as plain text, one text per line, without columns")


def _source(path: Path, how: Reading) -> FileSource:
    """Return the file with the columns of the model's own data, or else with well-known columns."""
    single = FileSource(kind="file", path=str(path), text_pair=None)
    sources = [source for part in how.parts.values() for source in part]
    like = {(source.text, source.text_pair): source for source in sources if source.kind != "synthetic-reviews"}
    if how.columns.text is not None:
        return file_source(path, next(iter(like.values()), None), labelled=False, columns=how.columns)
    if how.single:
        like = {names: source for names, source in like.items() if names[1] is None}
    errors: list[DataError] = []
    candidates: list[FileSource] = []
    is_unknown = not sources and not how.single
    like_sources: dict[Any, Source | None] = {**like} or {("", None): None if is_unknown else single}
    for names, like_source in like_sources.items():
        try:
            source = file_source(path, like_source, labelled=False, columns=how.columns)
        except DataError as error:
            errors.append(error)
            continue
        if (source.text, source.text_pair) == names:
            return source
        candidates.append(source)
    if not candidates:
        message = str(errors[0])
        has_option = "; columns: " not in message or "--text" in message
        raise errors[0] if has_option else DataError(f"{message}; or name it: --text COLUMN")
    pair = candidates[0]
    if is_unknown and pair.text_pair is not None:
        with contextlib.suppress(DataError):
            text = file_source(path, single, labelled=False, columns=how.columns).text
            raise InputError(
                f"{path}: nothing is known of this model's data, so rows could be single texts ({text}) or pairs "
                f"({pair.text} and {pair.text_pair}); say it: --text {text}, or --text {pair.text} "
                f"--pair {pair.text_pair}"
            )
    return pair


def _plain_rows(path: Path, file: BinaryIO) -> Iterator[InputRow]:
    """Yield every line, also the empty ones: answers are on the same lines."""
    return (InputRow(line.rstrip("\r\n")) for _, line in lines_of(path, file))


def _count(path: Path, kind: str, encoding: str | None, delimiter: str = ",", extra_lines: int = 0) -> int | None:
    """Count the rows of a text file except ``extra_lines``; a line break inside quotes ends no row.

    Returns None if counting needs to unpack the file, or the file is damaged.
    """
    if kind == "parquet" or path.suffix.lower() in COMPRESSIONS:
        return None
    with path.open("rb") as raw:
        file = as_utf8(path, raw, encoding)
        if kind == _PLAIN:
            return sum(1 for _ in file)
        if kind != "csv":
            return sum(1 for line in file if line.strip()) - extra_lines
        csv.field_size_limit(MAX_LINE_BYTES)
        lines = (line.decode("utf-8", "replace") for line in file)
        try:
            rows = sum(1 for cells in csv.reader(lines, delimiter=delimiter) if cells)
        except csv.Error:
            return None  # reading the rows raises the error
    return rows - extra_lines
