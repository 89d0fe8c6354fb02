"""Runtimes: they open artifacts, build them, and report whether they can run on this system.

Each built-in runtime is a subpackage with a ``RUNTIME``; other packages register theirs in the entry point group
``edgeformer.runtimes``. Importing this package imports no runtime library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.registry import Registry
from edgeformer.runtimes.onnxruntime.providers import default_provider
from edgeformer.runtimes.runtime import (
    ArtifactFiles,
    Builder,
    BuildJob,
    OpenOptions,
    ProviderFacts,
    Runtime,
    Target,
    Unavailable,
)
from edgeformer.runtimes.session import Kind

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile

__all__ = [
    "ALL_RUNTIMES", "REGISTRY", "ArtifactFiles", "BuildJob", "Builder", "Kind", "OpenOptions", "ProviderFacts",
    "Runtime", "Target", "Unavailable", "all_builders", "all_runtimes", "cannot_run", "default_provider",
    "find_builder", "library_versions", "never_runs", "on_gpu", "opener_of", "provider_facts", "provider_of",
    "requested_providers", "runtime_of",
]  # fmt: skip

ALL_RUNTIMES = "all"
"""Value of ``--runtime`` for every installed runtime."""

# In addition to the distributions of the runtimes.
_RECORDED = ("edgeformer", "onnx", "onnxscript", "tokenizers", "datasets", "numpy")

REGISTRY: Registry[Runtime] = Registry(__name__, "RUNTIME", Runtime, lambda runtime: (runtime.name, *runtime.formats))
all_runtimes = REGISTRY.all


def runtime_of(artifact: ArtifactManifest | str) -> Runtime:
    """Return the runtime that opens an artifact, or artifacts of a format. Raises ArtifactError if none does."""
    subject, format_ = "artifacts", artifact
    if not isinstance(artifact, str):
        subject, format_ = f"artifact {artifact.id!r}", artifact.format
    runtime = REGISTRY.find(str(format_))
    if runtime is not None and format_ in runtime.formats:
        return runtime
    formats = ", ".join(name for runtime in all_runtimes() for name in runtime.formats)
    raise ArtifactError(
        f"{subject}: no installed runtime opens the format {format_!r}, only {formats}; install the package that adds "
        "this runtime"
    )


def opener_of(artifact: ArtifactManifest, provider: str | None = None) -> Runtime:
    """Return the runtime that opens an artifact with a provider (None or unknown: its format's), or raise as above."""
    if provider is None:  # the common case; does not import the other runtimes
        return runtime_of(artifact)
    readers = (runtime for runtime in all_runtimes() if runtime.also_opens(artifact))
    return next((reader for reader in readers if reader.provider_facts(provider) is not None), runtime_of(artifact))


def requested_providers(artifact: ArtifactManifest, runtime: str) -> tuple[str, ...]:
    """Return the providers that run an artifact if a runtime is requested; empty: the runtime does not open it.

    ``runtime`` is one that shares a format with another, ``all``, or a provider. Raises InputError if there is none.
    """
    runtimes = all_runtimes()
    owners = [candidate for candidate in runtimes if artifact.format in candidate.formats]
    openers = [*owners, *(candidate for candidate in runtimes if candidate.also_opens(artifact))]
    if any(candidate.provider_facts(runtime) for candidate in runtimes):
        return (runtime,) if any(candidate.provider_facts(runtime) for candidate in openers) else ()
    shared = {format_ for candidate in runtimes for format_ in candidate.reads}
    sharing = [candidate.name for candidate in runtimes if shared.intersection(candidate.formats)]
    names = dict.fromkeys([*sharing, *(candidate.name for candidate in runtimes if candidate.reads), ALL_RUNTIMES])
    if runtime not in names:
        raise InputError(f"--runtime {runtime}: no such runtime; give one of {', '.join(names)}")
    selected = [candidate for candidate in openers if candidate.name == runtime]
    if runtime == ALL_RUNTIMES:
        selected = [candidate for candidate in openers if candidate in owners or candidate.cannot_run(artifact) is None]
    return tuple(provider for candidate in selected for provider in candidate.offers(artifact))


def cannot_run(artifact: ArtifactManifest, provider: str | None = None) -> str | None:
    """Return why this system cannot run an artifact (format, package, libraries, driver, GPU, version), or None."""
    try:
        return opener_of(artifact, provider).cannot_run(artifact)
    except ArtifactError as error:
        return str(error)


def never_runs(artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
    """Return why such a device can never run an artifact, or None if it can or if that is not known."""
    try:
        return runtime_of(artifact).never_runs(artifact, device)
    except ArtifactError:
        return None  # the format's runtime is not installed, so its abilities are not known


def provider_of(artifact: ArtifactManifest, kind: Kind | None = None) -> str:
    """Return an artifact's provider, see :meth:`Runtime.provider`; for an unknown format, the format's name."""
    try:
        return runtime_of(artifact).provider(artifact, kind=kind)
    except ArtifactError:
        return artifact.format


def all_builders() -> tuple[Builder, ...]:
    """Return the builders of formats other than ONNX."""
    return tuple(builder for runtime in all_runtimes() for builder in runtime.builders)


def find_builder(name: str) -> Builder:
    """Return the builder with a name of ``export --build``. Raises InputError if there is none."""
    builders = {builder.name: builder for builder in all_builders()}
    if name not in builders:
        raise InputError(f"--build {name}: no such builder; give one of {', '.join(builders)}")
    return builders[name]


def on_gpu(provider: str) -> bool:
    """Return whether a session's ``provider`` computes on an NVIDIA GPU."""
    return provider_facts(provider).kind == "cuda"


def provider_facts(provider: str) -> ProviderFacts:
    """Return the facts about a session's ``provider``; only its name if no installed runtime knows it."""
    for runtimes in (REGISTRY.built_in, REGISTRY.announced):
        for runtime in runtimes():
            facts = runtime.provider_facts(provider)
            if facts is not None:
                return facts
    return ProviderFacts(provider)


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that a run, an artifact or a measurement depends on."""
    import platform

    from edgeformer.system.capability import installed_version

    runtimes = (name for runtime in all_runtimes() for name in runtime.distributions)
    versions = {name: installed_version(name) for name in (*_RECORDED, *runtimes)}
    return {"python": platform.python_version()} | {name: version for name, version in versions.items() if version}
