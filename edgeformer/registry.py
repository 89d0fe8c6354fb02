"""Registry of tasks, models and runtimes: subpackages of a package, and entry points of other installed packages.

Each member is a module or subpackage that defines one object under the registry's attribute name. Other packages
announce theirs in an entry point group named like the package: ``[project.entry-points."edgeformer.models"]``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from edgeformer.artifacts.errors import EdgeformerError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The members of one package.

    Attributes:
        package: for instance ``edgeformer.models``; also the entry point group.
        attribute: name under which a member defines its object: ``MODEL``. Submodules without it are skipped.
        kind: required type of the object.
        names: returns an object's names for :meth:`find`; they are unique within a registry.
        modules: whether single-file modules count, besides subpackages.
    """

    package: str
    attribute: str
    kind: type
    names: Callable[[T], Sequence[str]]
    modules: bool = False

    def built_in(self) -> Iterator[T]:
        """Yield edgeformer's own members, in alphabetical order of their modules, which are imported one by one."""
        for submodule in _submodules(self.package, modules=self.modules):
            member: T | None = getattr(import_module(f"{self.package}.{submodule}"), self.attribute, None)
            if member is not None:
                yield member

    def announced(self) -> tuple[T, ...]:
        """Return the members from entry points. The lookup takes a while and runs once per process.

        Raises EdgeformerError: an entry point cannot be imported, has another type, or uses a name that exists already;
        the message names its package.
        """
        return _announced(self)

    def all(self) -> tuple[T, ...]:
        """Return all members: built-in ones, then entry points. Raises EdgeformerError like :meth:`announced`."""
        return (*self.built_in(), *self.announced())

    def find(self, name: str) -> T | None:
        """Return the member with a name, or None. Entry points are looked up only if no built-in member has it."""
        for members in (self.built_in, self.announced):
            for member in members():
                if name in self.names(member):
                    return member
        return None


@cache
def _submodules(package: str, *, modules: bool) -> list[str]:
    members = iter_modules(import_module(package).__path__)
    return sorted(member.name for member in members if member.ispkg or modules)


@cache
def _announced(registry: Registry[T]) -> tuple[T, ...]:
    from importlib import metadata  # slow to import, and not needed to find a built-in member

    members, announced = list(registry.built_in()), []
    entry_points = metadata.entry_points(group=registry.package)
    # A package that is on the path twice is announced twice.
    for (name, value), entry_point in sorted({(point.name, point.value): point for point in entry_points}.items()):
        owner = f"{entry_point.dist.name}: " if entry_point.dist is not None else ""
        where = f"{owner}the entry point {name!r} ({value}) of the group {registry.package!r}"
        remedy = "repair or uninstall that package"
        try:
            member: T = entry_point.load()
        except Exception as error:  # importing another package can raise anything
            raise EdgeformerError(f"{where} cannot be loaded: {type(error).__name__}: {error}; {remedy}") from error
        if not isinstance(member, registry.kind):
            expected = f"{registry.package}.{registry.kind.__name__}"
            raise EdgeformerError(f"{where} is a {type(member).__name__}, not an {expected}; {remedy}")
        for other in members:
            duplicates = [name for name in registry.names(member) if name in registry.names(other)]
            if duplicates:
                raise EdgeformerError(
                    f"{where} has the name {duplicates[0]!r} of {registry.names(other)[0]!r}; {remedy}"
                )
        members.append(member)
        announced.append(member)
    return tuple(announced)
