"""The files of a bundle against its manifest: none outside the folder, none without a checksum, none changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.onnx_files import external_files
from edgeformer.formats.workspace import BUNDLE_FILE, REMEDY


class FileCheck(Frozen):
    """One file of a bundle against bundle.json."""

    file: str = Field(description="relative to the bundle")
    status: Literal["intact", "missing", "truncated", "changed", "unexpected"]
    detail: str | None = None


class BundleFiles:
    """Compares files with a manifest; each is hashed once.

    Args:
        folder: the bundle's.
        manifest: what should be there.
    """

    def __init__(self, folder: Path, manifest: BundleManifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._checks: dict[str, FileCheck] = {}

    @property
    def checksums(self) -> dict[str, str]:
        """Every file that the manifest vouches for, and its sha256."""
        artifacts = self._manifest.artifacts
        own = {a.file: a.sha256 for a in artifacts if a.file is not None and a.sha256 is not None}
        return {**self._manifest.files, **own}

    @property
    def fingerprint(self) -> str:
        """sha256 over names and checksums of those files: of what runs, whatever else the manifest says of it."""
        listed = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(self.checksums.items()))
        return hashlib.sha256(listed.encode()).hexdigest()

    def inspect(self, name: str) -> FileCheck:
        """Compare a file with the manifest.

        Args:
            name: relative to the bundle; a file that the manifest has no checksum of is ``unexpected``.

        Raises:
            ArtifactError: it lies outside the bundle.
        """
        if name not in self._checks:
            self._checks[name] = self._compare(name)
        return self._checks[name]

    def intact(self, name: str, need: str) -> Path:
        """A file's path, after it was compared with the manifest.

        Args:
            name: relative to the bundle.
            need: what it is for, for a message: "onnx-fp32 needs onnx/model.onnx".

        Raises:
            ArtifactError: it is missing, truncated, changed, not listed with a checksum, or outside the bundle.
        """
        path, check = self.path(name), self.inspect(name)
        if check.status == "intact":
            return path
        if check.status == "unexpected":
            raise ArtifactError(f"{self.folder / BUNDLE_FILE}: {need}, which is not listed with a checksum; {REMEDY}")
        what = {
            "missing": check.detail or "cannot be read: it is missing",
            "truncated": f"truncated: {check.detail}",
            "changed": f"changed since it was exported (its sha256 differs from {BUNDLE_FILE})",
        }
        raise ArtifactError(f"{path}: {what[check.status]}; {REMEDY}")

    def path(self, name: str) -> Path:
        """Where a file lies, unread. Raises ArtifactError for one outside the bundle."""
        pure, path = PurePosixPath(name), self.folder / name
        foreign = pure.is_absolute() or ".." in pure.parts or any(character in name for character in "\\:\0")
        if foreign or not path.resolve().is_relative_to(self.folder.resolve()):
            raise ArtifactError(
                f"{self.folder / BUNDLE_FILE}: names {name!r}, which lies outside the bundle; do not use it"
            )
        return path

    def needed_by(self, artifact: ArtifactManifest) -> list[str]:
        """Names of the files without which an artifact does not run, its own first."""
        own = [name for name in (artifact.file, artifact.weights_file, *artifact.parts.values()) if name is not None]
        beside = self._neighbours(artifact) if len(set(own)) == 1 else ()
        return list(dict.fromkeys((*own, *beside)))

    def check_weights(self, artifact: ArtifactManifest) -> None:
        """Whether the graphs of an artifact read listed files only; to be asked before a runtime opens them.

        Raises:
            ArtifactError: a graph names a file outside the bundle, or one that is missing, changed or not listed.
        """
        files = (str(artifact.file), *artifact.parts.values())
        # What a builder made for a runtime of its own can be an ONNX file, too.
        for graph in dict.fromkeys(name for name in files if artifact.is_graph or name.endswith(".onnx")):
            for location in sorted(external_files(self.path(graph))):
                name = (PurePosixPath(graph).parent / location).as_posix()
                # Its parent would bind "/x" and "C:x" to nothing, and drop "./", as the runtime may or may not.
                if PurePosixPath(location).as_posix() != location or not location:
                    raise ArtifactError(f"{self.folder / graph}: reads weights from {location!r}, no file name")
                self.path(name)
                self.intact(name, f"{graph} reads weights from {name}")

    def _compare(self, name: str) -> FileCheck:
        path, sha256 = self.path(name), self.checksums.get(name)
        if sha256 is None:
            return FileCheck(file=name, status="unexpected", detail=f"{BUNDLE_FILE} has no checksum of it")
        try:
            actual_bytes = path.stat().st_size
            if sha256_of(path) == sha256:
                return FileCheck(file=name, status="intact")
        except FileNotFoundError:
            return FileCheck(file=name, status="missing")
        except OSError as error:
            return FileCheck(file=name, status="missing", detail=f"cannot be read: {error.strerror}")
        size_bytes = self._size_of(name)
        if size_bytes is not None and actual_bytes < size_bytes:
            detail = f"{actual_bytes:,} of {size_bytes:,} bytes are there"
            return FileCheck(file=name, status="truncated", detail=detail)
        return FileCheck(file=name, status="changed", detail=f"its sha256 is not the one in {BUNDLE_FILE}")

    def _size_of(self, name: str) -> int | None:
        """Bytes of an artifact that is one file; a size that counts parts or weights beside it says nothing of it."""
        for artifact in self._manifest.artifacts:
            if artifact.file == name and not artifact.parts and artifact.weights_file is None:
                return artifact.size_bytes
        return None

    def _neighbours(self, artifact: ArtifactManifest) -> Iterator[str]:
        """The bundle's other files in the same folder: of an older bundle they may be weights. Parts are not."""
        folder = PurePosixPath(str(artifact.file)).parent
        parts = {part for other in self._manifest.artifacts for part in other.parts.values()}
        for name in self._manifest.files:
            if folder != PurePosixPath() and PurePosixPath(name).parent == folder and name not in parts:
                yield name
