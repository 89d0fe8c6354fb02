"""Texts for prediction: rows of a file of any format or of standard input, read as a stream."""

import codecs
import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.artifacts.data_config import FileSource, Source
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data import records
from edgeformer.data.rows import Row, in_pieces, text_parts
from edgeformer.data.sources import Columns, columns_of, read, replacement_source

WINDOW_ROWS, WINDOW_CHARACTERS = 2048, 4 << 20
"""Maximum rows and characters in memory, among which rows of similar length are batched."""
_STANDARD_INPUT = "standard input"
_PLAIN = "text"
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Unlabelled:
    """An opened source of texts without labels."""

    name: str
    pairs: bool
    expected: int | None  # number of rows; None: unknown
    rows: Callable[[], Iterator[Row]]  # from the start; raises DataError
    leave: Callable[[], bool] = lambda: False  # stop reading; whether a thread is blocked in a read, perhaps for ever
    source: FileSource | None = None  # the file and its columns; None: plain text
    columns: tuple[str, ...] = ()  # names of all columns; of JSON Lines the keys of the first record
    delimiter: str = ","
    bom: bool = False  # the file begins with a byte order mark


@dataclass(frozen=True)
class Reading:
    """Options of reading a file."""

    parts: Mapping[str, Sequence[Source]]  # of the model's own data, whose columns are searched for; empty: unknown
    columns: Columns = field(default_factory=Columns)  # that the user names
    format: str | None = None  # as in data sections; None: by suffix; standard input then has one text per line
    single: bool = False  # read single texts even if the file has the columns of a pair


@contextlib.contextmanager
def unlabelled(path: Path | None, stdin: BinaryIO, how: Reading) -> Iterator[Unlabelled]:
    """Open the texts of a file or of standard input (``path`` None). Every line of plain text is a text.

    Raises DataError: no such file, or none of its columns can be the text; InputError: conflicting options.
    """
    if path is None and how.format not in (None, _PLAIN):
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / f"standard-input.{how.format}"
            with copied.open("wb") as file:
                shutil.copyfileobj(stdin, file)
            try:
                yield _open_table(copied, how)
            except DataError as error:
                raise DataError(str(error).replace(str(copied), _STANDARD_INPUT)) from None
        return
    if path is not None:
        records.check_file(path)
        kind = records.suffix_format(path)
        if how.format not in (None, _PLAIN, kind) or (kind is None and how.format != _PLAIN):
            raise InputError(
                f"{path}: the suffix names {f'the format {kind}, not {how.format}' if kind else 'no format'}; "
                "rename it, or pipe it with --input-format FORMAT --file -"
            )
        if _PLAIN not in (kind, how.format):
            yield _open_table(path, how)
            return
    name = _STANDARD_INPUT if path is None else str(path)
    for option, column in (("--text", how.columns.text), ("--pair", how.columns.text_pair)):
        if column is not None:
            raise InputError(
                f"{option} {column}: {name} is plain text with one text per line and has no columns; leave {option} out"
            )
    raw = _InterruptibleInput(stdin)

    def plain_rows() -> Iterator[Row]:
        """Yield every line, also empty ones, so that predictions have the same line numbers."""
        if path is None:
            opened: Any = contextlib.nullcontext(records.as_text(io.BufferedReader(raw), how.columns.encoding))
        else:
            opened = records.open_data_file(path, how.columns.encoding)
        with opened as file:
            yield from (Row(line.rstrip("\r\n")) for _, line in records.lines_of(Path(name), file))

    expected = None if path is None else _count(path, plain_rows())
    yield Unlabelled(name, False, expected, plain_rows, raw.leave if path is None else lambda: False)


def windows(rows: Iterable[Row], most_rows: int = WINDOW_ROWS) -> Iterator[list[Row]]:
    """Yield rows in groups of at most ``most_rows`` and about WINDOW_CHARACTERS; a single row may have more."""

    def characters(row: Row) -> int:
        values = (value for value in row.values.values() if isinstance(value, str))
        return sum(map(len, (*text_parts(row.text), *values)))

    return in_pieces(rows, characters, most_rows, WINDOW_CHARACTERS)


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


def _open_table(path: Path, how: Reading) -> Unlabelled:
    source = replacement_source(path, how.parts, how.columns, labelled=False, single=how.single)
    kind, delimiter, bom = records.format_of_source(source), ",", False
    if kind in ("csv", "tsv"):
        delimiter = "\t"
        if kind == "csv":
            with records.open_data_file(path, how.columns.encoding) as file:
                dialect, _ = records.detect_dialect(records.lines_of(path, file), source.delimiter, source.quote)
            delimiter = dialect.delimiter
        with path.open("rb") as file:
            bom = file.read(3).startswith(_BYTE_ORDER_MARKS)
    count = _count(path, records.file_records(source))
    return Unlabelled(
        str(path), source.text_pair is not None, count, lambda: read(source, blanks=True), source=source,
        columns=tuple(columns_of(source)), delimiter=delimiter, bom=bom,
    )  # fmt: skip


def _count(path: Path, rows: Iterable[object]) -> int | None:
    """Count the rows of a file; None if it is packed, or damaged (reading the rows raises the error)."""
    if path.suffix.lower() not in (*records.COMPRESSIONS, ".parquet"):
        with contextlib.suppress(DataError):
            return sum(1 for _ in rows)
    return None
