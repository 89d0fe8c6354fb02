"""Compressed data files and their lines, within limits: a small file must not stand for gigabytes, nor a line for all.

Real files stream through, whatever their size: text packs 3 to 10 times smaller, logs that repeat themselves 50 times.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.artifacts.data_config import FileSource, HubSource
from edgeformer.artifacts.errors import DataError, MissingDependencyError, did_you_mean, install_hint
from edgeformer.data.rows import Record, a_kind, listed

COMPRESSIONS = (".xz", ".gz", ".bz2")
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
MOST_RATIO = 200
"""Unpacked bytes for each packed one: four times what repetitive logs reach; bombs reach 600 (gz) to 45,000 (bz2)."""
_WINDOW = 32 << 20
"""Bytes over which the ratio is taken: less is no bomb, and a bomb behind real text must not hide in the average."""
_AHEAD = 1 << 20
"""Packed bytes that are unpacked, and thrown away, before the first row is handed out: rows of a bomb are slow and
large in memory, its bytes are neither. Costs a real file a tenth of a second."""
MOST_LINE_BYTES = 16 << 20
"""Of a line: three times the Bible, while a parsed line takes up to 25 times its bytes in memory."""


class _Unpacked(io.RawIOBase):
    """Unpacks a file, and counts. Raises DataError where it unpacks to absurdly much."""

    def __init__(self, path: Path, packed: BinaryIO) -> None:
        self._path, self.packed = path, packed
        self._file: BinaryIO = _OPENERS[path.suffix.lower()](packed)
        self._since, self._unpacked = 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(min(len(buffer), 1 << 20))
        buffer[: len(found)] = found
        self._unpacked += len(found)
        if self._unpacked >= _WINDOW:
            read = self.packed.tell()
            if self._unpacked > MOST_RATIO * (read - self._since):
                raise DataError(
                    f"{self._path}: unpacks to more than {MOST_RATIO} times its size, which no text does; it is not "
                    "read on; if you trust it, unpack it and name the unpacked file"
                )
            self._since, self._unpacked = read, 0
        return len(found)


@contextmanager
def opened(path: Path, encoding: str | None = None) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its suffix says so, and in UTF-8 where another ``encoding`` is stated.

    Raises DataError for a bomb or a text in another encoding, else as the packer does.
    """
    if path.suffix.lower() not in COMPRESSIONS:
        with path.open("rb") as file:
            yield as_utf8(path, file, encoding)
        return
    with path.open("rb") as packed:
        ahead = _Unpacked(path, packed)
        while packed.tell() < _AHEAD and ahead.read(1 << 20):
            pass
        packed.seek(0)
        yield as_utf8(path, io.BufferedReader(_Unpacked(path, packed), 1 << 18), encoding)


def raw_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number from 1, and bytes with their end, of every line: only ``\\n`` ends one. DataError for a huge one."""
    number = 0
    while raw := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(raw) > MOST_LINE_BYTES:
            raise DataError(
                f"{path}, line {number}: is longer than {MOST_LINE_BYTES >> 20} MiB; break it into lines, one text each"
            )
        yield number, raw


# Text files that are not UTF-8: reading them as UTF-8, and naming the likely encoding of one that nobody stated.


_LIKELY = (
    "cp1252", "cp1250", "cp1251", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "utf_16", "utf_16_le",
    "utf_16_be",
)  # fmt: skip
"""Encodings that are suggested; of those that fit equally well, the first."""
WITH_OPTION = ("evaluate", "exits", "init", "predict")
"""Commands with ``--encoding``. Other files are UTF-8, or are named in a recipe, which states their encoding."""
_CHUNK = 1 << 16


def as_utf8(path: Path, file: BinaryIO, encoding: str | None) -> BinaryIO:
    """Return a stream of ``file``'s text in UTF-8.

    Args:
        path: for messages.
        file: bytes in ``encoding``.
        encoding: a codec's name; None: the file is UTF-8, and comes back as it is.
    """
    if encoding is None or codecs.lookup(encoding).name == "utf-8":
        return file
    return io.BufferedReader(_Transcoder(path, file, encoding), 1 << 18)


class _Transcoder(io.RawIOBase):
    """Decodes a stream and encodes it in UTF-8. Raises DataError where it is not in the stated encoding."""

    def __init__(self, path: Path, file: BinaryIO, encoding: str) -> None:
        self._path, self._file, self._encoding = path, file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._waiting = b""
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            chunk = self._file.read1(_CHUNK)  # type: ignore[attr-defined]  # a pipe's lines are read as they come
            try:
                self._waiting = self._decoder.decode(chunk, final=not chunk).encode("utf-8")
            except UnicodeError as error:
                reason = getattr(error, "reason", error)
                raise DataError(
                    f"{self._path}: not {self._encoding} text ({reason}, between byte {self._read + 1} and byte "
                    f"{self._read + len(chunk)}); state another encoding"
                ) from None
            self._read += len(chunk)
            if not chunk:
                break
        size = min(len(buffer), len(self._waiting))
        buffer[:size], self._waiting = self._waiting[:size], self._waiting[size:]
        return size


def not_utf8(path: Path, number: int, raw: bytes, reason: str, more: bytes = b"") -> DataError:
    """Make the error for a line that is not UTF-8 text.

    Args:
        number: of the line, from 1.
        raw: the line.
        reason: what is wrong with it.
        more: bytes behind the line, by which the likely encoding is chosen, too.
    """
    encoding = likely_encoding(raw + more)
    likely, name = ("", "NAME") if encoding is None else (f"it is likely {encoding}: ", encoding)
    remedy = (
        f"{likely}save the file as UTF-8, or state its encoding: --encoding {name} ({', '.join(WITH_OPTION)}), or "
        f"encoding: {name} in a recipe's source"
    )
    return DataError(f"{path}, line {number}: not UTF-8 text ({reason}); {remedy}")


def likely_encoding(sample: bytes) -> str | None:
    """Name the encoding that a text which is not UTF-8 is likely in, or return None where none fits."""
    if sample[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    # In UTF-16, every second byte of Latin letters is 0.
    if sample[:400].count(0) * 3 > len(sample[:400]):
        return "utf-16-le" if sample[1:400:2].count(0) > sample[0:400:2].count(0) else "utf-16-be"
    from charset_normalizer import from_bytes

    matches = [*from_bytes(sample, cp_isolation=[*_LIKELY])]
    fit = min(((match.chaos, -match.coherence) for match in matches), default=None)
    best = {name for match in matches if (match.chaos, -match.coherence) == fit for name in match.could_be_from_charset}
    return next((name.replace("_", "-") for name in _LIKELY if name in best), None)


# Tables of text: TSV, and CSV with any delimiter; the first line names the columns, or they have numbers.


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


# Records of files (TSV, CSV, JSONL, plain text, Parquet; also .xz, .gz, .bz2) and of hub data sets, streamed.


FORMATS = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text",
}  # fmt: skip
_MOST_ROWS_PER_BYTE = 100
"""Of a Parquet file: repeated rows are packed to nearly nothing, and come out as texts of full length."""
_SMALL_PARQUET = 64 << 20
"""Bytes that any file may unpack to, however small it is."""
_PARQUET_BATCH = 1_000
"""Rows that are unpacked at once; else a whole row group, as large as the file says."""
_BROKEN = (EOFError, lzma.LZMAError, zlib.error)


def format_of(path: Path, stated: str | None, *, table: bool = False) -> str:
    """The format ``stated``, else the one of the file's suffix. Raises DataError for an unknown suffix.

    Args:
        table: of a file with a delimiter or without a header, which was told: whatever it is called, it is a table.
    """
    if stated is not None:
        return stated
    known = suffix_format(path)
    if table and known in (None, "text"):
        return "csv"
    if table and known in ("jsonl", "parquet"):
        raise DataError(f"{path}: is {known}, which has no delimiter and no header; leave both keys out")
    if known is None:
        raise DataError(
            f"{path}: its suffix does not tell the format; set the source's format: to one of "
            "tsv, csv, jsonl, parquet, text"
        )
    return known


def suffix_format(path: Path) -> str | None:
    """The format that the suffix of a file tells, compressed or not; None: it tells none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def format_of_source(source: FileSource) -> str:
    """The format of a source's file. Raises DataError as :func:`format_of` does."""
    path = Path(source.path)
    found = format_of(path, source.format, table=source.delimiter is not None or not source.header)
    # Tabs are TSV's own; a file of that name with another delimiter is quoted as CSV is.
    return "csv" if found == "tsv" and source.delimiter not in (None, "\t") else found


def check_file(path: Path) -> None:
    """Raise DataError, with the nearest name in the folder, where ``path`` is not a file that can be read."""
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


def file_records(path: Path, format_name: str, labels: Sequence[str] = (), layout: Layout = PLAIN) -> Iterator[Record]:
    """Stream the records of a file that :func:`check_file` let pass.

    Args:
        format_name: as :func:`format_of` says.
        layout: of a table of text; of other text its encoding.
        labels: as in :func:`hub_records`; only Parquet files have such columns.

    Raises:
        DataError: broken archive, not in the encoding, or a line that does not fit the format.
        MissingDependencyError: a Parquet file without the ``datasets`` package.
    """
    if format_name == "parquet":
        if layout.encoding is not None:
            raise DataError(f"{path}: is Parquet, whose texts are UTF-8; leave out the encoding {layout.encoding}")
        yield from _parquet(path, labels)
        return
    with _readable(path), opened(path, layout.encoding) as file:
        yield from _READERS[format_name](path, lines_of(path, file), layout)


def first_lines(path: Path, encoding: str | None = None) -> list[str]:
    """The first lines of a file of text, with their ends. Raises DataError, as :func:`file_records` does."""
    with _readable(path), opened(path, encoding) as file:
        return [line for _, line in first_of_table(lines_of(path, file))]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Says what is wrong with a file that cannot be read."""
    try:
        yield
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        # bz2 and gzip report damage as an OSError that the system knows nothing of.
        raise DataError(
            f"{path}: broken or incomplete {path.suffix} file ({error}); copy or download it again"
        ) from None


def hub_records(source: HubSource, labels: Sequence[str]) -> Iterator[Record]:
    """Stream one split of a hub data set or of a local data set folder.

    Args:
        labels: the recipe's label names; a class column with the same names in another order is read by name.

    Raises:
        DataError: not found, offline, no such config or split.
        MissingDependencyError: ``datasets`` is not installed.
    """
    rows = _hub_rows(source)
    yield from _with_class_names(rows, f"{_called(source)}, split {source.split}", labels)


def hub_fingerprint(source: HubSource) -> str:
    """What the library calls the data that :func:`hub_records` would read. Raises as that does."""
    return str(_hub_rows(source)._fingerprint)


def _called(source: HubSource) -> str:
    return f"hub data set {source.name}" + (f" ({source.config})" if source.config else "")


def _hub_rows(source: HubSource) -> Any:
    where = _called(source)
    library = _datasets(where)
    try:
        return library.load_dataset(source.name, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises a different type for each of its many ways to fail
        raise DataError(
            f"{where}, split {source.split!r}: cannot be loaded: {type(error).__name__}: {first_line(error)}; check "
            "name, config and split, or give local files instead: --data DIR, or a source of kind: file"
        ) from None


def first_line(error: Exception) -> str:
    """What a library's error says, without the pages that follow."""
    return (str(error).splitlines() or [""])[0].strip()


def _datasets(wanted_for: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError(
            f"{wanted_for}: reading it needs the package datasets: {install_hint('train')}"
        ) from None
    return datasets


def _parquet(path: Path, labels: Sequence[str]) -> Iterator[Record]:
    library = _datasets(str(path))
    try:
        _check_parquet(path)
        options = {"split": "train", "streaming": True, "batch_size": _PARQUET_BATCH}
        rows = library.load_dataset("parquet", data_files=str(path), **options)
        yield from _with_class_names(rows, str(path), labels)
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors have no common base
        raise DataError(f"{path}: cannot be read as Parquet: {first_line(error)}") from None


def _check_parquet(path: Path) -> None:
    """Raise DataError where a file says of itself that it unpacks to absurdly much. Needs pyarrow, as datasets does."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        found = file.metadata
        unpacked = sum(found.row_group(number).total_byte_size for number in range(found.num_row_groups))
    size = path.stat().st_size
    if unpacked > max(_SMALL_PARQUET, MOST_RATIO * size) or found.num_rows > _MOST_ROWS_PER_BYTE * size:
        raise DataError(
            f"{path}: holds {found.num_rows:,} rows, unpacked {unpacked:,} bytes, in {size:,} bytes, as no text does; "
            "it is not read; if you trust it, write it anew as JSONL"
        )


def _with_class_names(rows: Any, where: str, labels: Sequence[str]) -> Iterator[Record]:
    """Class columns: -1 means "unlabelled"; names replace numbers where the recipe has the same names."""
    names: dict[str, list[str]] = {
        column: list(feature.names)
        for column, feature in (rows.features or {}).items()
        if type(feature).__name__ == "ClassLabel"
    }
    for number, values in enumerate(rows, start=1):
        named: dict[str, object] = {}
        for column, known in names.items():
            value = values.get(column)
            if isinstance(value, int) and value < 0:
                named[column] = None
            elif isinstance(value, int) and value < len(known) and set(known) == set(labels):
                named[column] = known[value]
        yield f"{where}, row {number}", {**values, **named}


def lines_of(path: Path, file: BinaryIO) -> Iterator[Line]:
    """Lines with their ends as they are: only ``\\n`` ends one (not U+2028 and its like). DataError: not UTF-8."""
    for number, raw in raw_lines(path, file):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            raise not_utf8(path, number, raw, reason, _following(file)) from None
        if number == 1 and line.count("\0") * 3 > len(line):
            raise not_utf8(path, number, raw, "every second byte is 0")
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def _following(file: BinaryIO) -> bytes:
    """Bytes that are read already, or can be without waiting for more than one piece."""
    return file.peek() if isinstance(file, io.BufferedReader) else b""


def _jsonl(path: Path, lines: Iterator[Line], layout: Layout) -> Iterator[Record]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}; JSONL has one JSON object per line") from None
        if not isinstance(values, dict):
            raise DataError(f'{where}: must be a JSON object ({{"text": …}}), not {a_kind(values)}')
        yield where, values


def _text(path: Path, lines: Iterator[Line], layout: Layout) -> Iterator[Record]:
    return ((f"{path}, line {number}", {"text": line.rstrip("\r\n")}) for number, line in lines if line.strip())


_READERS: dict[str, Callable[[Path, Iterator[Line], Layout], Iterator[Record]]] = {
    "tsv": tsv_records, "csv": csv_records, "jsonl": _jsonl, "text": _text,
}  # fmt: skip
