"""Records of local text files (TSV, CSV, JSONL, plain text; also .xz, .gz, .bz2), streamed line by line."""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from edgeformer.data.rows import Record
from edgeformer.formats.errors import DataError

FORMATS = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text",
}  # fmt: skip
COMPRESSIONS = (".xz", ".gz", ".bz2")
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
    listed = ", ".join(names[:12]) or "none"
    raise DataError(f"{path}: no such file; {hint}files in {folder}: {listed}")


def records(path: Path, format_name: str) -> Iterator[Record]:
    """Stream the records of a text file.

    Raises:
        DataError: missing, broken archive, not UTF-8, or a line that does not fit the format.
    """
    check_file(path)
    try:
        with _open(path) as file:
            yield from _READERS[format_name](path, file)
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        # bz2 and gzip report damage as an OSError that the system knows nothing of.
        raise DataError(
            f"{path}: broken or incomplete {path.suffix} file ({error}); copy or download it again"
        ) from None


def _open(path: Path) -> BinaryIO:
    openers: dict[str, Callable[[Path], object]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
    opener = openers.get(path.suffix.lower())
    if opener is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, opener(path)), 1 << 18))


def _lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """Lines as text, with their ends as they are: only ``\\n`` ends one (not U+2028 and its like)."""
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            wide = number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
            guess = (
                "it looks like UTF-16" if wide else f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            )
            raise DataError(f"{path}, line {number}: not UTF-8 text ({guess}); save the file as UTF-8") from None
        yield line.removeprefix("\ufeff") if number == 1 else line


def _tsv(path: Path, file: BinaryIO) -> Iterator[Record]:
    header: list[str] | None = None
    for number, line in enumerate(_lines(path, file), start=1):
        cells = line.rstrip("\r\n").split("\t")
        if cells == [""]:
            continue
        if header is None:
            header = _checked_header(path, cells)
            continue
        if len(cells) != len(header):
            remedy = "a tab inside a text needs CSV or JSONL, because TSV has no quoting"
            raise _ragged(path, number, cells, header, remedy)
        yield f"{path}, line {number}", dict(zip(header, cells, strict=True))


def _csv(path: Path, file: BinaryIO) -> Iterator[Record]:
    reader = csv.reader(_lines(path, file), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = _checked_header(path, cells)
                continue
            if len(cells) != len(header):
                remedy = 'put a text that holds a comma in double quotes ("...")'
                raise _ragged(path, reader.line_num, cells, header, remedy)
            yield f"{path}, line {reader.line_num}", dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: not valid CSV: {error}; look for a double quote that is not "
            'closed or not doubled ("")'
        ) from None


def _checked_header(path: Path, cells: list[str]) -> list[str]:
    twice = sorted({name for name in cells if cells.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}, line 1: column {twice[0]!r} is there twice; the first line must name each column once"
        )
    return cells


def _ragged(path: Path, number: int, cells: list[str], header: list[str], remedy: str) -> DataError:
    names = ", ".join(header)
    return DataError(f"{path}, line {number}: has {len(cells)} columns, the header {len(header)} ({names}); {remedy}")


def _jsonl(path: Path, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, file), start=1):
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


def _text(path: Path, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, file), start=1):
        text = line.rstrip("\r\n")
        if text.strip():
            yield f"{path}, line {number}", {"text": text}


_READERS: dict[str, Callable[[Path, BinaryIO], Iterator[Record]]] = {
    "tsv": _tsv,
    "csv": _csv,
    "jsonl": _jsonl,
    "text": _text,
}
