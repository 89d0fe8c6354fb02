"""Turning a missing optional package into an error that names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgeformer.formats.errors import MissingDependencyError


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Wrap the imports of a command whose packages come with ``edgeformer[extra]``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("edgeformer"):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {error.name}, which is not installed; "
            f"install it with: python -m pip install 'edgeformer[{extra}]'"
        ) from None
