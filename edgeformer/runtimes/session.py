"""Session and Graph: interfaces of an opened artifact; and input checks, because some runtimes do not check inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from edgeformer.artifacts.errors import InputError

KEPT = "past"
"""Prefix of the inputs that hold caches of earlier tokens; they are empty at the start of a text."""

InputType = tuple[str, Sequence[int | str | None]]
"""numpy's name of an input's type, and its axes: a size, or the name of a dynamic axis."""


def checked(
    graph: str, name: str, input_type: InputType, inputs: Mapping[str, Array], max_positions: int | None = None
) -> Array:
    """Return the input ``name`` of a call after checking its type and shape.

    Args:
        graph: the file's name, for messages.
        name: name of the input.
        input_type: its type and axes.
        inputs: all inputs of the call.
        max_positions: longest sequence that the model takes; None: not known.

    Raises:
        InputError: it is missing, empty, of another type or shape, or too long.
    """
    if name not in inputs:
        provided = ", ".join(sorted(inputs)) or "none"
        raise InputError(f"{graph}: input {name!r} is missing (given: {provided})")
    dtype, shape = input_type
    array = inputs[name]
    kept = name.startswith(KEPT)
    fits = len(array.shape) == len(shape) and all(
        (actual > 0 or kept) and (not isinstance(size, int) or actual == size)
        for actual, size in zip(array.shape, shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        expected = f"{dtype}[{', '.join(map(str, shape))}]"
        raise InputError(f"{graph}: input {name!r} must be {expected} and not empty, but is {shape_text(array)}")
    if max_positions is not None and not kept and len(array.shape) > 1 and array.shape[1] > max_positions:
        raise InputError(
            f"{graph}: the sequence is {array.shape[1]} tokens long, "
            f"but the model takes at most {max_positions}; shorten it"
        )
    return array


def empty(input_type: InputType, rows: int) -> Array:
    """Return the initial value of a ``past…`` input for ``rows`` texts: zeros, with size 0 in dynamic axes."""
    dtype, (_, *sizes) = input_type
    return np.zeros((rows, *(size if isinstance(size, int) else 0 for size in sizes)), dtype)


Array = npt.NDArray[Any]


class Session(Protocol):
    """An opened artifact. Use it as a context manager, or call :meth:`close` when done.

    A runtime implements :meth:`run` and :meth:`close`. The other methods are optional and return "not known" by
    default.
    """

    provider: str
    """The runtime's name of the provider: ``CPUExecutionProvider``, ``torch-cpu``…"""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and block until the outputs are available.

        Args:
            inputs: name → array; ``input_ids`` and, for classifiers, ``attention_mask`` int64 [batch, seq]. Inputs
                that the artifact does not have are ignored, so that one dict serves every artifact of a bundle.

        Returns:
            name → array; ``logits`` float32 [batch, classes] of a classifier, [batch, seq, words] of a language model.

        Raises:
            InputError: an input is missing, or its type or shape cannot be used.
        """

    def close(self) -> None:
        """Free the memory. A closed session cannot run again."""

    def device_ms(self, inputs: Mapping[str, Array]) -> float | None:
        """Return the milliseconds of one run on the GPU, without copies; None if the runtime cannot time it.

        Raises what :meth:`run` raises.
        """
        return None

    def memory_by_name(self) -> dict[str, int]:
        """Return the GPU bytes that the runtime reports, by purpose; empty: it reports none."""
        return {}

    def placement(self) -> dict[str, int] | None:
        """Provider → number of graph nodes; None if one provider computes all, or the runtime does not report it."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the runtime's effective settings for reports; empty: it reports none."""
        return {}

    def most_tokens(self) -> int | None:
        """Return the longest sequence of one call, if it may be shorter than the model's limit; None: not known."""
        return None

    def caveats(self) -> tuple[str, ...]:
        """Return notes for readers of this session's measurements, e.g. nodes that another provider computes."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Graph(Session, Protocol):
    """An opened graph, possibly one part of a step artifact."""

    max_positions: int | None
    """Longest sequence that the model takes; None: not known."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""

    def empty(self, name: str, rows: int) -> Array:
        """Return the initial value of a ``past…`` input for ``rows`` texts: zeros, with size 0 in dynamic axes."""


def shape_text(array: Array) -> str:
    """Format an array's type and shape for a message: ``int64[1, 128]``."""
    return f"{np.asarray(array).dtype}{list(np.shape(array))}"
