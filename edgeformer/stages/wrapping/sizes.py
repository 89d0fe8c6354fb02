"""How large the inputs of somebody's graph are: by the graph, by what its sizes are called, and by ``--shape``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from edgeformer.formats.errors import InputError
from edgeformer.formats.onnx_outline import Dim, Port
from edgeformer.tasks.tensors.data import Axis, Takes

GOLDEN_SEQ = 64
"""Length of golden inputs where nothing says another one; calls of other lengths are cut or repeated from them."""

_LETTERS: Mapping[str, Takes] = {"B": "batch", "S": "seq"}
_ROLES: tuple[tuple[Takes, re.Pattern[str]], ...] = (
    ("batch", re.compile(r"(n|b|bs|batch([_ -]?(size|dim|axis))?)", re.IGNORECASE)),
    ("seq", re.compile(r"(s|length|(num[_ -]?)?tokens|(max[_ -]?)?seq(uence)?s?([_ -]?len(gth)?)?)", re.IGNORECASE)),
)
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Inputs whose axes are rows and tokens, whatever a graph calls them."""

Shape = tuple[int | str, ...]
"""As it is asked for: sizes, ``B`` for what --batch sizes and ``S`` for what --seq sizes."""


def parse_shape(text: str) -> tuple[str, Shape]:
    """``audio=1x512`` → name and sizes. Raises InputError."""
    name, equals, sizes = text.rpartition("=")
    parts = [part.strip() for part in sizes.replace("×", "x").split("x")]
    if equals and name and all(part in _LETTERS or (part.isdecimal() and int(part) > 0) for part in parts):
        return name, tuple(part if part in _LETTERS else int(part) for part in parts)
    if equals and name and not sizes:
        return name, ()
    raise InputError(
        f"--shape {text}: write NAME=SIZExSIZE…, e.g. --shape audio=1x512; B stands for what --batch sizes, S for --seq"
    )


def role_of(dim: Dim) -> Takes | None:
    """What an axis is, by the name that the graph gives its size."""
    if not isinstance(dim, str):
        return None
    return next((role for role, pattern in _ROLES if pattern.fullmatch(dim.strip())), None)


def find_axes(
    ports: Sequence[Port], asked: Mapping[str, Shape], known: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Axis, ...]]:
    """The axes of every input.

    Args:
        ports: inputs of the graph.
        asked: input → what ``--shape`` says; it wins over names.
        known: input → sizes of given golden inputs.

    Raises:
        InputError: a name that is no input, sizes that are not the graph's, or one that stays unknown.
    """
    names = [port.name for port in ports]
    for name in asked:
        if name not in names:
            raise InputError(f"--shape {name}=…: the graph has no such input; it has {', '.join(names)}")
    pinned: dict[str, int] = {}
    for port in ports:
        _pin(port, asked.get(port.name), pinned)
    found: dict[str, tuple[Axis, ...]] = {}
    unknown: list[tuple[Port, list[int]]] = []
    for port in ports:
        axes = _axes(port, asked.get(port.name), known.get(port.name), pinned)
        found[port.name] = tuple(axis for axis in axes if axis is not None)
        if None in axes:
            unknown.append((port, [place for place, axis in enumerate(axes) if axis is None]))
    if unknown:
        raise InputError(_unknown(unknown))
    return found


def _pin(port: Port, asked: Shape | None, pinned: dict[str, int]) -> None:
    """Note the sizes that ``--shape`` gives to names which other inputs may share. Raises InputError."""
    if asked is None:
        return
    written = _written(port.name, asked)
    if port.shape is not None and len(asked) != len(port.shape):
        raise InputError(f"{written}: the input has {len(port.shape)} axes: {shape_text(port)}")
    for place, (dim, size) in enumerate(zip(port.shape or (), asked, strict=False)):
        if isinstance(dim, int) and size != dim:
            raise InputError(f"{written}: axis {place} is {dim} in the graph: {shape_text(port)}")
        if isinstance(dim, str) and dim.strip("?") and isinstance(size, int) and pinned.setdefault(dim, size) != size:
            raise InputError(f"{written}: {dim!r} is {pinned[dim]} in another input")


def _axes(port: Port, asked: Shape | None, known: Sequence[int] | None, pinned: Mapping[str, int]) -> list[Axis | None]:
    """The axes of one input; None where a size is not known. Raises InputError."""
    if port.shape is None and asked is None and known is None:
        raise InputError(f"input {port.name!r}: the graph says nothing of its shape; give it: --shape {port.name}=1x…")
    dims = port.shape if port.shape is not None else (None,) * len(asked if asked is not None else known or ())
    if known is not None and len(known) != len(dims):
        raise InputError(f"input {port.name!r} has {len(dims)} axes ({shape_text(port)}), the given array {len(known)}")
    roles: list[Takes | None] = [role_of(dim) for dim in dims]
    if port.name in TEXT_INPUTS and len(dims) == 2:
        roles = ["batch", "seq"]
    axes: list[Axis | None] = []
    for place, (dim, role) in enumerate(zip(dims, roles, strict=True)):
        size: int | str | None = asked[place] if asked is not None else dim if isinstance(dim, int) else None
        if size is None and isinstance(dim, str):
            size = pinned.get(dim)
        given = known[place] if known is not None else None
        if isinstance(size, int):
            if given not in (None, size):
                raise InputError(f"input {port.name!r}: axis {place} is {size}, but {given} in the given array")
            axes.append(Axis(size=size, role=role))
        elif (takes := _LETTERS[size] if isinstance(size, str) else role) is not None:
            axes.append(Axis(size=given or (GOLDEN_SEQ if takes == "seq" else 1), takes=takes, role=takes))
        else:
            axes.append(Axis(size=given) if given is not None else None)
    return axes


def _unknown(inputs: Sequence[tuple[Port, Sequence[int]]]) -> str:
    """What to say of inputs with axes of unknown size."""
    what, flags = [], []
    for port, places in inputs:
        dims = port.shape or ()
        named = " and ".join(f"axis {place} ({dims[place] or 'without a name'})" for place in places)
        what.append(f"input {port.name!r} {shape_text(port)}: the size of {named} is not known")
        rows = [place for place, dim in enumerate(dims) if role_of(dim) == "batch"] or [0]
        sizes = (str(dim) if isinstance(dim, int) else "B" if place in rows else "…" for place, dim in enumerate(dims))
        flags.append(f"--shape {port.name}={'x'.join(sizes)}")
    return (
        f"{'; '.join(what)}. Give all sizes: {' '.join(flags)} (B: what --batch sizes, S: what --seq sizes, … a number)"
    )


def shape_text(port: Port) -> str:
    """``float32[batch, 3, ?]``."""
    return f"{port.dtype}[{', '.join(str(dim or '?') for dim in port.shape)}]" if port.shape is not None else port.dtype


def _written(name: str, shape: Shape) -> str:
    return f"--shape {name}={'x'.join(map(str, shape))}"
