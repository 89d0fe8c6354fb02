"""One line of `doctor`: a thing that a command may need, whether it works here, and what to do if not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal


@dataclass(frozen=True)
class Capability:
    """One thing that a command may need, whether it works here, and what to do if not."""

    name: str
    status: Literal["available", "unavailable"]
    version: str | None = None
    detail: str = ""
    remedy: str | None = None


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None when none is."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
