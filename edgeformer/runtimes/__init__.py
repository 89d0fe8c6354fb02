"""Runtimes: what opens an artifact, builds it, and says whether it can run here. One folder each.

Built-in backends are the subpackages of this one, each with a ``RUNTIME``; other packages announce theirs through the
entry point group ``edgeformer.runtimes``. Importing this loads no runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.registry import Registry
from edgeformer.runtimes.runtime import (
    ArtifactFiles,
    Builder,
    BuildJob,
    Kind,
    OpenOptions,
    ProviderFacts,
    Runtime,
    Target,
    Unavailable,
)

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.manifest import ArtifactManifest

__all__ = [
    "ALL_RUNTIMES",
    "REGISTRY",
    "ArtifactFiles",
    "BuildJob",
    "Builder",
    "Kind",
    "OpenOptions",
    "ProviderFacts",
    "Runtime",
    "Target",
    "Unavailable",
    "all_builders",
    "all_runtimes",
    "builder_named",
    "builder_of",
    "cannot_estimate",
    "cannot_run",
    "default_provider",
    "how_to_use_card",
    "library_versions",
    "never_runs",
    "on_gpu",
    "opener_of",
    "provider_facts",
    "provider_of",
    "providers_asked",
    "rounding_providers",
    "runtime_names",
    "runtime_of",
]  # fmt: skip

# Beside the runtimes, which name theirs.
_RECORDED = ("edgeformer", "onnx", "onnxscript", "tokenizers", "datasets", "numpy")

REGISTRY: Registry[Runtime] = Registry(__name__, "RUNTIME", Runtime, lambda runtime: (runtime.name, *runtime.formats))


def all_runtimes() -> tuple[Runtime, ...]:
    """Every backend: the built-in ones, and those that other packages announce.

    Raises:
        EdgeformerError: a package announces a backend that cannot be imported, or takes a name or format that is taken.
    """
    return REGISTRY.all()


def runtime_of(artifact: ArtifactManifest | str) -> Runtime:
    """The backend that opens an artifact, or artifacts of a format.

    Raises:
        ArtifactError: no backend here opens that format; the message lists those that are known.
    """
    format_ = artifact if isinstance(artifact, str) else artifact.format
    runtime = REGISTRY.find(format_)
    if runtime is not None and format_ in runtime.formats:
        return runtime
    what = "artifacts" if isinstance(artifact, str) else f"artifact {artifact.id!r}"
    known = ", ".join(name for runtime in all_runtimes() for name in runtime.formats)
    raise ArtifactError(
        f"{what} of the format {format_!r} cannot be opened here: no installed runtime does; known formats: {known}"
    )


def opener_of(artifact: ArtifactManifest, provider: str | None = None) -> Runtime:
    """The backend that opens an artifact for one of its providers: its format's own, or another that reads the format.

    Args:
        artifact: of any format.
        provider: what shall compute; None, or one that nobody here has: the format's own backend decides.

    Raises:
        ArtifactError: as :func:`runtime_of`.
    """
    if provider is None:  # most often; the other backends are not even imported
        return runtime_of(artifact)
    readers = (runtime for runtime in all_runtimes() if artifact.format in runtime.reads)
    return next((one for one in readers if one.provider_facts(provider) is not None), runtime_of(artifact))


ALL_RUNTIMES = "all"
"""What ``--runtime`` calls every runtime that is installed."""


def runtime_names() -> tuple[str, ...]:
    """What ``--runtime`` can be told: runtimes that open graphs which another one opens, too; and all of them."""
    others = [runtime for runtime in all_runtimes() if runtime.reads]
    shared = {format_ for runtime in others for format_ in runtime.reads}
    own = [runtime for runtime in all_runtimes() if shared.intersection(runtime.formats)]
    return (*(runtime.name for runtime in own + [one for one in others if one not in own]), ALL_RUNTIMES)


def providers_asked(artifact: ArtifactManifest, runtime: str) -> tuple[str, ...]:
    """What an artifact is computed with where a runtime is asked for.

    Args:
        artifact: of any format.
        runtime: one of :func:`runtime_names`, or a provider's name; all: of the runtimes that are installed.

    Returns:
        Names of providers; empty: that runtime does not open it.

    Raises:
        InputError: no such runtime.
    """
    is_provider = any(candidate.provider_facts(runtime) for candidate in all_runtimes())
    if not is_provider and runtime not in runtime_names():
        raise InputError(f"--runtime {runtime}: no such runtime; there are: {', '.join(runtime_names())}")
    able = [candidate for candidate in all_runtimes() if artifact.format in (*candidate.formats, *candidate.reads)]
    able.sort(key=lambda candidate: artifact.format not in candidate.formats)
    if is_provider:
        return (runtime,) if any(candidate.provider_facts(runtime) for candidate in able) else ()
    if runtime == ALL_RUNTIMES:
        chosen = [one for one in able if artifact.format in one.formats or one.cannot_run(artifact) is None]
    else:
        chosen = [one for one in able if one.name == runtime]
    return tuple(provider for runtime in chosen for provider in runtime.offers(artifact))


def rounding_providers(artifact: ArtifactManifest) -> tuple[str, ...]:
    """Providers of the installed runtimes that compute an artifact in fewer bits than its precision says.

    Opening it with one of them can still be refused: the processor may lack what it takes.
    """
    asked = providers_asked(artifact, ALL_RUNTIMES)
    return tuple(provider for provider in asked if provider_facts(provider).rounds_to is not None)


def cannot_run(artifact: ArtifactManifest, provider: str | None = None) -> str | None:
    """Why this machine cannot run an artifact: format, package, libraries, driver, GPU, version; None: it can.

    Args:
        artifact: of any format.
        provider: what shall compute; None: its format's own backend decides.
    """
    try:
        return opener_of(artifact, provider).cannot_run(artifact)
    except ArtifactError as error:
        return str(error)


def never_runs(artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
    """Why no device like this one can ever run an artifact; None: one could, as far as is known here.

    Args:
        artifact: of any format.
        device: facts of the device.
    """
    try:
        return runtime_of(artifact).never_runs(artifact, device)
    except ArtifactError:
        return None  # of a runtime that is not installed here: what it can do elsewhere is not known


def cannot_estimate(artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
    """Why nothing can be estimated of an artifact for a device; None: it can be.

    Args:
        artifact: of any format.
        device: facts of the device.
    """
    try:
        return runtime_of(artifact).estimable(artifact, device)
    except ArtifactError as error:
        return str(error)


def provider_of(artifact: ArtifactManifest, kind: Kind | None = None) -> str:
    """What computes an artifact, see :meth:`Backend.provider`; of an unknown format its name.

    Args:
        artifact: of any format.
        kind: on a device of this kind; None: on this machine.
    """
    try:
        return runtime_of(artifact).provider(artifact, kind=kind)
    except ArtifactError:
        return artifact.format


def all_builders() -> tuple[Builder, ...]:
    """What can build artifacts of other formats than ONNX."""
    return tuple(builder for runtime in all_runtimes() for builder in runtime.builders)


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
    return provider_facts(provider).kind == "cuda"


def default_provider(kind: Kind | None = None) -> str:
    """What ONNX graphs are computed with where nobody asks for something else.

    Args:
        kind: on a device of this kind; None: on this machine, the best that works here.
    """
    from edgeformer.runtimes.onnxruntime.providers import default_provider as choose

    return choose(kind)


def how_to_use_card() -> str:
    """What to do so that ONNX graphs are computed by this machine's NVIDIA card, where its processor computes them."""
    from edgeformer.runtimes.onnxruntime.providers import how_to_use_card as told

    return told()


def provider_facts(provider: str) -> ProviderFacts:
    """What the backend says that knows a session's ``provider``; of one that is not installed here nothing is known."""
    for runtimes in (REGISTRY.built_in, REGISTRY.announced):
        for runtime in runtimes():
            facts = runtime.provider_facts(provider)
            if facts is not None:
                return facts
    return ProviderFacts(provider)


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide what a run, an artifact or a measurement is."""
    import platform

    from edgeformer.system.capability import installed_version

    runtimes = (name for runtime in all_runtimes() for name in runtime.distributions)
    found = {name: installed_version(name) for name in (*_RECORDED, *runtimes)}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}
