"""Turning a missing optional package into an error that names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgeformer.formats.errors import MissingDependencyError, install_hint


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Wrap the imports of a command whose packages come with ``extra``, which the error names."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("edgeformer"):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {error.name}, which is not installed; install it with: {install_hint(extra)}"
        ) from None
