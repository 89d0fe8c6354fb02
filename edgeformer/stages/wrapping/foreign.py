"""A file that somebody else made, before anything opens it: what it is, what it needs, and why it cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.manifest import Precision
from edgeformer.formats.onnx_files import external_files
from edgeformer.formats.onnx_outline import Outline, Port, read_outline
from edgeformer.formats.workspace import REMEDY
from edgeformer.stages.wrapping.sizes import shape_text

_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc")
"""Whose operators ONNX Runtime brings."""
_NARROW = {"fp16": ("float16", "bfloat16"), "int8": ("int8", "uint8", "int4", "uint4")}
_LONGEST_NAME = 1000
_MANY = 6
"""Operators that a message lists."""


@dataclass(frozen=True)
class ForeignGraph:
    """An .onnx file that may be opened.

    Attributes:
        path: where it lies.
        outline: what it says of itself.
        weights: files beside it that it reads weights from, relative to its folder.
    """

    path: Path
    outline: Outline
    weights: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the model: that of the file, or of its folder where files of all models are called so."""
        stem, folder = self.path.stem, self.path.resolve().parent.name
        return folder if stem.lower() in ("model", "onnx") and folder else stem

    @property
    def precision(self) -> Precision:
        """What most of the stored numbers are."""
        stored = self.outline.stored
        for precision, types in _NARROW.items():
            if 2 * sum(stored[name] for name in types) > stored.total():
                return "fp16" if precision == "fp16" else "int8"
        return "fp32"


def read_foreign(path: Path) -> ForeignGraph:
    """Look at a file, and refuse what can never be profiled here.

    Raises:
        ArtifactError: it is no ONNX graph, damaged, holds compiled code, or reads files outside of its folder.
        InputError: an operator, an input or an output that nothing here can handle; the message names it.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix != ".onnx":
        raise InputError(f"{path}: an ONNX file is expected, whose name ends in .onnx")
    try:
        weights = external_files(path)
    except ArtifactError as error:
        raise ArtifactError(str(error).removesuffix(f"; {REMEDY}")) from None
    outline = read_outline(path)
    for location in sorted(weights):
        _check_location(path, location)
    _check_operators(path, outline)
    for port in outline.inputs:
        _check_port(path, port, "input")
    for port in outline.outputs:
        _check_port(path, port, "output")
    return ForeignGraph(path, outline, tuple(sorted(weights)))


def _check_location(path: Path, location: str) -> None:
    """Raise ArtifactError for weights that lie outside of the file's folder, or are not there."""
    pure, folder = PurePosixPath(location), path.resolve().parent
    foreign = pure.is_absolute() or ".." in pure.parts or pure.as_posix() != location or set("\\:\0") & set(location)
    if foreign or not location or not (folder / location).resolve().is_relative_to(folder):
        raise ArtifactError(
            f"{path}: reads weights from {location!r}, which is not inside of its folder; do not use it"
        )
    if not (folder / location).is_file():
        raise ArtifactError(f"{path}: reads weights from {location!r}, which is not there; copy it beside the file")


def _check_operators(path: Path, outline: Outline) -> None:
    strange = {
        (domain, operator): count
        for (domain, operator), count in outline.operators.items()
        if domain not in _DOMAINS and (domain, operator) not in outline.functions
    }
    if strange:
        named = [f"{domain}.{operator} ({count})" for (domain, operator), count in sorted(strange.items())]
        more = ", …" if len(named) > _MANY else ""
        raise InputError(
            f"{path}: has operators of its own that no runtime here knows: {', '.join(named[:_MANY])}{more}; export "
            "the model with standard ONNX operators"
        )


def _check_port(path: Path, port: Port, what: str) -> None:
    if not port.name.isprintable() or "\\" in port.name or not 0 < len(port.name) <= _LONGEST_NAME:
        raise InputError(f"{path}: {what} {port.name[:40]!r}: such a name cannot be kept in a golden.npz")
    if port.kind != "tensor":
        raise InputError(f"{path}: {what} {port.name!r} is a {port.kind}; only tensors can be given and compared")
    try:
        number = np.dtype(port.dtype).kind in "iufb"
    except TypeError:
        number = False
    if not number:
        remedy = "leave the text to the program around the graph" if port.dtype == "string" else "cast it in the graph"
        raise InputError(f"{path}: {what} {port.name!r} holds {port.dtype or 'no known type'}, no numbers; {remedy}")


def copy_into(graph: ForeignGraph, folder: Path, file: str) -> Mapping[str, Path]:
    """Copy the graph and its weights, bit for bit, into a bundle's folder.

    Args:
        folder: of the bundle.
        file: what the graph is called there; weights keep their names relative to it.

    Returns:
        Weights' names, relative to the bundle → where they lie now.
    """
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(graph.path, target)
    found = {}
    for location in graph.weights:
        copied = target.parent / location
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph.path.resolve().parent / location, copied)
        found[copied.relative_to(folder).as_posix()] = copied
    return found


def described(ports: tuple[Port, ...]) -> dict[str, str]:
    """Name → type[shape]."""
    return {port.name: shape_text(port) for port in ports}
