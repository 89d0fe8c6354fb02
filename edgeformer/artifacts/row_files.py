"""Streaming writers for rows of a table: JSON Lines, CSV, Parquet, NumPy, or one JSON document, in constant memory."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from edgeformer.artifacts.errors import needs_extra
from edgeformer.artifacts.units import csv_cell

TableRow = Mapping[str, object]

FORMATS = ("jsonl", "csv", "parquet", "npy")  # file formats, which are also their suffixes
ERROR = "error"  # column with the error of rows that have no result


@dataclass(frozen=True)
class TableStyle:
    """Style of a table that repeats columns of an input table."""

    columns: Sequence[str] = ()  # names of those columns, which come first
    delimiter: str = ","  # of CSV
    bom: bool = False  # whether CSV begins with a byte order mark, by which spreadsheets recognise UTF-8
    types: Mapping[str, Any] = field(default_factory=dict)  # column → pyarrow type; the default is text


def writer_for(name: str, stream: BinaryIO, example: TableRow, style: TableStyle) -> RowWriter:
    """Return a writer of the format ``name`` (one of :data:`FORMATS`). Raises MissingDependencyError without pyarrow.

    ``example`` has all columns except those of ``style``; its columns with None are left out of tables.
    """
    if name == "jsonl":
        return JsonRows(stream)
    columns = {column: value for column, value in example.items() if value is not None}
    if name == "npy":
        return NpyRows(stream, columns)
    return ParquetRows(stream, columns, style) if name == "parquet" else CsvRows(stream, columns, style)


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


def _json(value: object) -> bytes:
    """Return UTF-8 JSON. Values without a JSON form become null (NaN), text (dates) or escapes (lone surrogates)."""
    try:
        return _ENCODE(value).encode("utf-8")
    except ValueError:  # UnicodeEncodeError is one, too
        return json.dumps(_finite(value), default=str).encode("ascii")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonRows:
    """Writer of one JSON object per line. Missing values (None) are null.

    Args:
        head: None: JSON Lines. Else one document with these entries, and the rows as its last entry ``predictions``.
    """

    def __init__(self, stream: BinaryIO, head: TableRow | None = None) -> None:
        self._stream = stream
        self._between, self._after, self._end = b"", b"\n", b""
        if head is not None:
            self._between = _json(head).removesuffix(b"}") + b', "predictions": [\n'
            self._after, self._end = b"", b"\n]}\n"

    def write(self, rows: Sequence[TableRow]) -> None:
        for row in rows:
            self._stream.write(self._between + _json(row) + self._after)
            self._between = b",\n" if self._end else b""

    def close(self) -> None:
        self._stream.write((self._between if self._between != b",\n" else b"") + self._end)


class CsvRows:
    """Writer of CSV for spreadsheets: no text is a formula; lists and objects are JSON in a cell."""

    def __init__(self, stream: BinaryIO, example: TableRow, style: TableStyle) -> None:
        self._stream, self._delimiter = stream, style.delimiter
        self._columns = [*dict.fromkeys((*style.columns, *example, ERROR))]
        if style.bom:
            stream.write("\ufeff".encode())
        self.write([{column: column for column in self._columns}])

    def write(self, rows: Sequence[TableRow]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self._delimiter, lineterminator="\n")
        for row in rows:
            cells: list[object] = []
            for value in map(row.get, self._columns):
                if isinstance(value, (dict, list)):
                    cells.append(_json(value).decode("utf-8"))
                elif isinstance(value, bool):
                    cells.append("true" if value else "false")
                else:
                    cells.append(csv_cell(value))
            writer.writerow(cells)
        self._stream.write(text.getvalue().encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Do nothing: CSV has no footer."""


class ParquetRows:
    """Writer of Parquet: one row group per write, with the column types of an example."""

    def __init__(self, stream: BinaryIO, example: TableRow, style: TableStyle = TableStyle()) -> None:
        with needs_extra("parquet", "writing Parquet"):
            import pyarrow
            from pyarrow import parquet
        self._arrow: Any = pyarrow
        types = {name: pyarrow.array([value]).type for name, value in example.items()}
        # Vectors are float32; the label list of the example may be empty.
        lists = {pyarrow.float64(): pyarrow.float32(), pyarrow.null(): pyarrow.string()}
        instead = {pyarrow.list_(kind): pyarrow.list_(meant) for kind, meant in lists.items()}
        columns = {name: instead.get(kind, kind) for name, kind in types.items()}
        repeated = {name: style.types.get(name, pyarrow.string()) for name in style.columns}
        self._texts = [name for name, kind in repeated.items() if kind == pyarrow.string()]
        self._schema = pyarrow.schema([*({**repeated, **columns, ERROR: pyarrow.string()}).items()])
        self._writer: Any = parquet.ParquetWriter(stream, self._schema)

    def write(self, rows: Sequence[TableRow]) -> None:
        converted = []
        for row in rows:
            texts: dict[str, str | None] = {}
            for name in self._texts:
                value = row.get(name)
                text = value if isinstance(value, str) else _json(value).decode("utf-8")
                texts[name] = None if value is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
            converted.append({**row, **texts})
        self._writer.write_table(self._arrow.Table.from_pylist(converted, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class NpyRows:
    """Writer of the vectors alone, as a NumPy array [rows, d]; a row without a vector is zeros. The stream can seek."""

    def __init__(self, stream: BinaryIO, example: TableRow) -> None:
        vector = np.asarray(example["vector"])
        self._dtype = np.dtype(np.float32) if vector.dtype == np.float64 else vector.dtype
        self._stream, self._shape = stream, (0, len(vector))
        self._write_header()

    def _write_header(self) -> None:
        """Write the header, whose length does not depend on the number of rows."""
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._stream, header)

    def write(self, rows: Sequence[TableRow]) -> None:
        count, width = self._shape
        vectors = np.zeros((len(rows), width), dtype=self._dtype)
        for number, row in enumerate(rows):
            if "vector" in row:
                vectors[number] = row["vector"]
        self._stream.write(vectors.tobytes())
        self._shape = count + len(rows), width

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()


RowWriter = JsonRows | CsvRows | ParquetRows | NpyRows
"""Writer of rows in order: call ``write`` repeatedly, then ``close``, which leaves the stream open."""
