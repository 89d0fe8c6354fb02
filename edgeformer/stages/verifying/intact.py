"""Every file of a bundle against the checksums in bundle.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.progress import Progress
from edgeformer.formats.verification import FileCheck
from edgeformer.formats.workspace import BUNDLE_FILE, REPORTS_FOLDER


def check_files(bundle: Path, manifest: BundleManifest, progress: Progress) -> tuple[FileCheck, ...]:
    """Hash all files that bundle.json names, and look for others.

    Hidden files and folders (``.git``, ``.DS_Store``) are passed over: tools leave them, and nothing opens them. So are
    the reports that ``profile`` writes into a bundle that was copied without its run.

    Raises:
        ArtifactError: bundle.json names a file outside the bundle.
    """
    expected = dict(manifest.files)
    sizes: dict[str, int] = {}
    for artifact in manifest.artifacts:
        if artifact.file is not None and artifact.sha256 is not None:
            expected[artifact.file] = artifact.sha256
            # A size that counts parts or weights beside the file says nothing of the file itself.
            if artifact.size_bytes is not None and not artifact.parts and artifact.weights_file is None:
                sizes[artifact.file] = artifact.size_bytes
    for name in expected:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise ArtifactError(f"{bundle / BUNDLE_FILE}: names {name!r}, which lies outside the bundle; do not use it")
    progress.start("Checking files", len(expected), "files")
    checks = []
    try:
        for name in sorted(expected):
            checks.append(_check(bundle, name, expected[name], sizes.get(name)))
            progress.advance()
    finally:
        progress.finish()
    found = {path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file()}
    others = [path for path in found if path.parts[0] != REPORTS_FOLDER]
    extra = sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))
    unexpected = [name for name in extra if name not in expected and name != BUNDLE_FILE]
    return (*checks, *(FileCheck(file=name, status="unexpected", detail="not in bundle.json") for name in unexpected))


def files_of(artifact: ArtifactManifest) -> set[str]:
    """Names of the files without which the artifact does not run."""
    named = {artifact.file, artifact.weights_file, *artifact.parts.values()}
    return {name for name in named if name is not None}


def first_problem(names: set[str], checks: Sequence[FileCheck]) -> str | None:
    """What is wrong with one of these files; None when nothing is."""
    for check in checks:
        if check.file in names and check.status != "intact":
            return f"{check.file} is {check.status}" + (f" ({check.detail})" if check.detail else "")
    return None


def _check(bundle: Path, name: str, sha256: str, size_bytes: int | None) -> FileCheck:
    path = bundle / name
    try:
        actual_bytes = path.stat().st_size
        if sha256_of(path) == sha256:
            return FileCheck(file=name, status="intact")
    except FileNotFoundError:
        return FileCheck(file=name, status="missing")
    except OSError as error:
        return FileCheck(file=name, status="missing", detail=f"cannot be read: {error.strerror}")
    if size_bytes is not None and actual_bytes < size_bytes:
        return FileCheck(file=name, status="truncated", detail=f"{actual_bytes:,} of {size_bytes:,} bytes are there")
    return FileCheck(file=name, status="changed", detail="its sha256 is not the one in bundle.json")
