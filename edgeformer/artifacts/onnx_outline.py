"""Outline of an ONNX file, read from its bytes before any runtime opens it: external data, inputs, operators, weights.

A graph names the sibling files of its large weights. ONNX Runtime 1.31 refuses names outside of the graph's folder, but
reads every file inside of it, whether the bundle lists it or not (measured). So the names are compared with the
bundle's manifest. Edge devices lack the package ``onnx``; lengths and field numbers are enough here.
"""

import math
import mmap
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.workspace import REMEDY

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "opset": {1: "bytes"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 11: "port", 12: "port", 15: "sparse"},
    "function": {1: "bytes", 7: "node", 10: "bytes", 11: "attribute"},
    "node": {1: "bytes", 2: "bytes", 4: "bytes", 5: "attribute", 7: "bytes"},
    "attribute": {1: "bytes", 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {1: "bytes", 8: "bytes", 13: "entry"},
    "entry": {1: "bytes", 2: "bytes"},
    "port": {1: "bytes", 2: "type"},
    "type": {1: "tensor type", 4: "bytes", 5: "bytes", 7: "bytes", 8: "bytes", 9: "bytes"},
    "tensor type": {2: "shape"},
    "shape": {1: "dim"},
    "dim": {2: "bytes"},
}
"""Message → field number → message in that field, or bytes to keep (onnx.proto). Other bytes are skipped."""
_MOST_MESSAGES = 4_000_000
"""Maximum number of nodes, tensors and attributes: 100 times a large model. Each takes half a kilobyte."""


@dataclass
class _Message:
    """Fields of one message: number → whole numbers; number → bytes or messages, by ``_FIELDS``."""

    kind: str
    numbers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    members: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def text(self, number: int) -> str:
        """Return the text of a field (the last one if it is repeated, as protobuf defines); empty if there is none."""
        return self.members[number][-1].decode("utf-8") if self.members[number] else ""


def _read_messages(path: Path) -> dict[str, list[_Message]]:
    """Return all messages of an ONNX file by kind, outer ones first. Raises OSError, ValueError or IndexError."""
    messages: dict[str, list[_Message]] = defaultdict(list)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        pending = [(_Message("model"), 0, len(content))]
        for message, position, end in pending:
            messages[message.kind].append(message)
            while position < end:
                tag, position = _varint(content, position)
                number, wire_type = tag >> 3, tag & 7
                if tag >> 32:  # other parsers would drop the upper bits and see another field
                    raise ValueError("a field number is too large")
                if wire_type == _BYTES:
                    length, position = _varint(content, position)
                    if length > end - position:
                        raise ValueError("a field ends beyond its message")
                    kind = _FIELDS[message.kind].get(number)
                    if kind == "bytes":
                        message.members[number].append(content[position : position + length])
                    elif kind is not None:
                        member = _Message(kind)
                        message.members[number].append(member)
                        pending.append((member, position, position + length))
                    position += length
                elif wire_type == _VARINT:
                    value, position = _varint(content, position)
                    message.numbers[number].append(value)
                elif wire_type in (_FIXED32, _FIXED64):
                    position += 4 if wire_type == _FIXED32 else 8
                else:
                    raise ValueError(f"a field has the kind {wire_type}, which ONNX does not use")
            if position > end:
                raise ValueError("a field ends beyond its message")
            if len(pending) > _MOST_MESSAGES:
                raise ValueError(f"it holds more than {_MOST_MESSAGES:,} nodes, tensors and attributes")
    return messages


def _varint(content: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    """Return a varint of up to ten bytes with seven bits each, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number is not terminated")


def external_files(path: Path) -> set[str]:
    """Return every location of external data in a graph, unchanged.

    Raises ArtifactError: not an ONNX graph, damaged, or with code that was compiled for a provider.
    """
    try:
        if path.suffix != ".onnx":  # ONNX Runtime reads a format of its own from other suffixes
            raise ValueError("the file name does not end in .onnx")
        messages = _read_messages(path)
        if any(b"EPContext" in node.members[4] for node in messages["node"]):
            raise ValueError("it has code that was compiled for a provider (EPContext)")
        return {entry.text(2) for entry in messages["entry"] if entry.members[1][-1:] == [b"location"]}
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: not an ONNX graph that can be checked ({error}); {REMEDY}") from None


_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2", 27: "float6e2m3", 28: "float6e3m2",
}  # fmt: skip
_BITS = {
    "float32": 32, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "int32": 32, "int64": 64, "bool": 8,
    "float16": 16, "float64": 64, "uint32": 32, "uint64": 64, "bfloat16": 16, "uint4": 4, "int4": 4, "float4e2m1": 4,
}  # fmt: skip
_PARAMETERS = {"float32", "float16", "float64", "bfloat16", "uint8", "int8", "uint4", "int4"}
_KINDS = {1: "tensor", 4: "sequence", 5: "map", 7: "opaque", 8: "sparse tensor", 9: "optional"}
CONTROL = ("If", "Loop", "Scan")  # operators that contain subgraphs
_SAME = ("Cast", "Identity")  # operators that keep the value of a token id
_PICKS = ("Gather", "GatherBlockQuantized")

Dim = int | str | None  # a fixed size, the name of a dynamic size, or None for a dynamic size without a name


@dataclass(frozen=True)
class Port:
    """Input or output of a graph."""

    name: str
    kind: str  # `tensor`, or a container such as `sequence` or `map`
    dtype: str  # numpy's name of the tensor's type; ONNX's name if numpy has no such type (`string`)
    shape: tuple[Dim, ...] | None  # None: the file does not state it


@dataclass
class Outline:
    """Outline of an ONNX file."""

    opsets: dict[str, int] = field(default_factory=dict)  # domain → version; the standard domain is ""
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)  # (domain, name) → nodes, also of subgraphs
    functions: set[tuple[str, str]] = field(default_factory=set)  # (domain, name) of those that the file defines
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    stored: Counter[str] = field(default_factory=Counter)  # type → elements of stored tensors with more than one
    weight_bytes: int = 0  # of all stored tensors
    tables: dict[str, int] = field(default_factory=dict)  # input → rows of the stored table that it indexes

    @property
    def parameters(self) -> int:
        """Number of stored elements that count as parameters."""
        return self.stored.total()


def read_outline(path: Path) -> Outline:
    """Read the outline of an ONNX file. Raises ArtifactError: not an ONNX graph, or damaged."""
    outline = Outline()
    try:
        messages = _read_messages(path)
        for opset in messages["opset"]:
            domain = opset.text(1)
            outline.opsets["" if domain == "ai.onnx" else domain] = (opset.numbers[2] or [0])[-1]
        for function in messages["function"]:
            outline.functions.add((function.text(10), function.text(1)))
        for node in messages["node"]:
            domain = node.text(7)
            outline.operators["" if domain == "ai.onnx" else domain, node.text(4)] += 1
        for tensor in messages["tensor"]:
            dtype, count = _DTYPES.get((tensor.numbers[2] or [0])[-1], "unknown"), math.prod(_sizes(tensor))
            outline.weight_bytes += count * _BITS.get(dtype, 8) // 8
            if dtype in _PARAMETERS and count > 1:
                outline.stored[dtype] += count
        for graph in messages["model"][0].members[7]:
            stored = {tensor.text(8): _sizes(tensor) for tensor in graph.members[5]}
            # Before IR version 4 every stored tensor was an input, too.
            inputs = map(_port, graph.members[11])
            outline.inputs = tuple(port for port in inputs if port.name not in stored)
            outline.outputs = tuple(map(_port, graph.members[12]))
            # Tables that a Gather along the first axis indexes with an input.
            outline.tables, origin = {}, {port.name: port.name for port in outline.inputs}
            for node in graph.members[1]:  # in the order in which they run
                operator, sources = node.text(4), [name.decode("utf-8") for name in node.members[1]]
                result = node.members[2][0].decode("utf-8") if node.members[2] else ""
                if operator in _SAME and sources and sources[0] in origin and result:
                    origin[result] = origin[sources[0]]
                elif operator == "DequantizeLinear" and sources and sources[0] in stored and result:
                    stored[result] = stored[sources[0]]
                elif operator in _PICKS and len(sources) >= 2:
                    axes = [attribute.numbers[3] for attribute in node.members[5] if attribute.text(1) == "axis"]
                    table, picked = stored.get(sources[0], []), origin.get(sources[1])
                    if picked is not None and len(table) > 1 and not any(axis[-1:] not in ([], [0]) for axis in axes):
                        outline.tables[picked] = min(table[0], outline.tables.get(picked, table[0]))
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: not an ONNX graph that can be read ({error})") from None
    if not outline.outputs or not outline.opsets:
        raise ArtifactError(f"{path}: not an ONNX graph: it has no outputs or no opset")
    return outline


def _sizes(tensor: _Message) -> list[int]:
    """Return the sizes of a stored tensor, from repeated or packed fields."""
    sizes = list(tensor.numbers[1])
    for packed in tensor.members[1]:
        position = 0
        while position < len(packed):
            size, position = _varint(packed, position)
            sizes.append(size)
    if any(size >> 62 for size in sizes):
        raise ValueError(f"the tensor {tensor.text(8)!r} has an axis of {max(sizes)}")
    return sizes


def _port(port: _Message) -> Port:
    kind, dtype, shape = "tensor", "", None
    for type_ in port.members[2]:
        kind = next((name for number, name in _KINDS.items() if type_.members[number]), "value")
        for tensor_type in type_.members[1]:
            dtype = _DTYPES.get(tensor_type.numbers[1][-1], "unknown") if tensor_type.numbers[1] else ""
            for dims in tensor_type.members[2]:
                sizes: list[Dim] = []
                for dim in dims.members[1]:
                    name, size = dim.text(2), (dim.numbers[1] or [0])[-1]
                    # Some files use −1 for a dynamic size.
                    sizes.append(name or (size if 0 < size < 1 << 62 else None))
                shape = tuple(sizes)
    return Port(port.text(1), kind, dtype, shape)
