"""Records of files (TSV, CSV, JSONL, plain text, Parquet; also .xz, .gz, .bz2) and of hub data sets, streamed."""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.data.rows import Record, a_kind
from edgeformer.data.tables import PLAIN, Layout, Line, csv_records, first_of_table, tsv_records
from edgeformer.data.text_encoding import not_utf8
from edgeformer.data.unpacking import COMPRESSIONS, MOST_RATIO, opened, raw_lines
from edgeformer.formats.data_config import FileSource, HubSource
from edgeformer.formats.errors import DataError, MissingDependencyError, did_you_mean, install_hint

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
