"""Finding what one folder brings: the subpackages of a room, and what other installed packages announce for it.

A task, a model family or a runtime is a folder whose ``__init__`` offers one object under an agreed name. Built-in ones
are subpackages of the room; others are announced by their package as entry points whose group is the room's name, e.g.
``[project.entry-points."edgeformer.families"]``. Nobody keeps a list.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from pkgutil import iter_modules
from typing import Any

from edgeformer.formats.errors import EdgeformerError


@cache
def built_in(room: str, attribute: str) -> tuple[Any, ...]:
    """What the room's own subpackages offer, in alphabetical order of their folders.

    Args:
        room: a package, such as ``edgeformer.families``.
        attribute: the agreed name, such as ``FAMILY``. A subpackage without it is no such thing.
    """
    folders = sorted(found.name for found in iter_modules(import_module(room).__path__) if found.ispkg)
    offered = [getattr(import_module(f"{room}.{folder}"), attribute, None) for folder in folders]
    return tuple(found for found in offered if found is not None)


@cache
def announced(room: str) -> tuple[Any, ...]:
    """What other installed packages announce for the room, in alphabetical order of their entry points.

    Raises:
        EdgeformerError: an announced object cannot be imported; the message names its package.
    """
    found = []
    for entry in sorted(metadata.entry_points(group=room), key=lambda entry: entry.name):
        try:
            found.append(entry.load())
        except Exception as error:  # whatever a foreign package raises while it is imported
            owner = entry.dist.name if entry.dist is not None else "an installed package"
            raise EdgeformerError(
                f"{owner}: announces {entry.value!r} for {room}, which cannot be imported "
                f"({type(error).__name__}: {error}); repair or uninstall {owner}"
            ) from error
    return tuple(found)


def discover(room: str, attribute: str) -> tuple[Any, ...]:
    """Everything that there is in a room: built in, then announced."""
    return (*built_in(room, attribute), *announced(room))
