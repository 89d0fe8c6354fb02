"""Records (column → value) of data files and hub data sets, streamed: TSV, CSV, JSONL, plain text, Parquet; compressed.

Limits protect against small files that unpack to gigabytes and against lines that fill the memory. Real files stream
at any size: text packs 3 to 10 times smaller, repetitive logs 50 times.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.artifacts.data_config import FileSource, HubSource
from edgeformer.artifacts.errors import DataError, MissingDependencyError, did_you_mean, install_hint
from edgeformer.data.rows import Record, format_names, type_name

FORMATS = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text",
}  # fmt: skip
COMPRESSIONS = (".xz", ".gz", ".bz2")
WITH_OPTION = ("evaluate", "exits", "init", "predict")
"""Commands with ``--encoding``. Other files are UTF-8, or a recipe states their encoding."""
Line = tuple[int, str]
"""Number from 1, and text with its line end."""

MAX_RATIO = 200
"""Unpacked bytes per packed byte: four times that of repetitive logs. Bombs reach 600 (gz) to 45,000 (bz2)."""
MAX_LINE_BYTES = 16 << 20
"""Three times the Bible. A parsed line takes up to 25 times its bytes in memory."""
MAX_COLUMNS = 10_000
"""Of a table; every row becomes a dictionary of them."""
_RATIO_WINDOW = 32 << 20
"""Bytes over which the ratio is measured: less is no bomb, and a bomb behind real text must not hide in the average."""
_BYTES_AHEAD = 1 << 20
"""Packed bytes that are unpacked and dropped before the first row: the rows of a bomb are slow and large in memory, its
bytes are neither. Costs a tenth of a second per file."""
_MAX_ROWS_PER_BYTE = 100
"""Of a Parquet file: repeated rows are packed to nearly nothing, and become texts of full length."""
_SMALL_PARQUET_BYTES = 64 << 20
"""Every Parquet file may unpack to so much."""
_PARQUET_BATCH = 1_000
"""Rows that are unpacked at once, instead of a row group of any size."""
_LIKELY_ENCODINGS = (
    "cp1252", "cp1250", "cp1251", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "utf_16", "utf_16_le",
    "utf_16_be",
)  # fmt: skip
"""Encodings that are suggested, in order of preference among equally good ones."""
_SAMPLE_LINES, _SAMPLE_CHARACTERS = 200, 1 << 16
"""Beginning of a file by which its delimiter is detected."""
_DELIMITER_LINE = re.compile(r"sep=([,;\t|])\r?\n?")
"""First line that some spreadsheets write in front of the header."""


class _Unpacked(io.RawIOBase):
    """Unpacks a file. Raises DataError if it unpacks to more than MAX_RATIO times its size."""

    def __init__(self, path: Path, packed: BinaryIO) -> None:
        self._path, self._packed = path, packed
        openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
        self._file: BinaryIO = openers[path.suffix.lower()](packed)
        self._window_start, self._window_bytes = 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(len(buffer), 1 << 20))
        buffer[: len(content)] = content
        self._window_bytes += len(content)
        if self._window_bytes >= _RATIO_WINDOW:
            position = self._packed.tell()
            if self._window_bytes > MAX_RATIO * (position - self._window_start):
                raise DataError(
                    f"{self._path}: unpacks to more than {MAX_RATIO} times its size, which no text does; it is not "
                    "read on; if you trust it, unpack it and name the unpacked file"
                )
            self._window_start, self._window_bytes = position, 0
        return len(content)


class _Transcoder(io.RawIOBase):
    """Converts a stream to UTF-8. Raises DataError if it is not in the stated encoding."""

    def __init__(self, path: Path, file: BinaryIO, encoding: str) -> None:
        self._path, self._file, self._encoding = path, file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._pending = b""
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            chunk = self._file.read1(1 << 16)  # type: ignore[attr-defined]  # lines of a pipe are read as they come
            try:
                self._pending = self._decoder.decode(chunk, final=not chunk).encode("utf-8")
            except UnicodeError as error:
                reason = getattr(error, "reason", error)
                raise DataError(
                    f"{self._path}: not {self._encoding} text ({reason}, between byte {self._position + 1} and byte "
                    f"{self._position + len(chunk)}); state another encoding"
                ) from None
            self._position += len(chunk)
            if not chunk:
                break
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size


@contextmanager
def open_data_file(path: Path, encoding: str | None = None) -> Iterator[BinaryIO]:
    """Open a file as bytes, unpacked by its suffix, and converted from ``encoding`` to UTF-8.

    Raises DataError for a file that cannot be read, a broken archive, a bomb or a wrong encoding.
    """
    try:
        with path.open("rb") as file:
            if path.suffix.lower() not in COMPRESSIONS:
                yield as_utf8(path, file, encoding)
                return
            ahead = _Unpacked(path, file)
            while file.tell() < _BYTES_AHEAD and ahead.read(1 << 20):
                pass
            file.seek(0)
            yield as_utf8(path, io.BufferedReader(_Unpacked(path, file), 1 << 18), encoding)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        # bz2 and gzip report damage as an OSError without a system error.
        raise DataError(
            f"{path}: broken or incomplete {path.suffix} file ({error}); copy or download it again"
        ) from None


def as_utf8(path: Path, file: BinaryIO, encoding: str | None) -> BinaryIO:
    """Return a stream of the text of ``file`` in UTF-8. ``encoding``: None: it is UTF-8; ``path``: for messages."""
    if encoding is None or codecs.lookup(encoding).name == "utf-8":
        return file
    return io.BufferedReader(_Transcoder(path, file, encoding), 1 << 18)


def lines_of(path: Path, file: BinaryIO) -> Iterator[Line]:
    """Yield lines with their ends. Only ``\\n`` ends a line (not U+2028). Raises DataError: not UTF-8, or too long."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}, line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB; break it into lines, one text each"
            )
        problem, following = None, b""
        try:
            line = raw.decode("utf-8")
            if number == 1 and line.count("\0") * 3 > len(line):
                problem = "every second byte is 0"
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            following = file.peek() if isinstance(file, io.BufferedReader) else b""
        if problem is not None:
            encoding = likely_encoding(raw + following)
            likely = f"it is likely {encoding}: " if encoding else ""
            raise DataError(
                f"{path}, line {number}: not UTF-8 text ({problem}); {likely}save the file as UTF-8, or state its "
                f"encoding: --encoding {encoding or 'NAME'} ({', '.join(WITH_OPTION)}), or "
                f"encoding: {encoding or 'NAME'} in a recipe's source"
            )
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def likely_encoding(sample: bytes) -> str | None:
    """Return the likely encoding of a text that is not UTF-8; None: no encoding fits."""
    if sample[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    # In UTF-16, every second byte of Latin letters is 0.
    if sample[:400].count(0) * 3 > len(sample[:400]):
        return "utf-16-le" if sample[1:400:2].count(0) > sample[0:400:2].count(0) else "utf-16-be"
    from charset_normalizer import from_bytes

    matches = [*from_bytes(sample, cp_isolation=[*_LIKELY_ENCODINGS])]
    best = min(((match.chaos, -match.coherence) for match in matches), default=None)
    equals = [match for match in matches if (match.chaos, -match.coherence) == best]
    names = {name for match in equals for name in match.could_be_from_charset}
    return next((name.replace("_", "-") for name in _LIKELY_ENCODINGS if name in names), None)


def check_file(path: Path) -> None:
    """Raise DataError, with the nearest name in the folder, if ``path`` is not a file."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"{path}: no such file, and no folder {folder} (this command was started in {Path.cwd()})")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    hint = did_you_mean(path.name, names)
    raise DataError(f"{path}: no such file; {hint}files in {folder}: {', '.join(names[:12]) or 'none'}")


def suffix_format(path: Path) -> str | None:
    """Return the format by the suffix of a file, compressed or not; None: unknown suffix."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def format_of_source(source: FileSource) -> str:
    """Return the format of a source's file. Raises DataError for an unknown suffix."""
    path = Path(source.path)
    name: str | None = source.format
    if name is None:
        name = suffix_format(path)
        if source.delimiter is not None or not source.header:  # then it is a table
            if name in (None, "text"):
                name = "csv"
            if name in ("jsonl", "parquet"):
                raise DataError(f"{path}: is {name}, which has no delimiter and no header; leave both keys out")
    if name is None:
        raise DataError(
            f"{path}: its suffix does not tell the format; set the source's format: to one of "
            "tsv, csv, jsonl, parquet, text"
        )
    # TSV has tabs; a .tsv file with another delimiter has quotes as CSV.
    return "csv" if name == "tsv" and source.delimiter not in (None, "\t") else name


def file_records(source: FileSource, labels: Sequence[str] = ()) -> Iterator[Record]:
    """Stream the records of a file. ``labels``: as in :func:`hub_records`; only Parquet files have class columns.

    Raises:
        DataError: no such file, a broken archive, a wrong encoding, a line that does not fit the format; plain text
            with a column of labels or of second texts.
        MissingDependencyError: a Parquet file without the ``datasets`` package.
    """
    path = Path(source.path)
    check_file(path)
    kind = format_of_source(source)
    if kind == "parquet":
        if source.encoding is not None:
            raise DataError(f"{path}: is Parquet, whose texts are UTF-8; leave out the encoding {source.encoding}")
        yield from _parquet_records(path, labels)
        return
    if kind == "text" and source.label is not None and source.label_value is None:
        raise DataError(
            f"{path}: plain text has no label column; set the source's label_value: to the label of its lines"
        )
    if kind == "text" and source.text_pair is not None:
        raise DataError(f"{path}: plain text has one column, and no second text; give pairs as TSV, CSV or JSONL")
    with open_data_file(path, source.encoding) as file:
        lines = lines_of(path, file)
        if kind == "csv":
            delimiter, lines = detect_delimiter(lines, source.delimiter)
            name = {",": "a comma", ";": "a semicolon", "\t": "a tab"}.get(delimiter, repr(delimiter))
            remedy = f'put a text that holds {name} in double quotes ("...")'
            yield from _table_records(path, _csv_rows(path, lines, delimiter), remedy, header=source.header)
        elif kind == "tsv":
            rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in lines if line.rstrip("\r\n"))
            remedy = "a tab inside a text needs CSV or JSONL, because TSV has no quoting"
            yield from _table_records(path, rows, remedy, header=source.header)
        else:
            for number, line in lines:
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                if kind == "text":  # its one column has the name that the source states
                    yield where, {source.text: line.rstrip("\r\n")}
                    continue
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: not valid JSON: {error}; JSONL has one JSON object per line") from None
                if not isinstance(values, dict):
                    raise DataError(f'{where}: must be a JSON object ({{"text": …}}), not {type_name(values)}')
                yield where, values


def first_lines(path: Path, encoding: str | None = None) -> list[str]:
    """Return the lines with their ends by which a delimiter is detected. Raises DataError as :func:`file_records`."""
    with open_data_file(path, encoding) as file:
        return [line for _, line in _sample_lines(lines_of(path, file))]


def _sample_lines(lines: Iterator[Line]) -> Iterator[Line]:
    characters = 0
    for number, line in itertools.islice(lines, _SAMPLE_LINES):
        characters += len(line)
        yield number, line
        if characters > _SAMPLE_CHARACTERS:
            return


def detect_delimiter(lines: Iterator[Line], stated: str | None) -> tuple[str, Iterator[Line]]:
    """Return the delimiter of a CSV file (``stated``, if it is known), and the lines of its table."""
    sample = list(_sample_lines(lines))
    delimiter_line = _DELIMITER_LINE.fullmatch(sample[0][1]) if sample else None
    if delimiter_line:
        del sample[0]
    following = [*itertools.islice(lines, 1)]
    if stated is None:
        texts = [text for _, text in sample]
        stated = delimiter_line[1] if delimiter_line else delimiter_of(texts, is_complete=not following)
    return stated, itertools.chain(sample, following, lines)


def delimiter_of(lines: list[str], *, is_complete: bool = True) -> str:
    """Return the delimiter by which most rows have as many columns as the first row, which has at least two.

    ``lines`` begin the file, or are all of it (``is_complete``): otherwise the last row may be cut off, and is ignored.
    A comma if no delimiter is better, also for a table with one column.
    """
    best, best_share = ",", 0.0
    for delimiter in (",", ";", "\t", "|"):
        try:
            rows = [cells for cells in csv.reader(lines, delimiter=delimiter) if cells]
        except csv.Error:
            continue
        if not is_complete and len(rows) > 1:
            rows.pop()
        if not rows or len(rows[0]) < 2:
            continue
        share = sum(len(cells) == len(rows[0]) for cells in rows) / len(rows)
        if share > best_share:
            best, best_share = delimiter, share
    return best


def _csv_rows(path: Path, lines: Iterator[Line], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line, and the cells, of each row that is not empty. Raises DataError."""
    csv.field_size_limit(MAX_LINE_BYTES)  # Python's default of 128 KiB is less than some texts have
    first = next(lines, (1, ""))
    texts = itertools.chain([first[1]], (line for _, line in lines))
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    while True:
        first_line = first[0] + reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {first_line}: not valid CSV: {error}; look for a double quote that is not "
                'closed or not doubled ("")'
            ) from None
        if cells is None:
            return
        if cells:
            yield first_line, cells


def _table_records(path: Path, rows: Iterable[tuple[int, list[str]]], remedy: str, *, header: bool) -> Iterator[Record]:
    """Yield the records of a table.

    Args:
        remedy: for a row with too few or too many cells.
        header: the first row names the columns; otherwise the columns are named 1, 2, 3 …
    """
    names: list[str] = []
    for number, cells in rows:
        if not names:
            if header:
                repeated = sorted(name for name, count in Counter(cells).items() if count > 1 and name)
                if repeated:
                    raise DataError(
                        f"{path}, line 1: column {format_names(repeated[:1])!r} is there twice; the first line must "
                        "name each column once"
                    )
                names = [name or f"column {place}" for place, name in enumerate(cells, start=1)]
            else:
                names = [str(place) for place in range(1, len(cells) + 1)]
            if len(cells) > MAX_COLUMNS:
                raise DataError(f"{path}, line 1: names {len(cells):,} columns; at most {MAX_COLUMNS:,} are read")
            if header:
                continue
        if len(cells) != len(names):
            first = "the header" if header else "the first row"
            columns = f"{len(cells)} columns, {first} {len(names)} ({format_names(names)})"
            raise DataError(f"{path}, line {number}: has {columns}; {remedy}")
        yield f"{path}, line {number}", dict(zip(names, cells, strict=True))


def hub_records(source: HubSource, labels: Sequence[str]) -> Iterator[Record]:
    """Stream one split of a hub data set or of a local data set folder.

    ``labels``: of the recipe. A class column with the same names in another order is read by name.

    Raises:
        DataError: not found, offline, no such config or split.
        MissingDependencyError: ``datasets`` is not installed.
    """
    name, rows = _hub_rows(source)
    yield from _with_class_names(rows, f"{name}, split {source.split}", labels)


def hub_fingerprint(source: HubSource) -> str:
    """Return the library's fingerprint of the data that :func:`hub_records` reads. Raises the same errors."""
    return str(_hub_rows(source)[1]._fingerprint)


def _hub_rows(source: HubSource) -> tuple[str, Any]:
    """Return the name of a data set for messages, and its rows."""
    name = f"hub data set {source.name}" + (f" ({source.config})" if source.config else "")
    library = _datasets_library(name)
    try:
        return name, library.load_dataset(source.name, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises a different type for each of its many ways to fail
        raise DataError(
            f"{name}, split {source.split!r}: cannot be loaded: {type(error).__name__}: {first_line(error)}; check "
            "name, config and split, or give local files instead: --data DIR, or a source of kind: file"
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message."""
    return (str(error).splitlines() or [""])[0].strip()


def _datasets_library(where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError(
            f"{where}: reading it needs the package datasets: {install_hint('train')}"
        ) from None
    return datasets


def _parquet_records(path: Path, labels: Sequence[str]) -> Iterator[Record]:
    library = _datasets_library(str(path))
    try:
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            metadata = file.metadata
            unpacked = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        size = path.stat().st_size
        if unpacked > max(_SMALL_PARQUET_BYTES, MAX_RATIO * size) or metadata.num_rows > _MAX_ROWS_PER_BYTE * size:
            raise DataError(
                f"{path}: holds {metadata.num_rows:,} rows, unpacked {unpacked:,} bytes, in {size:,} bytes, as no text "
                "does; it is not read; if you trust it, write it anew as JSONL"
            )
        options = {"split": "train", "streaming": True, "batch_size": _PARQUET_BATCH}
        rows = library.load_dataset("parquet", data_files=str(path), **options)
        yield from _with_class_names(rows, str(path), labels)
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors have no common base
        raise DataError(f"{path}: cannot be read as Parquet: {first_line(error)}") from None


def _with_class_names(rows: Any, where: str, labels: Sequence[str]) -> Iterator[Record]:
    """Read class columns: -1 means "unlabelled"; names replace numbers if the recipe has the same names."""
    class_names: dict[str, list[str]] = {
        column: list(feature.names)
        for column, feature in (rows.features or {}).items()
        if type(feature).__name__ == "ClassLabel"
    }
    for number, values in enumerate(rows, start=1):
        read_as: dict[str, object] = {}
        for column, names in class_names.items():
            value = values.get(column)
            if isinstance(value, int) and value < 0:
                read_as[column] = None
            elif isinstance(value, int) and value < len(names) and set(names) == set(labels):
                read_as[column] = names[value]
        yield f"{where}, row {number}", {**values, **read_as}
