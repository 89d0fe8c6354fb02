"""Compressed data files and their lines, within limits: a small file must not stand for gigabytes, nor a line for all.

Real files stream through, whatever their size: text packs 3 to 10 times smaller, logs that repeat themselves 50 times.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.data.text_encoding import as_utf8
from edgeformer.formats.errors import DataError

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
