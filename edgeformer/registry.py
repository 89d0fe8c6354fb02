"""Rooms: what one folder brings is found, not listed. Tasks, model families and runtimes are found here.

Each is a folder whose ``__init__`` offers one object under its room's agreed name. Built-in ones are subpackages of the
room; other packages announce theirs as an entry point whose group is the room's name, for instance
``[project.entry-points."edgeformer.models"]``. Nobody keeps a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from edgeformer.artifacts.errors import EdgeformerError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """A package whose subpackages are of one kind.

    Attributes:
        package: ``edgeformer.models``, for instance; also the group of the entry points.
        attribute: the name under which each folder offers its object: ``MODEL``. A folder without it is no such thing.
        kind: what that object must be.
        names: what an object is asked for by; no two of a registry may share one.
        modules: single files count as well as folders.
    """

    package: str
    attribute: str
    kind: type
    names: Callable[[T], Sequence[str]]
    modules: bool = False

    def built_in(self) -> tuple[T, ...]:
        """What edgeformer's own folders offer, in alphabetical order."""
        offered = (_offered(self, folder) for folder in _folders(self))
        return tuple(one for one in offered if one is not None)

    def announced(self) -> tuple[T, ...]:
        """What other installed packages announce. Looking for them takes a while, so it is done once per process.

        Raises:
            EdgeformerError: what a package announces cannot be imported, is of another kind, or takes a name that is
                taken; the message names the package.
        """
        return _announced(self)

    def all(self) -> tuple[T, ...]:
        """Everything in the room: built in, then announced. Raises EdgeformerError as :meth:`announced` does."""
        return (*self.built_in(), *self.announced())

    def find(self, name: str) -> T | None:
        """What answers to a name; None: nothing does. Folders are imported one after the other, other packages last."""
        for folder in _folders(self):
            one: T | None = _offered(self, folder)
            if one is not None and name in self.names(one):
                return one
        return next((one for one in self.announced() if name in self.names(one)), None)


@cache
def _folders(registry: Registry[T]) -> list[str]:
    members = iter_modules(import_module(registry.package).__path__)
    return sorted(member.name for member in members if member.ispkg or registry.modules)


@cache
def _offered(room: Registry[T], folder: str) -> T | None:
    one: T | None = getattr(import_module(f"{room.package}.{folder}"), room.attribute, None)
    return one


@cache
def _announced(room: Registry[T]) -> tuple[T, ...]:
    from importlib import metadata  # of which the first answer of a built-in family has no need

    known = list(room.built_in())
    points = metadata.entry_points(group=room.package)
    # A package that lies on the path twice is announced twice.
    for name, point in sorted({(point.name, point.value): point for point in points}.items()):
        owner = f"{point.dist.name}: " if point.dist is not None else ""
        where = f"{owner}the entry point {name[0]!r} ({point.value}) of the group {room.package!r}"
        remedy = "repair or uninstall that package"
        try:
            one: T = point.load()
        except Exception as error:  # whatever a foreign package raises while it is imported
            raise EdgeformerError(f"{where} cannot be loaded: {type(error).__name__}: {error}; {remedy}") from error
        if not isinstance(one, room.kind):
            expected = f"{room.package}.{room.kind.__name__}"
            raise EdgeformerError(f"{where} is a {type(one).__name__}, not an {expected}; {remedy}")
        for other in known:
            taken = [name for name in room.names(one) if name in room.names(other)]
            if taken:
                raise EdgeformerError(f"{where} takes {taken}, which {room.names(other)[0]!r} has already; {remedy}")
        known.append(one)
    return tuple(known[len(room.built_in()) :])
