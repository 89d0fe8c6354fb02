"""Text files that are not UTF-8: reading them as UTF-8, and naming the likely encoding of one that nobody stated."""

from __future__ import annotations

import codecs
import io
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.formats.errors import DataError

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
