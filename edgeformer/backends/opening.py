"""From a bundle's manifest entry to an open Session: is it the file that was exported, can it run here?"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from edgeformer.backends import ArtifactFiles, OpenOptions, backend_of, cannot_run
from edgeformer.backends.decoder import Decoder
from edgeformer.backends.session import Early, Session
from edgeformer.bundle import read_bundle
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.workspace import BUNDLE_FILE

__all__ = [
    "artifact_files", "cannot_run", "check_artifact", "check_companion", "loops_of", "open_artifact", "open_checked",
    "open_checked_decoder", "open_decoder",
]  # fmt: skip

REMEDY = "export the run again, or copy the whole bundle again"


def open_artifact(
    bundle: Path,
    artifact: ArtifactManifest,
    provider: str | None = None,
    threads: int | None = None,
    early: Early | None = None,
) -> Session:
    """Check the artifact's file against the manifest, then open it.

    Args:
        bundle: the bundle's folder.
        artifact: one of the artifacts of its manifest.
        provider: an ONNX Runtime execution provider; None takes the backend's choice. Engines have none.
        threads: threads of one operator; None takes what this process may use.
        early: when rows leave a classifier's step bundle; see ``StepSession``.

    Raises:
        ArtifactError: nothing was built, or the file is missing, truncated, changed or not runnable.
        InputError: the provider is not available here, or rows cannot leave this artifact early.
        MissingDependencyError: the format needs a runtime that is not here.
    """
    manifest = read_bundle(bundle)
    path = check_artifact(bundle, manifest, artifact)
    return open_checked(path, artifact, manifest.max_positions, provider, threads, early)


def check_artifact(bundle: Path, manifest: BundleManifest, artifact: ArtifactManifest) -> Path:
    """The artifact's file, after its bytes (and the weights files beside it) were compared with the manifest.

    Raises:
        ArtifactError: nothing was built, or a file is missing, truncated or changed.
    """
    if artifact.status != "built" or artifact.file is None:
        reason = f": {artifact.reason}" if artifact.reason else ""
        raise ArtifactError(f"{bundle}: artifact {artifact.id!r} was not built ({artifact.status}{reason})")
    path = _inside(bundle, artifact.file)
    beside = [name for name in (*artifact.parts.values(), artifact.weights_file) if name not in (None, artifact.file)]
    # Where parts or weights lie beside the file, the size is that of all together.
    _check_file(path, artifact.sha256, None if beside else artifact.size_bytes)
    for name in beside or _neighbours(artifact.file, manifest):
        assert name is not None
        if name not in manifest.files:
            raise ArtifactError(f"{bundle / BUNDLE_FILE}: {artifact.id} needs {name}, which is not listed; {REMEDY}")
        _check_file(_inside(bundle, name), manifest.files[name], None)
    return path


def _neighbours(file: str, manifest: BundleManifest) -> list[str]:
    """The bundle's other files in the same folder: of an older bundle they may be weights. Parts of others are not."""
    folder = Path(file).parent
    parts = {part for artifact in manifest.artifacts for part in artifact.parts.values()}
    beside = [name for name in manifest.files if folder != Path() and Path(name).parent == folder]
    return [name for name in beside if name not in parts]


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
    early: Early | None = None,
) -> Session:
    """Open a file that :func:`check_artifact` has passed, and its parts. Raises what :func:`open_artifact` raises."""
    files = artifact_files(path, artifact, max_positions)
    return backend_of(artifact).open(files, OpenOptions(provider, threads, early))


def artifact_files(path: Path, artifact: ArtifactManifest, max_positions: int | None) -> ArtifactFiles:
    """What a backend needs to open a file that :func:`check_artifact` has passed.

    Args:
        path: the file.
        artifact: its entry in the manifest.
        max_positions: of the bundle.
    """
    if artifact.role != "step":
        return ArtifactFiles(artifact, path, max_positions=max_positions)
    bundle = _bundle_of(path, artifact)
    loops = loops_of(bundle, read_bundle(bundle))
    return ArtifactFiles(artifact, path, _parts(bundle, artifact), loops, max_positions)


def open_decoder(
    bundle: Path,
    artifact: ArtifactManifest,
    exits: Collection[int],
    provider: str | None = None,
    threads: int | None = None,
) -> Decoder[Any]:
    """Check a language model's step or decode artifact against the manifest, then open it to write token by token.

    Args:
        exits: loops that will be asked for logits; a decode artifact answers after the last one only.

    Raises:
        ArtifactError: nothing was built, or a file is missing, truncated, changed or not runnable.
        InputError: this artifact does not write, or not from these exits; the provider is not available here.
    """
    manifest = read_bundle(bundle)
    if artifact.role not in ("step", "decode") or not manifest.exits:
        raise InputError(f"{bundle}: artifact {artifact.id!r} keeps nothing of earlier tokens, so it cannot write")
    loops = manifest.exits[-1]
    if artifact.role == "decode" and set(exits) != {loops}:
        raise InputError(f"{bundle}: artifact {artifact.id!r} always runs all {loops} loops; use a step artifact")
    return open_checked_decoder(check_artifact(bundle, manifest, artifact), artifact, exits, provider, threads)


def open_checked_decoder(
    path: Path,
    artifact: ArtifactManifest,
    exits: Collection[int] | None = None,
    provider: str | None = None,
    threads: int | None = None,
) -> Decoder[Any]:
    """The same for a file that :func:`check_artifact` has passed; ``exits`` None: the last loop only."""
    manifest = read_bundle(_bundle_of(path, artifact))
    files = artifact_files(path, artifact, manifest.max_positions)
    return backend_of(artifact).open_decoder(files, exits, OpenOptions(provider, threads))


def _bundle_of(path: Path, artifact: ArtifactManifest) -> Path:
    """The bundle's folder, from the place of the artifact's file in it."""
    assert artifact.file is not None
    return path.parents[len(PurePosixPath(artifact.file).parts) - 1]


def _parts(bundle: Path, artifact: ArtifactManifest) -> dict[str, Path]:
    return {part: _inside(bundle, name) for part, name in artifact.parts.items()}


def loops_of(bundle: Path, manifest: BundleManifest) -> int:
    """How often a step bundle's loop graph is run: to a language model's last exit, or a classifier's iterations.

    Raises:
        ArtifactError: the bundle's configuration is missing or damaged.
    """
    if manifest.exits:
        return manifest.exits[-1]
    path = check_companion(bundle, manifest, "config.json")
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["iterations"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged (iterations: {error}); {REMEDY}") from None


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
