"""From a bundle's manifest entry to an open Session: is it the file that was exported, can it run here?"""

from __future__ import annotations

from pathlib import Path

from edgeformer.runtime.session import Session
from edgeformer.schema.errors import ArtifactError, MissingDependencyError
from edgeformer.schema.files import sha256_of
from edgeformer.schema.manifest import ArtifactManifest, BundleManifest
from edgeformer.schema.workspace import BUNDLE_FILE, read_bundle

REMEDY = "export the run again, or copy the whole bundle again"


def open_artifact(
    bundle: Path, artifact: ArtifactManifest, provider: str | None = None, threads: int | None = None
) -> Session:
    """Check the artifact's file against the manifest, then open it.

    Args:
        bundle: the bundle's folder.
        artifact: one of the artifacts of its manifest.
        provider: an ONNX Runtime execution provider; None takes :func:`default_provider`.
        threads: threads of one operator; None takes what this process may use.

    Raises:
        ArtifactError: nothing was built, or the file is missing, truncated, changed or not runnable.
        InputError: the provider is not available here.
        MissingDependencyError: the format needs a runtime that is not here.
    """
    manifest = read_bundle(bundle)
    path = check_artifact(bundle, manifest, artifact)
    return open_checked(path, artifact, manifest.max_positions, provider, threads)


def check_artifact(bundle: Path, manifest: BundleManifest, artifact: ArtifactManifest) -> Path:
    """The artifact's file, after its bytes (and the weights files beside it) were compared with the manifest.

    Raises:
        ArtifactError: nothing was built, or a file is missing, truncated or changed.
    """
    if artifact.status != "built" or artifact.file is None:
        reason = f": {artifact.reason}" if artifact.reason else ""
        raise ArtifactError(f"{bundle}: artifact {artifact.id!r} was not built ({artifact.status}{reason})")
    path = _inside(bundle, artifact.file)
    _check_file(path, artifact.sha256, artifact.size_bytes)
    folder = Path(artifact.file).parent
    if folder != Path():
        # Weights that several graphs share lie beside them and are listed among the bundle's other files.
        for name, sha256 in manifest.files.items():
            if Path(name).parent == folder:
                _check_file(_inside(bundle, name), sha256, None)
    return path


def check_companion(bundle: Path, manifest: BundleManifest, name: str) -> Path:
    """Another file of the bundle (``golden.npz``), compared with the manifest where that lists it.

    Raises:
        ArtifactError: the file is missing, truncated or changed.
    """
    path = _inside(bundle, name)
    _check_file(path, manifest.files.get(name), None)
    return path


def open_checked(
    path: Path,
    artifact: ArtifactManifest,
    max_positions: int | None = None,
    provider: str | None = None,
    threads: int | None = None,
) -> Session:
    """Open a file that :func:`check_artifact` has passed. Raises what :func:`open_artifact` raises."""
    refusal = cannot_run(artifact)
    if refusal is not None:
        raise MissingDependencyError(f"{path}: {refusal}")
    from edgeformer.runtime.onnx_session import OnnxSession

    return OnnxSession(path, provider or default_provider(), threads, max_positions)


def cannot_run(artifact: ArtifactManifest) -> str | None:
    """Why this installation cannot run the artifact's format; None when it can."""
    if artifact.format == "onnx":
        return None
    built_for = ", ".join(f"{key} {value}" for key, value in (artifact.built_for or {}).items())
    target = f" (built for {built_for})" if built_for else ""
    return (
        f"{artifact.format} engines{target} cannot be run by this version of edgeformer yet; "
        "use an ONNX artifact of the bundle"
    )


def default_provider() -> str:
    """CUDA where ONNX Runtime has it and a card is present, else the CPU."""
    from edgeformer.runtime.nvidia import gpus
    from edgeformer.runtime.onnx_session import CPU, CUDA, available_providers

    return CUDA if CUDA in available_providers() and gpus() else CPU


def _inside(bundle: Path, name: str) -> Path:
    path = bundle / name
    if not path.resolve().is_relative_to(bundle.resolve()):
        raise ArtifactError(f"{bundle / BUNDLE_FILE}: file {name!r} lies outside the bundle; the manifest is not safe")
    return path


def _check_file(path: Path, sha256: str | None, size_bytes: int | None) -> None:
    try:
        actual_bytes = path.stat().st_size
        actual = sha256_of(path) if sha256 is not None else None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}; {REMEDY}") from None
    if actual == sha256 and (sha256 is not None or size_bytes in (None, actual_bytes)):
        return
    if size_bytes is not None and actual_bytes < size_bytes:
        raise ArtifactError(f"{path}: truncated: {actual_bytes:,} of {size_bytes:,} bytes are there; {REMEDY}")
    raise ArtifactError(f"{path}: changed since it was exported (its sha256 differs from {BUNDLE_FILE}); {REMEDY}")
