"""Session: an opened artifact. Two methods, so that every backend (and a fake in a test) can be one."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
S = TypeVar("S", bound="Session")


class Session(Protocol):
    """An opened artifact. Use it as a context manager, or call :meth:`close` when done."""

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
        ...

    def close(self) -> None:
        """Give the memory back. A closed session cannot run again."""
        ...

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shape_text(array: Array) -> str:
    """An array's type and shape for a message: ``int64[1, 128]``."""
    return f"{np.asarray(array).dtype}{list(np.shape(array))}"
