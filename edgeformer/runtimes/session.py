"""Session and Graph: interfaces of an opened artifact; and input checks, because some runtimes do not check inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.artifacts.workspace import REMEDY

Array = npt.NDArray[Any]
Kind = Literal["cpu", "cuda"]
"""Kind of processor, as in device profiles."""

PAST, PRESENT = "past", "present"
"""Prefixes of inputs with caches of earlier tokens (empty at the start of a text), and of outputs that replace them."""


class InputType(NamedTuple):
    """Type of a graph's input: numpy's name, and per axis a size, a range of sizes, or a dynamic axis (its name)."""

    dtype: str
    axes: Sequence[int | range | str | None]


@dataclass(eq=False)
class DeviceCache:
    """A ``present…`` output that stays on its device, and is passed to the next call in place of an array."""

    value: Any
    shape: tuple[int, ...]


def check_inputs(
    graph: str, types: Mapping[str, InputType], inputs: Mapping[str, Array], max_positions: int | None = None
) -> dict[str, Array]:
    """Return the inputs of a call that a graph has, after checking their types and shapes.

    ``types``: type of every input of the graph. A :class:`DeviceCache` is not checked. Texts are int64; they are cast
    for a graph that takes int32. Missing token types are zeros, as in transformers. Raises InputError: another input is
    missing, or one is empty, of another type or shape, or longer than ``max_positions``.
    """
    if TOKEN_TYPES in types and TOKEN_TYPES not in inputs and "input_ids" in inputs:
        inputs = {**inputs, TOKEN_TYPES: np.zeros(inputs["input_ids"].shape, types[TOKEN_TYPES].dtype)}
    feed: dict[str, Array] = {}
    for name, (dtype, axes) in types.items():
        if name not in inputs:
            provided = ", ".join(sorted(inputs)) or "none"
            raise InputError(f"{graph}: input {name!r} is missing (given: {provided})")
        array = feed[name] = inputs[name]
        if isinstance(array, DeviceCache):
            continue
        if dtype == "int32" and array.dtype == np.int64 and np.abs(array).max(initial=0) < 1 << 31:
            array = feed[name] = array.astype(np.int32)
        is_cache, fits = name.startswith(PAST), array.dtype == dtype and array.ndim == len(axes)
        if fits:
            for size, axis in zip(array.shape, axes, strict=True):
                if isinstance(axis, range):
                    fits = fits and size in axis
                else:
                    fits = fits and (size > 0 or is_cache) and (size == axis or not isinstance(axis, int))
        if not fits:
            sizes = [f"{axis[0]} to {axis[-1]}" if isinstance(axis, range) else str(axis) for axis in axes]
            expected = f"{dtype}[{', '.join(sizes)}]"
            raise InputError(f"{graph}: input {name!r} must be {expected} and not empty, but is {shape_text(array)}")
        if max_positions is not None and not is_cache and array.ndim > 1 and array.shape[1] > max_positions:
            text = f"the sequence is {array.shape[1]} tokens long, but the model takes at most {max_positions}"
            raise InputError(f"{graph}: {text}; shorten it")
    return feed


class Session(Protocol):
    """An opened artifact, a context manager. Runtimes implement :meth:`run` and :meth:`close`; the rest is optional."""

    provider: str
    """The runtime's name of the provider: ``CPUExecutionProvider``, ``torch-cpu``…"""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and block until the outputs are available.

        Args:
            inputs: name → array; ``input_ids`` and, for classifiers, ``attention_mask`` int64 [batch, seq]; a model of
                pairs also takes ``token_type_ids``, by default zeros. Inputs that the artifact does not have are
                ignored, so that one dict serves every artifact of a bundle.

        Returns name → array; ``logits`` float32 [batch, classes] of a classifier, [batch, seq, words] of a language
        model. Raises InputError: an input is missing, or its type or shape cannot be used.
        """

    def close(self) -> None:
        """Free the memory. A closed session cannot run again."""

    def device_ms(self, inputs: Mapping[str, Array]) -> float | None:
        """Return the milliseconds of one run on the GPU, without copies; None if the runtime cannot time it."""
        return None

    def memory_by_name(self) -> dict[str, int]:
        """Return the GPU bytes that the runtime reports, by purpose; empty: it reports none."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the runtime's effective settings for reports, and ``nodes_by_provider`` if there are several."""
        return {}

    def caveats(self) -> tuple[str, ...]:
        """Return notes for readers of this session's measurements, e.g. nodes that another provider computes."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_file(path: Path) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; {REMEDY}")


def reason_of(error: object) -> str:
    """Return a library's message in one line."""
    return " ".join(str(error).split())[:200]


class Graph(Session, Protocol):
    """An opened graph file, possibly one part of a step artifact.

    Opening one raises ArtifactError (the file is missing, damaged or not runnable), InputError (the provider is not
    available here) or MissingDependencyError. ``threads``: of one operator; None: all that this process may use.
    """

    path: Path
    inputs: Mapping[str, InputType]
    max_positions: int | None
    """Longest sequence that the model takes; None: not known."""

    def prepare_feed(
        self, handle: object, inputs: Mapping[str, Array], *, same_shape: bool = False
    ) -> dict[str, Array]:
        """Return the inputs of a call, see :func:`check_inputs`; with ``same_shape`` all have the same.

        Raises EdgeformerError if the session is closed: the runtime's own ``handle`` is None.
        """
        if handle is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        feed = check_inputs(self.path.name, self.inputs, inputs, self.max_positions)
        if same_shape and len({array.shape for array in feed.values()}) > 1:
            raise self.refusal(feed, "all inputs must have the same shape")
        return feed

    def empty(self, name: str, rows: int) -> Array:
        """Return the initial value of a ``past…`` input for ``rows`` texts: zeros, with size 0 in dynamic axes."""
        dtype, (_, *axes) = self.inputs[name]
        return np.zeros((rows, *(axis if isinstance(axis, int) else 0 for axis in axes)), dtype)

    def refusal(self, feed: Mapping[str, Array], why: str) -> InputError:
        """Return the error for inputs that the runtime does not take."""
        shapes = ", ".join(f"{name} {shape_text(array)}" for name, array in feed.items())
        longer = "; the sequence may be too long for the model" if "input_ids" in feed else ""
        return InputError(f"{self.path.name}: the graph does not accept {shapes}{longer} ({why})")


def shape_text(array: Array) -> str:
    """Format an array's type and shape for a message: ``int64[1, 128]``."""
    return f"{np.asarray(array).dtype}{list(np.shape(array))}"
