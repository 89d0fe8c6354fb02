"""Outline of an ONNX file, read from its bytes before any runtime opens it: external data, inputs, operators, weights.

A graph names the sibling files of its large weights itself. ONNX Runtime 1.31 refuses names that lead out of the
graph's folder, but reads every file inside of it, whether the bundle lists it or not (measured). So the names are
compared with the bundle's manifest. Edge devices lack the package ``onnx``; lengths and field numbers are enough here.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.workspace import REMEDY

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

    Raises ArtifactError: it is no ONNX graph, damaged, or holds code that was compiled for a provider.
    """
    try:
        if path.suffix != ".onnx":  # ONNX Runtime reads a format of its own from other suffixes
            raise ValueError("its name does not end in .onnx")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            locations: set[str] = set()
            pending = [("model", 0, len(content))]
            while pending:
                message, start, end = pending.pop()
                texts: dict[str, bytes] = {}
                for number, first, last, value in read_fields(content, start, end):
                    inside = _INSIDE[message].get(number) if value is None else None
                    if inside in ("key", "value", "operator"):
                        texts[inside] = content[first:last]  # the last one holds, where a field is given twice
                        if texts[inside] == _CONTEXT:
                            raise ValueError("it holds code that was compiled for a provider (EPContext)")
                    elif inside is not None:
                        pending.append((inside, first, last))
                if texts.get("key") == _LOCATION:
                    locations.add(texts.get("value", b"").decode("utf-8"))
            return locations
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: is no ONNX graph that can be checked ({error}); {REMEDY}") from None


class Field(NamedTuple):
    """One field of a message: its number, and where its bytes are, or the ``value`` of one that is a number."""

    number: int
    start: int
    end: int
    value: int | None


def read_fields(content: mmap.mmap, start: int, end: int) -> Iterator[Field]:
    """Every field of a message that holds bytes or a whole number. Raises ValueError or IndexError."""
    position = start
    while position < end:
        tag, position = _varint(content, position)
        number, kind = tag >> 3, tag & 7
        if tag >> 32:  # others would drop the upper bits, and see another field
            raise ValueError("a field number is too large")
        if kind == _BYTES:
            length, position = _varint(content, position)
            if length > end - position:
                raise ValueError("a field is longer than what it lies in")
            yield Field(number, position, position + length, None)
            position += length
        elif kind == _VARINT:
            value, next_position = _varint(content, position)
            yield Field(number, position, next_position, value)
            position = next_position
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of kind {kind}, which ONNX has none of")
    if position > end:
        raise ValueError("a field is longer than what it lies in")


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    """A number of up to ten bytes of seven bits each, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has no end")


_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4e2m1",
}  # fmt: skip
_BITS = {
    "float32": 32, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "int32": 32, "int64": 64, "bool": 8,
    "float16": 16, "float64": 64, "uint32": 32, "uint64": 64, "bfloat16": 16, "uint4": 4, "int4": 4, "float4e2m1": 4,
}  # fmt: skip
_PARAMETERS = {"float32", "float16", "float64", "bfloat16", "uint8", "int8", "uint4", "int4"}
_KINDS = {1: "tensor", 4: "sequence", 5: "map", 7: "opaque", 8: "sparse tensor", 9: "optional"}
CONTROL = ("If", "Loop", "Scan")
"""Operators that hold graphs of their own."""
_SAME = ("Cast", "Identity")
"""A token id is the same number behind these."""

Dim = int | str | None
"""A size, the name of a size that is not fixed, or nothing where it has no name."""


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Attributes:
        kind: ``tensor``, or ``sequence``, ``map``… which hold several things.
        dtype: numpy's name of a tensor's numbers; ``string`` and others that numpy has none of by ONNX's name.
        shape: None: not said.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass
class Outline:
    """An ONNX file.

    Attributes:
        opsets: domain → version; the standard one is ``""``.
        operators: (domain, operator) → nodes, those of subgraphs and functions included.
        functions: (domain, name) that the file itself defines.
        stored: type → numbers in stored tensors of more than one element: floating-point ones, and of 8 or 4 bits.
        weight_bytes: of all stored tensors.
        tables: input → rows of the stored table whose rows it picks.
    """

    opsets: dict[str, int] = field(default_factory=dict)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    functions: set[tuple[str, str]] = field(default_factory=set)
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    stored: Counter[str] = field(default_factory=Counter)
    weight_bytes: int = 0
    tables: dict[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Stored numbers that count as parameters."""
        return self.stored.total()

    @property
    def has_subgraphs(self) -> bool:
        """What is computed depends on what is computed: If, Loop or Scan."""
        return any(operator in CONTROL for _, operator in self.operators)


def read_outline(path: Path) -> Outline:
    """Read what a file says of itself. Raises ArtifactError where it is no ONNX graph, or a damaged one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            outline = _Reader(content).model()
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: is no ONNX graph that can be read ({error})") from None
    if not outline.outputs or not outline.opsets:
        raise ArtifactError(f"{path}: is no ONNX graph: it has no outputs, or says of no operator set")
    return outline


@dataclass
class _Node:
    operator: str
    inputs: list[str]
    outputs: list[str]
    axis: int


class _Reader:
    """Walks the messages of a model. Numbers of fields are those of onnx.proto."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._outline = Outline()
        self._subgraphs: list[Field] = []

    def model(self) -> Outline:
        """Read the whole file. Raises ValueError or IndexError where it is damaged."""
        outline = self._outline
        _, model = self._read(Field(0, 0, len(self._content), None))
        for part in model[7]:
            _, graph = self._read(part)
            nodes = [self._node(node) for node in graph[1]]
            tables = dict(map(self._tensor, graph[5]))
            # Before IR version 4 every stored tensor was an input, too.
            inputs = map(self._port, graph[11])
            outline.inputs = tuple(port for port in inputs if port.name not in tables)
            outline.outputs = tuple(map(self._port, graph[12]))
            outline.tables = _tables(nodes, [port.name for port in outline.inputs], tables)
        for part in model[8]:
            numbers, opset = self._read(part)
            domain = self._text(opset[1])
            outline.opsets["" if domain == "ai.onnx" else domain] = numbers[2][-1] if numbers[2] else 0
        for part in model[25]:
            _, function = self._read(part)
            outline.functions.add((self._text(function[10]), self._text(function[1])))
            for node in function[7]:
                self._node(node)
        while self._subgraphs:
            _, graph = self._read(self._subgraphs.pop())
            for node in graph[1]:
                self._node(node)
            for tensor in graph[5]:
                self._tensor(tensor)
        return outline

    def _read(self, part: Field) -> tuple[dict[int, list[int]], dict[int, list[Field]]]:
        """Return a message's whole numbers and its texts, messages and bytes, by the number of their field."""
        numbers: dict[int, list[int]] = defaultdict(list)
        members: dict[int, list[Field]] = defaultdict(list)
        for member in read_fields(self._content, part.start, part.end):
            if member.value is None:
                members[member.number].append(member)
            else:
                numbers[member.number].append(member.value)
        return numbers, members

    def _text(self, parts: list[Field]) -> str:
        """Return the last text, which holds where a field is given twice; empty if there is none."""
        return self._content[parts[-1].start : parts[-1].end].decode("utf-8") if parts else ""

    def _node(self, part: Field) -> _Node:
        """Count a node and its stored tensors, and note its subgraphs."""
        _, members = self._read(part)
        axis = 0
        for attribute in members[5]:
            numbers, values = self._read(attribute)
            for tensor in values[5]:
                self._tensor(tensor)
            self._subgraphs += [*values[6], *values[11]]
            if self._text(values[1]) == "axis" and numbers[3]:
                axis = numbers[3][-1]
        operator, domain = self._text(members[4]), self._text(members[7])
        self._outline.operators["" if domain == "ai.onnx" else domain, operator] += 1
        inputs, outputs = ([self._text([name]) for name in members[number]] for number in (1, 2))
        return _Node(operator, inputs, outputs, axis)

    def _tensor(self, part: Field) -> tuple[str, tuple[int, ...]]:
        """Count a stored tensor; return its name and sizes."""
        numbers, members = self._read(part)
        name, dims = self._text(members[8]), numbers[1]
        for packed in members[1]:
            position = packed.start
            while position < packed.end:
                size, position = _varint(self._content, position)
                dims.append(size)
        if any(size >> 62 for size in dims):
            raise ValueError(f"the tensor {name!r} has a size of {max(dims)}")
        dtype, count = _DTYPES.get(numbers[2][-1] if numbers[2] else 0, "unknown"), math.prod(dims)
        self._outline.weight_bytes += count * _BITS.get(dtype, 8) // 8
        if dtype in _PARAMETERS and count > 1:
            self._outline.stored[dtype] += count
        return name, tuple(dims)

    def _port(self, part: Field) -> Port:
        _, port = self._read(part)
        kind, dtype, shape = "tensor", "", None
        for type_ in port[2]:
            numbers, types = self._read(type_)
            for number in (*numbers, *types):
                kind = _KINDS.get(number, "value") if number != 6 else kind
            for tensor_type in types[1]:
                numbers, members = self._read(tensor_type)
                dtype = _DTYPES.get(numbers[1][-1], "unknown") if numbers[1] else ""
                shape = None
                for shape_part in members[2]:
                    _, dims = self._read(shape_part)
                    shape = tuple(map(self._dim, dims[1]))
        return Port(self._text(port[1]), kind, dtype, shape)

    def _dim(self, part: Field) -> Dim:
        numbers, names = self._read(part)
        if numbers[1] and not names[2]:
            size = numbers[1][-1]
            return size if 0 < size < 1 << 62 else None  # −1 stands for "not fixed" in some files
        return self._text(names[2]) or None


_PICKS = ("Gather", "GatherBlockQuantized")


def _tables(nodes: list[_Node], inputs: list[str], stored: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Input → rows of the stored table that a Gather along its first axis picks from, by the input as it is."""
    origin = {name: name for name in inputs}
    counts: dict[str, int] = {}
    for node in nodes:  # in the order in which they run
        if node.operator in _SAME and node.inputs and node.inputs[0] in origin and node.outputs:
            origin[node.outputs[0]] = origin[node.inputs[0]]
        elif node.operator == "DequantizeLinear" and node.inputs and node.inputs[0] in stored and node.outputs:
            stored = {**stored, node.outputs[0]: stored[node.inputs[0]]}
        elif node.operator in _PICKS and len(node.inputs) >= 2 and node.axis == 0:
            table, picked = stored.get(node.inputs[0], ()), origin.get(node.inputs[1])
            if picked is not None and len(table) > 1:
                counts[picked] = min(table[0], counts.get(picked, table[0]))
    return counts
