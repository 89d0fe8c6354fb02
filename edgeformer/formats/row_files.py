"""Rows of a table that is written as it comes: JSON Lines, CSV, Parquet, or one JSON document. Memory stays flat."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from edgeformer.formats.errors import InputError, needs_extra
from edgeformer.formats.escaping import csv_cell

Row = Mapping[str, object]

FORMATS = ("jsonl", "csv", "parquet")
"""Of files, as they are called; also their suffixes."""
ERROR = "error"
"""The column of rows that have nothing else but what was asked."""


class RowWriter(Protocol):
    """What takes rows in order."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write some more."""

    def close(self) -> None:
        """Write what belongs behind the last row. The stream stays open."""


def columns_of(example: Row) -> list[str]:
    """The columns of a table whose rows look like ``example``; what it does not have is left out."""
    return [*(name for name, value in example.items() if value is not None), ERROR]


def writer_for(name: str, stream: BinaryIO, example: Row) -> RowWriter:
    """A writer of the format ``name``.

    Args:
        name: one of :data:`FORMATS`.
        stream: for bytes; Parquet's must be a file.
        example: a row with every column.

    Raises:
        MissingDependencyError: Parquet without pyarrow.
    """
    if name == "parquet":
        return ParquetRows(stream, example)
    return JsonLines(stream) if name == "jsonl" else CsvRows(stream, example)


def format_named(path: Path | None, stated: str | None) -> str | None:
    """The format of an output: as stated, else as its name says; None: neither.

    Raises:
        InputError: a suffix of no known format.
    """
    if stated is not None or path is None:
        return stated
    suffix = path.suffix.lower().removeprefix(".")
    suffix = {"ndjson": "jsonl"}.get(suffix, suffix)
    if suffix not in FORMATS:
        raise InputError(
            f"--output {path}: its suffix does not tell the format; call it .{', .'.join(FORMATS)}, or give --format"
        )
    return suffix


class JsonLines:
    """A JSON object per line. What a row does not have (None) is null."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encode: Callable[[Row], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

    def write(self, rows: Sequence[Row]) -> None:
        self._stream.write("".join([self._encode(row) + "\n" for row in rows]).encode("utf-8"))

    def close(self) -> None:
        """Nothing stands behind the last line."""


class JsonDocument:
    """One JSON document with the rows as the last entry of an object.

    Args:
        stream: for bytes.
        head: its other entries.
        name: of the rows.
    """

    def __init__(self, stream: BinaryIO, head: Row, name: str) -> None:
        self._stream = stream
        self._encode: Callable[[object], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
        self._between = self._encode(head).removesuffix("}") + f', "{name}": [\n'

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._stream.write((self._between + self._encode(row)).encode("utf-8"))
            self._between = ",\n"

    def close(self) -> None:
        self._stream.write(((self._between if self._between != ",\n" else "") + "\n]}\n").encode("utf-8"))


class CsvRows:
    """A table for spreadsheets: no text in it is a formula; what is more than a value is JSON in a cell."""

    def __init__(self, stream: BinaryIO, example: Row) -> None:
        self._stream, self._columns = stream, columns_of(example)
        self._buffer = io.StringIO()
        self._writer = csv.writer(self._buffer, lineterminator="\n")
        self._writer.writerow([csv_cell(column) for column in self._columns])
        self._flush()

    def write(self, rows: Sequence[Row]) -> None:
        self._writer.writerows([self._cell(row.get(column)) for column in self._columns] for row in rows)
        self._flush()

    def close(self) -> None:
        """Nothing stands behind the last line."""

    def _cell(self, value: object) -> object:
        if isinstance(value, (dict, list)):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, bool):
            return "true" if value else "false"
        return csv_cell(value)

    def _flush(self) -> None:
        self._stream.write(self._buffer.getvalue().encode("utf-8"))
        self._buffer.seek(0)
        self._buffer.truncate()


class ParquetRows:
    """A Parquet file, a row group per write; the types of the columns are those of an example."""

    def __init__(self, stream: BinaryIO, example: Row) -> None:
        with needs_extra("train", "writing Parquet"):
            import pyarrow
            from pyarrow import parquet
        self._arrow: Any = pyarrow
        found = {name: pyarrow.array([example[name]]).type for name in columns_of(example)[:-1]}
        # A model's vectors are float32, and the example may happen to have no label.
        lists = {pyarrow.float64(): pyarrow.float32(), pyarrow.null(): pyarrow.string()}
        instead = {pyarrow.list_(kind): pyarrow.list_(meant) for kind, meant in lists.items()}
        types = [(name, instead.get(kind, kind)) for name, kind in found.items()]
        self._schema = pyarrow.schema([*types, (ERROR, pyarrow.string())])
        self._writer: Any = parquet.ParquetWriter(stream, self._schema)

    def write(self, rows: Sequence[Row]) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist([*rows], schema=self._schema))

    def close(self) -> None:
        self._writer.close()
