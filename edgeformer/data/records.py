"""Records of files (TSV, CSV, JSONL, plain text, Parquet; also .xz, .gz, .bz2) and of hub data sets, streamed."""

from __future__ import annotations

import csv
import difflib
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.data.rows import Record, listed
from edgeformer.data.unpacking import COMPRESSIONS, MOST_RATIO, opened, raw_lines
from edgeformer.formats.data_config import HubSource
from edgeformer.formats.errors import DataError, MissingDependencyError, install_hint

FORMATS = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text",
}  # fmt: skip
_MOST_COLUMNS = 10_000
"""A table has a dozen; every row makes a dictionary of them."""
_MOST_ROWS_PER_BYTE = 100
"""Of a Parquet file: repeated rows are packed to nearly nothing, and come out as texts of full length."""
_SMALL_PARQUET = 64 << 20
"""Bytes that any file may unpack to, however small it is."""
_PARQUET_BATCH = 1_000
"""Rows that are unpacked at once; else a whole row group, as large as the file says."""
_BROKEN = (EOFError, lzma.LZMAError, zlib.error)


def format_of(path: Path, stated: str | None) -> str:
    """The format ``stated``, else the one of the file's suffix. Raises DataError for an unknown suffix."""
    if stated is not None:
        return stated
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise DataError(
            f"{path}: its suffix does not tell the format; set the source's format: to one of "
            "tsv, csv, jsonl, parquet, text"
        )
    return FORMATS[suffixes[-1]]


def check_file(path: Path) -> None:
    """Raise DataError, with the nearest name in the folder, where ``path`` is not a file that can be read."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"{path}: no such file, and no folder {folder} (a relative path starts at {Path.cwd()})")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"{path}: no such file; {hint}files in {folder}: {', '.join(names[:12]) or 'none'}")


def file_records(path: Path, format_name: str, labels: Sequence[str] = ()) -> Iterator[Record]:
    """Stream the records of a file that :func:`check_file` let pass.

    Args:
        format_name: as :func:`format_of` says.
        labels: as in :func:`hub_records`; only Parquet files have such columns.

    Raises:
        DataError: broken archive, not UTF-8, or a line that does not fit the format.
        MissingDependencyError: a Parquet file without the ``datasets`` package.
    """
    if format_name == "parquet":
        yield from _parquet(path, labels)
        return
    try:
        with opened(path) as file:
            yield from _READERS[format_name](path, _lines(path, file))
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


Line = tuple[int, str]
"""Its number from 1, and its text with its end."""


def _lines(path: Path, file: BinaryIO) -> Iterator[Line]:
    """Lines with their ends as they are: only ``\\n`` ends one (not U+2028 and its like)."""
    for number, raw in raw_lines(path, file):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            wide = number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
            guess = (
                "it looks like UTF-16" if wide else f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            )
            raise DataError(f"{path}, line {number}: not UTF-8 text ({guess}); save the file as UTF-8") from None
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def _tsv(path: Path, lines: Iterator[Line]) -> Iterator[Record]:
    rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in lines if line.rstrip("\r\n"))
    return _table(path, rows, "a tab inside a text needs CSV or JSONL, because TSV has no quoting")


def _csv(path: Path, lines: Iterator[Line]) -> Iterator[Record]:
    reader = csv.reader((line for _, line in lines), strict=True)
    rows = ((reader.line_num, cells) for cells in reader if cells)
    try:
        yield from _table(path, rows, 'put a text that holds a comma in double quotes ("...")')
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: not valid CSV: {error}; look for a double quote that is not "
            'closed or not doubled ("")'
        ) from None


def _table(path: Path, rows: Iterable[tuple[int, list[str]]], remedy: str) -> Iterator[Record]:
    """Records of a table whose first row names the columns. ``remedy``: for a row with too few or too many cells."""
    header: list[str] = []
    for number, cells in rows:
        if not header:
            header = cells
            if len(cells) > _MOST_COLUMNS:
                raise DataError(f"{path}, line 1: names {len(cells):,} columns; at most {_MOST_COLUMNS:,} are read")
            twice = sorted(name for name, count in Counter(cells).items() if count > 1)
            if twice:
                raise DataError(
                    f"{path}, line 1: column {listed(twice[:1])!r} is there twice; the first line must name each "
                    "column once"
                )
        elif len(cells) != len(header):
            columns = f"{len(cells)} columns, the header {len(header)} ({listed(header)})"
            raise DataError(f"{path}, line {number}: has {columns}; {remedy}")
        else:
            yield f"{path}, line {number}", dict(zip(header, cells, strict=True))


def _jsonl(path: Path, lines: Iterator[Line]) -> Iterator[Record]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}; JSONL has one JSON object per line") from None
        if not isinstance(values, dict):
            raise DataError(f'{where}: must be a JSON object ({{"text": …}}), not a {type(values).__name__}')
        yield where, values


def _text(path: Path, lines: Iterator[Line]) -> Iterator[Record]:
    return ((f"{path}, line {number}", {"text": line.rstrip("\r\n")}) for number, line in lines if line.strip())


_READERS: dict[str, Callable[[Path, Iterator[Line]], Iterator[Record]]] = {
    "tsv": _tsv, "csv": _csv, "jsonl": _jsonl, "text": _text,
}  # fmt: skip
