"""What goes into a graph, before a runtime sees it: some take what does not fit, and answer with anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from edgeformer.artifacts.errors import InputError

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


# Session: an opened artifact. Two methods, so that every backend (and a fake in a test) can be one.


Array = npt.NDArray[Any]


class Session(Protocol):
    """An opened artifact. Use it as a context manager, or call :meth:`close` when done.

    A runtime writes :meth:`run` and :meth:`close`. The other methods tell what only some runtimes know of themselves,
    and answer "not known" unless a runtime knows better.
    """

    provider: str
    """What computes, as the backend names it: ``CPUExecutionProvider``, ``torch-cpu``…"""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and block until the outputs are here.

        Args:
            inputs: name → array; ``input_ids`` and, for classifiers, ``attention_mask`` int64 [batch, seq]. Inputs
                that the artifact does not have are left out, so that one dict serves every artifact of a bundle.

        Returns:
            name → array; ``logits`` float32 [batch, classes] of a classifier, [batch, seq, words] of a language model.

        Raises:
            InputError: an input is missing, or its type or shape cannot be used.
        """

    def close(self) -> None:
        """Give the memory back. A closed session cannot run again."""

    def device_ms(self, inputs: Mapping[str, Array]) -> float | None:
        """Milliseconds of one run on the card alone, without copies; None where nothing times that.

        Raises what :meth:`run` raises.
        """
        return None

    def memory_by_name(self) -> dict[str, int]:
        """Bytes on the card that the runtime itself names, by what they are for; empty: it names none."""
        return {}

    def placement(self) -> dict[str, int] | None:
        """Provider → nodes of the graph that it computes; None where one computes all, or the runtime does not say."""
        return None

    def settings(self) -> dict[str, Any]:
        """How the runtime says that it was told to compute, for the record; empty: it has nothing to say."""
        return {}

    def most_tokens(self) -> int | None:
        """Tokens of each text that one call takes, where that may be fewer than the model does; None: not known."""
        return None

    def caveats(self) -> tuple[str, ...]:
        """What a reader of this session's figures must be told: nodes that something else computes."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Graph(Session, Protocol):
    """An opened ONNX graph, which may be a part of a model: what steps and decode graphs are run with."""

    max_positions: int | None
    """Longest sequence that the model takes; None: not known."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""

    def empty(self, name: str, rows: int) -> Array:
        """What a ``past…`` input holds at the start of ``rows`` texts: zeros, and nothing along a dynamic axis."""


def shape_text(array: Array) -> str:
    """An array's type and shape for a message: ``int64[1, 128]``."""
    return f"{np.asarray(array).dtype}{list(np.shape(array))}"
