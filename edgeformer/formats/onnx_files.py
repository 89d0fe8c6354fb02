"""Which other files an ONNX graph would have a runtime read: found in its bytes, before any runtime opens it.

A graph keeps large weights in files beside it and names them itself, and a runtime reads whatever it names. ONNX
Runtime 1.31 refuses absolute names, ``..`` and links that lead out of the graph's folder, but reads every file inside
of it, whether the bundle lists it or not (measured); what older releases refuse was not measured. So the names are
compared with the bundle's manifest here. The package ``onnx`` is not installed on edge devices; of Protocol Buffers
only lengths and field numbers are needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.workspace import REMEDY

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {4: "operator", 5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {1: "key", 2: "value"},
}
"""Message → field number → what it holds, on every way from a model to the places of external data (onnx.proto)."""
_LOCATION = b"location"
_CONTEXT = b"EPContext"
"""The operator that names a file of compiled code for a provider."""


def external_files(path: Path) -> set[str]:
    """Every location of external data that a graph names, as it names it.

    Raises:
        ArtifactError: it is no ONNX graph, damaged, or holds code that was compiled for a provider.
    """
    try:
        if path.suffix != ".onnx":  # ONNX Runtime reads a format of its own from other suffixes
            raise ValueError("its name does not end in .onnx")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _walk(content)
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: is no ONNX graph that can be checked ({error}); {REMEDY}") from None


def _walk(content: mmap.mmap) -> set[str]:
    found: set[str] = set()
    waiting = [("model", 0, len(content))]
    while waiting:
        message, start, end = waiting.pop()
        texts: dict[str, bytes] = {}
        for number, first, last, value in read_fields(content, start, end):
            inside = _INSIDE[message].get(number) if value is None else None
            if inside in ("key", "value", "operator"):
                texts[inside] = content[first:last]  # the last one holds, where a field is given twice
                if texts[inside] == _CONTEXT:
                    raise ValueError("it holds code that was compiled for a provider (EPContext)")
            elif inside is not None:
                waiting.append((inside, first, last))
        if texts.get("key") == _LOCATION:
            found.add(texts.get("value", b"").decode("utf-8"))
    return found


class Field(NamedTuple):
    """One field of a message: its number, and where its bytes are, or the ``value`` of one that is a number."""

    number: int
    start: int
    end: int
    value: int | None


def read_fields(content: mmap.mmap, start: int, end: int) -> Iterator[Field]:
    """Every field of a message that holds bytes or a whole number. Raises ValueError or IndexError."""
    at = start
    while at < end:
        tag, at = _varint(content, at)
        number, kind = tag >> 3, tag & 7
        if tag >> 32:  # others would drop the upper bits, and see another field
            raise ValueError("a field number is too large")
        if kind == _BYTES:
            length, at = _varint(content, at)
            if length > end - at:
                raise ValueError("a field is longer than what it lies in")
            yield Field(number, at, at + length, None)
            at += length
        elif kind == _VARINT:
            value, after = _varint(content, at)
            yield Field(number, at, after, value)
            at = after
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of kind {kind}, which ONNX has none of")
    if at > end:
        raise ValueError("a field is longer than what it lies in")


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of up to ten bytes of seven bits each, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has no end")
