"""Golden inputs of a graph that came without data: from an .npz file, or drawn with a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.formats.errors import DataError, InputError
from edgeformer.formats.golden import read_arrays
from edgeformer.formats.onnx_outline import Outline, Port
from edgeformer.tasks.tensors.data import Axis

Array = NDArray[Any]
Range = tuple[float, float]
"""Smallest and largest number, both of them taken."""


def parse_range(text: str) -> tuple[str, Range]:
    """``ids=0:30521`` or ``rate=16000`` → name, smallest and largest number. Raises InputError."""
    name, equals, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        found = float(low), float(high if colon else low)
    except ValueError:
        found = (math.nan, math.nan)
    if not equals or not name or not all(map(math.isfinite, found)) or found[0] > found[1]:
        raise InputError(f"--range {text}: write NAME=LOW:HIGH, both included, e.g. --range ids=0:30521; or NAME=VALUE")
    return name, found


def read_inputs(path: Path, ports: Sequence[Port]) -> dict[str, Array]:
    """Golden inputs from a file: name → [calls, …]. An array may be one call, or several with an axis in front.

    Raises:
        DataError: it cannot be read, lacks an input, or holds one of another type.
    """
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--inputs {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = {port.name: _taken(path, port, arrays) for port in ports}
    if len({len(array) for array in found.values()}) > 1:
        counts = ", ".join(f"{name} {len(array)}" for name, array in found.items())
        raise DataError(f"--inputs {path}: its arrays are of different numbers of calls: {counts}")
    return found


def _taken(path: Path, port: Port, arrays: Mapping[str, Array]) -> Array:
    if port.name not in arrays:
        held = ", ".join(arrays) or "nothing"
        raise DataError(f"--inputs {path}: holds no array {port.name!r}, which the graph takes; it holds {held}")
    array = arrays[port.name]
    if array.dtype != port.dtype:
        wanted = np.dtype(port.dtype)
        if array.dtype.kind not in "iufb" or not np.can_cast(array.dtype, wanted, "same_kind"):
            raise DataError(f"--inputs {path}: {port.name!r} must be {port.dtype}, but is {array.dtype}")
        narrow = array.astype(wanted)
        if wanted.kind in "iu" and not np.array_equal(narrow, array):
            raise DataError(f"--inputs {path}: {port.name!r} holds numbers that {port.dtype} cannot hold")
        array = narrow
    if not array.size:
        raise DataError(f"--inputs {path}: {port.name!r} is empty")
    one_call = port.shape is None or array.ndim == len(port.shape)
    return array[None] if one_call else array


def plan_ranges(outline: Outline, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Input → range of what is drawn for it; floats that have none are normal, truth values are drawn evenly.

    A range is assumed only where it is certain: token ids by the rows of the table that they pick from.

    Raises:
        InputError: integers without a range, or a range for something that is no input or cannot hold it.
    """
    names = [port.name for port in outline.inputs]
    for name in ranges:
        if name not in names:
            raise InputError(f"--range {name}=…: the graph has no such input; it has {', '.join(names)}")
    found: dict[str, Range] = {}
    missing: list[Port] = []
    for port in outline.inputs:
        whole = np.dtype(port.dtype).kind in "iu"
        known = ranges.get(port.name) or _certain(port, outline)
        if known is not None:
            _check_range(port, known, whole)
            found[port.name] = known
        elif whole:
            missing.append(port)
    if missing:
        what = " and ".join(f"{port.name!r} ({port.dtype})" for port in missing)
        flags = " ".join(f"--range {port.name}=0:…" for port in missing)
        raise InputError(
            f"input {what}: which whole numbers it takes cannot be read from the graph; say it: {flags} (smallest and "
            "largest), or give real inputs with --inputs FILE.npz"
        )
    return found


def _certain(port: Port, outline: Outline) -> Range | None:
    if port.name == "attention_mask":
        return 1, 1
    if port.name == "token_type_ids":
        return 0, 0
    rows = outline.tables.get(port.name) if port.name == "input_ids" else None
    return (0, rows - 1) if rows is not None else None


def _check_range(port: Port, known: Range, whole: bool) -> None:
    written = f"--range {port.name}={known[0]:g}:{known[1]:g}"
    if np.dtype(port.dtype).kind == "b":
        raise InputError(f"{written}: {port.name!r} holds truth values, which are drawn by themselves")
    if whole:
        limits = np.iinfo(port.dtype)
        if any(number != int(number) for number in known) or known[0] < limits.min or known[1] > limits.max:
            raise InputError(
                f"{written}: {port.name!r} is {port.dtype}: whole numbers from {limits.min} to {limits.max}"
            )


def draw(port: Port, axes: Sequence[Axis], known: Range | None, random: np.random.Generator) -> Array:
    """One call's input."""
    sizes = tuple(axis.size for axis in axes)
    kind = np.dtype(port.dtype).kind
    found: Array
    if kind == "b":
        found = random.integers(0, 2, sizes)
    elif kind in "iu":
        assert known is not None  # plan_ranges has seen to it
        found = random.integers(int(known[0]), int(known[1]), sizes, np.dtype(port.dtype), endpoint=True)
    else:
        found = random.normal(size=sizes) if known is None else random.uniform(*known, size=sizes)
    return np.asarray(found, dtype=port.dtype)


def told(port: Port, known: Range | None, seed: int) -> str:
    """How an input was drawn, in words."""
    if np.dtype(port.dtype).kind == "b":
        return f"random truth values, seed {seed}"
    if known is None:
        return f"standard normal, seed {seed}"
    if known[0] == known[1]:
        return f"always {known[0]:g}"
    return f"evenly from {known[0]:g} to {known[1]:g}, seed {seed}"
