"""Runtimes: what opens an artifact, builds it, and says whether it can run here. One folder each.

Built-in backends are the subpackages of this one, each with a ``BACKEND``; other packages announce theirs through the
entry point group ``edgeformer.backends``. Importing this loads no runtime.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from edgeformer.backends.backend import (
    ArtifactFiles,
    Backend,
    Builder,
    BuildJob,
    Kind,
    OpenOptions,
    ProviderFacts,
    Target,
    Unavailable,
)
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError

if TYPE_CHECKING:
    from edgeformer.formats.manifest import ArtifactManifest

__all__ = [
    "GROUP", "ArtifactFiles", "Backend", "BuildJob", "Builder", "Kind", "OpenOptions", "ProviderFacts", "Target",
    "Unavailable", "all_backends", "all_builders", "backend_named", "backend_of", "builder_named", "builder_of",
    "counts_threads", "default_provider", "library_versions", "on_gpu", "provider_label",
]  # fmt: skip

GROUP = "edgeformer.backends"
"""Entry points of this group name the ``BACKEND`` of other packages."""


def all_backends() -> tuple[Backend, ...]:
    """Every backend: the built-in ones, and those that other packages announce.

    Raises:
        EdgeformerError: a package announces a backend that cannot be imported, or takes a name or format that is taken.
    """
    return (*_built_in(), *_announced())


def _built_in() -> tuple[Backend, ...]:
    return tuple(map(_folder, _folders()))


@cache
def _folders() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


@cache
def _folder(name: str) -> Backend:
    backend: Backend = import_module(f"{__name__}.{name}").BACKEND
    return backend


@cache
def _announced() -> tuple[Backend, ...]:
    """Backends of other packages. Looking for them reads every installed package's list, so it is done once."""
    known = list(_built_in())
    # A package that lies on the path twice is announced twice.
    for point in {(point.name, point.value): point for point in metadata.entry_points(group=GROUP)}.values():
        where = f"the entry point {point.name!r} ({point.value}) of the group {GROUP!r}"
        try:
            backend = point.load()
        except Exception as error:  # whatever a foreign package raises while it is imported
            raise EdgeformerError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(backend, Backend):
            raise EdgeformerError(f"{where} is a {type(backend).__name__}, not an edgeformer.backends.Backend")
        for other in known:
            taken = [name for name in backend.formats if name in other.formats]
            if other.name == backend.name or taken:
                raise EdgeformerError(f"{where} takes {taken or [backend.name]}, which {other.name!r} has already")
        known.append(backend)
    return tuple(known[len(_built_in()) :])


def backend_named(name: str) -> Backend:
    """The backend of that name. Raises InputError that lists those there are."""
    for backend in all_backends():
        if backend.name == name:
            return backend
    raise InputError(f"no runtime {name!r}; there are: {', '.join(backend.name for backend in all_backends())}")


def backend_of(artifact: ArtifactManifest | str) -> Backend:
    """The backend that opens an artifact, or artifacts of a format.

    Raises:
        ArtifactError: no backend here opens that format; the message lists those that are known.
    """
    format_ = artifact if isinstance(artifact, str) else artifact.format
    for backend in map(_folder, _folders()):  # one after the other, and others' last: importing them takes a while
        if format_ in backend.formats:
            return backend
    for backend in _announced():
        if format_ in backend.formats:
            return backend
    what = "artifacts" if isinstance(artifact, str) else f"artifact {artifact.id!r}"
    known = ", ".join(name for backend in all_backends() for name in backend.formats)
    raise ArtifactError(
        f"{what} of the format {format_!r} cannot be opened here: no installed runtime does; known formats: {known}"
    )


def all_builders() -> tuple[Builder, ...]:
    """What can build artifacts of other formats than ONNX."""
    return tuple(builder for backend in all_backends() for builder in backend.builders)


def builder_named(name: str) -> Builder:
    """The builder that ``export --build`` calls so. Raises InputError that lists those there are."""
    for builder in all_builders():
        if builder.name == name:
            return builder
    raise InputError(f"--build {name}: no such builder; there are: {', '.join(one.name for one in all_builders())}")


def builder_of(format_: str) -> Builder | None:
    """The builder that makes artifacts of a format; None where export writes them itself, or nobody here makes them."""
    return next((builder for builder in all_builders() if format_ in builder.formats), None)


def on_gpu(provider: str) -> bool:
    """Whether a session's ``provider`` computes on an NVIDIA GPU."""
    return _facts(provider).on_gpu


def provider_label(provider: str) -> str:
    """A provider's name for a reader: ``CPUExecutionProvider`` is ``CPU``."""
    return _facts(provider).label


def counts_threads(provider: str) -> bool:
    """Whether a provider computes in the threads that its session was given, and in no others."""
    return _facts(provider).counts_threads


def default_provider(kind: Kind | None = None) -> str:
    """What ONNX graphs are computed with where nobody asks for something else.

    Args:
        kind: on a device of this kind; None: on this machine, the best that works here.
    """
    from edgeformer.backends.onnxruntime.providers import default_provider as choose

    return choose(kind)


def _facts(provider: str) -> ProviderFacts:
    """The answer of the backend that knows the provider; of one that is not installed here nothing is known."""
    for backends in (_built_in, _announced):
        for backend in backends():
            facts = backend.provider_facts(provider)
            if facts is not None:
                return facts
    return ProviderFacts(provider)


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide what a run, an artifact or a measurement is."""
    from edgeformer.machine.host import library_versions as installed

    return installed(tuple(name for backend in all_backends() for name in backend.distributions))
