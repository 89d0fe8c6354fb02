"""What goes into a graph, before a runtime sees it: some take what does not fit, and answer with anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgeformer.backends.session import Array, shape_text
from edgeformer.formats.errors import InputError

KEPT = "past"
"""How the names of inputs begin that hold what was kept of earlier tokens; they are empty at the start of a text."""

Wanted = tuple[str, Sequence[int | str | None]]
"""numpy's name of an input's type, and its axes: a size, or what a size is called that is not fixed."""


def checked(
    graph: str, name: str, wanted: Wanted, inputs: Mapping[str, Array], max_positions: int | None = None
) -> Array:
    """The input ``name`` of a call, which fits the graph.

    Args:
        graph: the file's name, for messages.
        name: of the input.
        wanted: its type and axes.
        inputs: all that were given.
        max_positions: longest sequence that the model takes; None: not known.

    Raises:
        InputError: it is missing, empty, of another type or shape, or too long.
    """
    if name not in inputs:
        given = ", ".join(sorted(inputs)) or "none"
        raise InputError(f"{graph}: input {name!r} is missing (given: {given})")
    dtype, shape = wanted
    array = inputs[name]
    kept = name.startswith(KEPT)
    fits = len(array.shape) == len(shape) and all(
        (actual > 0 or kept) and (not isinstance(size, int) or actual == size)
        for actual, size in zip(array.shape, shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        wanted_text = f"{dtype}[{', '.join(map(str, shape))}]"
        raise InputError(f"{graph}: input {name!r} must be {wanted_text} and not empty, but is {shape_text(array)}")
    if max_positions is not None and not kept and len(array.shape) > 1 and array.shape[1] > max_positions:
        raise InputError(
            f"{graph}: the sequence is {array.shape[1]} tokens long, "
            f"but the model takes at most {max_positions}; shorten it"
        )
    return array


def empty(wanted: Wanted, rows: int) -> Array:
    """What a ``past…`` input holds at the start of ``rows`` texts: zeros, and nothing along an axis without a size."""
    dtype, (_, *sizes) = wanted
    return np.zeros((rows, *(size if isinstance(size, int) else 0 for size in sizes)), dtype)
