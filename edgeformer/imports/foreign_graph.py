"""Read a foreign ONNX file: refuse what cannot be used, and determine sizes and values of its inputs.

Neither torch nor the package onnx is needed. Nothing is executed here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.golden import read_arrays
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.onnx_outline import Dim, Outline, Port, external_files, read_outline
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.session import Array
from edgeformer.tasks.tensors import Axis, Takes

GOLDEN_SEQ = 64
"""Default length of golden inputs; inputs of other lengths are cut or repeated from them."""

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Inputs whose two axes are rows and tokens, whatever names the graph gives to the sizes."""

_RUNTIME_DOMAINS = (
    "", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc",
)  # fmt: skip
"""Domains whose operators ONNX Runtime has."""
_NUMBERS = {
    "float16", "float32", "float64", "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}  # fmt: skip
"""Types of numpy that inputs and outputs can have."""
_MAX_NAME = 1000
_MAX_LISTED = 6

_LETTERS: Mapping[str, Takes] = {"B": "batch", "S": "seq"}
_ROLES: tuple[tuple[Takes, re.Pattern[str]], ...] = (
    ("batch", re.compile(r"(n|b|bs|batch([_ -]?(size|dim|axis))?)", re.IGNORECASE)),
    ("seq", re.compile(r"(s|length|(num[_ -]?)?tokens|(max[_ -]?)?seq(uence)?s?([_ -]?len(gth)?)?)", re.IGNORECASE)),
)

Shape = tuple[int | str, ...]
"""Value of ``--shape``: sizes, ``B`` for what --batch sizes and ``S`` for what --seq sizes."""
Range = tuple[float, float]
"""Smallest and largest number, both included."""


@dataclass(frozen=True)
class ForeignGraph:
    """An .onnx file that passed the checks; ``weights``: file that it reads weights from, relative to it → path.

    ``name``: that of the file, or of its folder where the file is called ``model``. ``precision``: of most numbers.
    """

    path: Path
    outline: Outline
    weights: Mapping[str, Path]
    name: str
    precision: Precision


def read_foreign(path: Path) -> ForeignGraph:
    """Read the outline of a file.

    Raises ArtifactError for a damaged or hostile file, InputError for an operator, input or output that is not
    supported.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix != ".onnx":
        raise InputError(f"{path}: is no ONNX file; give a file whose name ends in .onnx")
    try:
        weights = sorted(external_files(path))
    except ArtifactError as error:
        raise ArtifactError(str(error).removesuffix(f"; {REMEDY}")) from None
    outline, folder = read_outline(path), path.resolve().parent
    for location in weights:
        pure = PurePosixPath(location)
        escapes = pure.is_absolute() or ".." in pure.parts or pure.as_posix() != location
        escapes = escapes or not location or bool(set("\\:\0") & set(location))
        if escapes or not (folder / location).resolve().is_relative_to(folder):
            raise ArtifactError(
                f"{path}: reads weights from {location!r}, outside of its folder; do not use a file that does this"
            )
        if not (folder / location).is_file():
            raise ArtifactError(f"{path}: its weights file {location!r} is missing; copy it beside the .onnx file")
    unknown = [
        f"{domain}.{operator} ({count})"
        for (domain, operator), count in sorted(outline.operators.items())
        if domain not in _RUNTIME_DOMAINS and (domain, operator) not in outline.functions
    ]
    if unknown:
        raise InputError(
            f"{path}: no installed runtime has these custom operators: {', '.join(unknown[:_MAX_LISTED])}; export the "
            "model with standard ONNX operators"
        )
    ports = [("input", port) for port in outline.inputs] + [("output", port) for port in outline.outputs]
    for kind, port in ports:
        place = f"{path}: {kind} {port.name!r}"
        if not port.name.isprintable() or "\\" in port.name or not 0 < len(port.name) <= _MAX_NAME:
            raise InputError(
                f"{path}: {kind} {port.name[:40]!r}: the name has characters that golden.npz cannot store; rename it "
                "in the graph"
            )
        if port.kind != "tensor":
            raise InputError(f"{place} is a {port.kind}; export a graph whose inputs and outputs are tensors")
        if port.dtype not in _NUMBERS:
            remedy = "tokenize outside of the graph" if port.dtype == "string" else "add a Cast to a numeric type"
            raise InputError(f"{place} is a tensor of {port.dtype or 'an unknown type'}; {remedy}")
    stored = outline.stored
    precision: Precision = "fp32"
    if 2 * (stored["float16"] + stored["bfloat16"]) > stored.total():
        precision = "fp16"
    elif 2 * sum(stored[name] for name in ("int8", "uint8", "int4", "uint4")) > stored.total():
        precision = "int8"
    name = folder.name if path.stem.lower() in ("model", "onnx") and folder.name else path.stem
    return ForeignGraph(path, outline, {location: folder / location for location in weights}, name, precision)


def parse_shape(text: str) -> tuple[str, Shape]:
    """``audio=1x512`` → name and sizes. Raises InputError."""
    name, equals, sizes = text.rpartition("=")
    parts = [part.strip() for part in sizes.replace("×", "x").split("x")] if sizes else []
    if equals and name and all(part in _LETTERS or (part.isdecimal() and int(part) > 0) for part in parts):
        return name, tuple(part if part in _LETTERS else int(part) for part in parts)
    raise InputError(
        f"--shape {text}: write NAME=SIZExSIZE…, e.g. --shape audio=1x512; B is the batch size, S the sequence length"
    )


def parse_range(text: str) -> tuple[str, Range]:
    """``ids=0:30521`` or ``rate=16000`` → name, smallest and largest number. Raises InputError."""
    name, equals, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        parsed = float(low), float(high if colon else low)
    except ValueError:
        parsed = (math.nan, math.nan)
    if not equals or not name or not all(map(math.isfinite, parsed)) or parsed[0] > parsed[1]:
        raise InputError(f"--range {text}: write NAME=LOW:HIGH or NAME=VALUE, e.g. --range ids=0:30521 (both included)")
    return name, parsed


def shape_text(port: Port) -> str:
    """``float32[batch, 3, ?]``."""
    return f"{port.dtype}[{', '.join(str(dim or '?') for dim in port.shape)}]" if port.shape is not None else port.dtype


def _require_inputs(flag: str, names: Mapping[str, object], ports: Sequence[Port]) -> None:
    """Raise InputError for a name in a flag that is no input."""
    inputs = [port.name for port in ports]
    if unknown := [name for name in names if name not in inputs]:
        raise InputError(f"{flag} {unknown[0]}=…: the graph has no such input; it has {', '.join(inputs)}")


def find_axes(
    ports: Sequence[Port], shapes: Mapping[str, Shape], golden_shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Axis, ...]]:
    """Determine the axes of every input. Raises InputError for sizes that contradict the graph or are unknown.

    ``shapes`` are the values of ``--shape``, which take precedence over names; ``golden_shapes`` are sizes of the
    golden inputs in a file.
    """
    # 1. Compare given sizes with the graph
    _require_inputs("--shape", shapes, ports)
    named_sizes: dict[str, int] = {}  # of an axis name, which other inputs may share
    for port in ports:
        shape, golden = shapes.get(port.name), golden_shapes.get(port.name)
        dims: Sequence[Dim] = port.shape if port.shape is not None else shape if shape is not None else golden or ()
        for source, sizes in ((f"--shape {port.name}=", shape), (f"--inputs: array {port.name!r} ", golden)):
            pairs = zip(port.shape or (), sizes or (), strict=False)
            differs = any(isinstance(dim, int) and dim != size for dim, size in pairs)
            if sizes is not None and (differs or len(sizes) != len(dims)):
                raise InputError(f"{source}{'x'.join(map(str, sizes))}: the graph takes {shape_text(port)}")
        for dim, size in zip(port.shape or (), shape or (), strict=False):
            is_named = isinstance(dim, str) and dim.strip("?") and isinstance(size, int)
            if is_named and named_sizes.setdefault(str(dim), int(size)) != size:
                flag = f"--shape {port.name}={'x'.join(map(str, shape or ()))}"
                raise InputError(f"{flag}: the axis {dim!r} is {named_sizes[str(dim)]} in another input; use one size")

    # 2. Determine each axis
    axes: dict[str, tuple[Axis, ...]] = {}
    unknown, flags = list[str](), list[str]()
    for port in ports:
        shape, golden = shapes.get(port.name), golden_shapes.get(port.name)
        if port.shape is None and shape is None and golden is None:
            name = port.name
            raise InputError(f"input {name!r}: the graph does not state its shape; give it: --shape {name}=1x…")
        dims = port.shape if port.shape is not None else (None,) * len(shape if shape is not None else golden or ())
        is_text = port.name in TEXT_INPUTS and len(dims) == 2
        # Whether an axis counts rows or tokens, by the name of its size.
        dim_names = [dim.strip() if isinstance(dim, str) else "" for dim in dims]
        roles: list[Takes | None] = ["batch", "seq"]
        if not is_text:
            roles = [next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None) for name in dim_names]
        port_axes, places = list[Axis](), list[int]()
        for place, (dim, role) in enumerate(zip(dims, roles, strict=True)):
            axis_size: int | str | None = dim if isinstance(dim, int) else named_sizes.get(str(dim))
            if shape is not None:
                axis_size = shape[place]
            golden_size = golden[place] if golden is not None else None
            takes = _LETTERS[axis_size] if isinstance(axis_size, str) else role
            if isinstance(axis_size, int):
                if golden_size not in (None, axis_size):
                    axis = f"--inputs: array {port.name!r}: axis {place}"
                    raise InputError(f"{axis} is {golden_size}, but {axis_size} in the graph or in --shape")
                port_axes.append(Axis(size=axis_size, role=role))
            elif takes is not None:
                default = GOLDEN_SEQ if takes == "seq" else 1
                port_axes.append(Axis(size=golden_size or default, takes=takes, role=takes))
            elif golden_size is not None:
                port_axes.append(Axis(size=golden_size))
            else:
                places.append(place)
        axes[port.name] = tuple(port_axes)
        if places:
            axis_names = " and ".join(f"axis {place} ({dims[place] or 'without a name'})" for place in places)
            unknown.append(f"input {port.name!r} {shape_text(port)}: the size of {axis_names} is unknown")
            rows = [place for place, role in enumerate(roles) if role == "batch"] or [0]
            parts = [str(d) if isinstance(d, int) else "B" if place in rows else "…" for place, d in enumerate(dims)]
            flags.append(f"--shape {port.name}={'x'.join(parts)}")

    # 3. Refuse unknown sizes
    if unknown:
        raise InputError(
            f"{'; '.join(unknown)}; give all sizes: {' '.join(flags)} (B: the batch size, S: the sequence length, …: a "
            "number)"
        )
    return axes


def read_inputs(path: Path, ports: Sequence[Port]) -> dict[str, Array]:
    """Read golden inputs, name → [calls, …]; an array is one call, or has an axis of calls. Raises DataError."""
    flag = f"--inputs {path}"
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{flag}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    inputs: dict[str, Array] = {}
    for port in ports:
        if port.name not in arrays:
            names = ", ".join(arrays) or "nothing"
            raise DataError(f"{flag}: lacks the array {port.name!r}, an input of the graph; it has {names}")
        array, dtype = arrays[port.name], np.dtype(port.dtype)
        is_number = array.dtype.kind in "iufb" and np.can_cast(array.dtype, dtype, "same_kind")
        if not is_number or (dtype.kind in "iu" and not np.array_equal(array.astype(dtype), array)):
            raise DataError(
                f"{flag}: array {port.name!r} is {array.dtype}, and the graph takes {port.dtype}; convert it"
            )
        if not array.size:
            raise DataError(f"{flag}: array {port.name!r} is empty; give at least one call")
        is_one_call = port.shape is None or array.ndim == len(port.shape)
        inputs[port.name] = array.astype(dtype)[None] if is_one_call else array.astype(dtype)
    if len({len(array) for array in inputs.values()}) > 1:
        counts = ", ".join(f"{name} {len(array)}" for name, array in inputs.items())
        raise DataError(f"{flag}: the arrays have different numbers of calls ({counts}); give the same number for each")
    return inputs


def plan_ranges(outline: Outline, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return input → range of random golden inputs; floats without one are drawn from a normal distribution.

    A range is assumed only for text inputs: token ids by the rows of the embedding table, masks of 1, types of 0.
    Raises InputError for an integer input without a range, or one that contradicts its type.
    """
    _require_inputs("--range", ranges, outline.inputs)
    assumed: dict[str, Range] = {"attention_mask": (1, 1), "token_type_ids": (0, 0)}
    if (rows := outline.tables.get("input_ids")) is not None:
        assumed["input_ids"] = (0, rows - 1)
    planned = {port.name: assumed[port.name] for port in outline.inputs if port.name in assumed} | dict(ranges)
    integers = [port for port in outline.inputs if np.dtype(port.dtype).kind in "iu"]
    if missing := [port for port in integers if port.name not in planned]:
        names = " and ".join(f"{port.name!r} ({port.dtype})" for port in missing)
        flags = " ".join(f"--range {port.name}=0:…" for port in missing)
        raise InputError(
            f"input {names}: the graph does not state the range of these integers; give it with {flags} (smallest and "
            "largest), or give real inputs with --inputs FILE.npz"
        )
    for port in integers:
        limits, type_ = planned[port.name], np.iinfo(port.dtype)
        if any(number != int(number) for number in limits) or limits[0] < type_.min or limits[1] > type_.max:
            flag = f"--range {port.name}={limits[0]:g}:{limits[1]:g}"
            raise InputError(f"{flag}: {port.name!r} is {port.dtype}; give integers from {type_.min} to {type_.max}")
    return planned


def draw(port: Port, axes: Sequence[Axis], limits: Range | None, random: "np.random.Generator") -> Array:
    """Draw one random call of an input. ``limits``: from :func:`plan_ranges`."""
    sizes, kind = tuple(axis.size for axis in axes), np.dtype(port.dtype).kind
    drawn: Array
    if kind == "b":
        drawn = random.integers(0, 2, sizes) if limits is None else np.full(sizes, limits[0])
    elif kind in "iu":
        assert limits is not None  # plan_ranges requires it
        drawn = random.integers(int(limits[0]), int(limits[1]), sizes, np.dtype(port.dtype), endpoint=True)
    else:
        drawn = random.normal(size=sizes) if limits is None else random.uniform(*limits, size=sizes)
    return np.asarray(drawn, dtype=port.dtype)
