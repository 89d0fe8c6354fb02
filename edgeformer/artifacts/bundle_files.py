"""Integrity check of a bundle: every file must lie in the folder, be listed with a checksum and match it."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import as_json, sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Parity
from edgeformer.artifacts.scores import AnyScore
from edgeformer.artifacts.workspace import BUNDLE_FILE, REMEDY


class FileCheck(Frozen):
    """Result of comparing one file of a bundle with bundle.json."""

    file: str = Field(description="relative to the bundle")
    status: Literal["intact", "missing", "truncated", "changed", "unexpected"]
    detail: str | None = None


class BundleFiles:
    """Comparison of a bundle's files with its manifest; each file is hashed once."""

    def __init__(self, folder: Path, manifest: BundleManifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._checks: dict[str, FileCheck] = {}
        artifacts = {a.file: a.sha256 for a in manifest.artifacts if a.file is not None and a.sha256 is not None}
        self.checksums = {**manifest.files, **artifacts}  # file with a checksum in the manifest → sha256

    def inspect(self, name: str) -> FileCheck:
        """Compare a file with the manifest. Raises ArtifactError for one outside the bundle."""
        if name in self._checks:
            return self._checks[name]
        path, sha256 = self.path(name), self.checksums.get(name)
        # The size of an artifact includes its parts and external weights.
        single = (a for a in self._manifest.artifacts if not a.parts and a.weights_file is None)
        size_bytes = next((a.size_bytes for a in single if a.file == name and a.size_bytes is not None), 0)
        status: Literal["intact", "missing", "truncated", "changed", "unexpected"] = "intact"
        detail: str | None = None
        try:
            if sha256 is None:
                status, detail = "unexpected", f"{BUNDLE_FILE} lists no checksum for it"
            elif sha256_of(path) != sha256:
                status, detail = "changed", f"its sha256 differs from the one in {BUNDLE_FILE}"
                if (actual_bytes := path.stat().st_size) < size_bytes:
                    status, detail = "truncated", f"{actual_bytes:,} of {size_bytes:,} bytes"
        except OSError as error:
            status = "missing"
            detail = None if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        self._checks[name] = FileCheck(file=name, status=status, detail=detail)
        return self._checks[name]

    def intact(self, name: str, need: str) -> Path:
        """Compare a file with the manifest, and return its path.

        Raises ArtifactError, with ``need`` ("onnx-fp32 needs onnx/model.onnx"), if it is not intact.
        """
        path, check = self.path(name), self.inspect(name)
        if check.status == "intact":
            return path
        if check.status == "unexpected":
            raise ArtifactError(f"{self.folder / BUNDLE_FILE}: {need}, which is not listed with a checksum; {REMEDY}")
        messages = {
            "missing": check.detail or "cannot be read: the file is missing",
            "truncated": f"truncated: {check.detail}",
            "changed": f"changed since it was exported (its sha256 differs from {BUNDLE_FILE})",
        }
        raise ArtifactError(f"{path}: {messages[check.status]}; {REMEDY}")

    def path(self, name: str) -> Path:
        """Return the path of a file without reading it. Raises ArtifactError for one outside the bundle."""
        pure, path = PurePosixPath(name), self.folder / name
        foreign = pure.is_absolute() or ".." in pure.parts or any(character in name for character in "\\:\0")
        if foreign or not path.resolve().is_relative_to(self.folder.resolve()):
            raise ArtifactError(
                f"{self.folder / BUNDLE_FILE}: names the file {name!r} outside the bundle; do not use this bundle"
            )
        return path

    def needed_by(self, artifact: ArtifactManifest) -> list[str]:
        """Return the names of the files that an artifact needs to run, its own file first."""
        names = [name for name in (artifact.file, artifact.weights_file, *artifact.parts.values()) if name is not None]
        folder = PurePosixPath(str(artifact.file)).parent
        if len(set(names)) == 1 and folder != PurePosixPath():
            # In an older bundle, other files in the same folder may be its weights, unless they are parts.
            parts = {part for entry in self._manifest.artifacts for part in entry.parts.values()}
            files = (name for name in self._manifest.files if PurePosixPath(name).parent == folder)
            names += [name for name in files if name not in parts]
        return list(dict.fromkeys(names))


TARGETS_FILE = "targets.json"
"""File beside bundle.json: results of ``verify --write`` on the target for engines that export could not run.

Each record carries the checksums of the artifact's files, so it does not apply to another artifact or to a rebuilt
engine. The signature detects a damaged, edited or moved record; it does not identify its author.
"""
REMEASURE = "run edgeformer verify --write on the target"
_SHOWN = 12  # digits of a checksum in a message


class TargetRecord(Frozen):
    """Result of verifying one artifact on one target."""

    artifact: str
    artifact_sha256: str = Field(description="sha256 of its file, or over the checksums of all files that it needs")
    device: str = Field(description="name of the device that computed, e.g. the card")
    compute_capability: str | None = Field(None, description="compute capability of an NVIDIA card")
    runtime: dict[str, str] = Field(description="package or driver → version")
    recorded: str
    code_version: str
    status: Literal["verified", "failed"]
    reason: str | None = Field(None, description="reason of a failure")
    parity: Parity
    score: AnyScore | None = Field(None, description="score on the golden inputs")
    validation: AnyScore | None = Field(None, description="score on the validation rows that export uses")
    unscored: str | None = Field(None, description="reason for no score on the validation split")
    signature: str = Field("", description="sha256 of this record with an empty signature")

    def signed(self) -> Self:
        """Return a copy with its signature."""
        unsigned = as_json(self.model_copy(update={"signature": ""}))
        return self.model_copy(update={"signature": hashlib.sha256(unsigned.encode()).hexdigest()})

    def why_refused(self, manifest: BundleManifest) -> str | None:
        """Return why the record cannot be used for the bundle's artifact, or None if it can."""
        subject = f"{TARGETS_FILE}: the record of {self.artifact} on {self.device}"
        if self != self.signed():
            return f"{subject} was changed since it was written and is ignored; {REMEASURE}"
        current = next((entry for entry in manifest.artifacts if entry.id == self.artifact), None)
        if current is None or current.status != "built":
            return f"{subject} is ignored: the bundle has no such artifact"
        sha256 = files_sha256(current, manifest.files)
        if sha256 != self.artifact_sha256:
            return (
                f"{subject} is ignored, because the artifact was replaced or built again since (its sha256 was "
                f"{self.artifact_sha256[:_SHOWN]}… and is {str(sha256)[:_SHOWN]}…); {REMEASURE}"
            )
        return None


class TargetRecords(Frozen):
    """Contents of targets.json."""

    format_version: Literal[1] = 1
    records: tuple[TargetRecord, ...] = ()

    def with_new(self, new_records: Iterable[TargetRecord]) -> Self:
        """Return a copy with ``new_records``; each replaces an older record of the same artifact and device."""
        by_key = {(record.artifact, record.device): record for record in (*self.records, *new_records)}
        return self.model_copy(update={"records": tuple(by_key.values())})

    def of(self, manifest: BundleManifest) -> Self:
        """Return a copy with only the records that hold for the bundle's artifacts."""
        kept = tuple(record for record in self.records if record.why_refused(manifest) is None)
        return self.model_copy(update={"records": kept})

    def completing(self, manifest: BundleManifest, device: str | None = None) -> dict[str, TargetRecord]:
        """Return artifact → record for the artifacts whose outputs export could not compare.

        ``device``: part of the requested device's name; a record of that device precedes newer ones.
        """
        open_ = {entry.id for entry in manifest.artifacts if lacks_parity(entry)}
        matches = sorted(
            (record for record in self.of(manifest).records if record.artifact in open_),
            key=lambda record: (device is not None and device.lower() in record.device.lower(), record.recorded),
        )
        return {record.artifact: record for record in matches}


def lacks_parity(artifact: ArtifactManifest) -> bool:
    """Return whether an artifact was built but not compared at export; ``verify`` on its target compares it."""
    parity = artifact.parity
    return artifact.status == "built" and parity is not None and parity.status == "unavailable"


def files_sha256(artifact: ArtifactManifest, files: Mapping[str, str]) -> str | None:
    """Return the sha256 over an artifact's files, by the bundle's ``files`` (name → sha256); None: no checksum."""
    companions = {artifact.weights_file, *artifact.parts.values()} - {artifact.file, None}
    sums = [f"{name} {files.get(str(name))}" for name in sorted(map(str, companions))]
    if artifact.sha256 is None or not sums:
        return artifact.sha256
    return hashlib.sha256("\n".join([artifact.sha256, *sums]).encode()).hexdigest()


def completed(manifest: BundleManifest, records: Mapping[str, TargetRecord]) -> BundleManifest:
    """Return the manifest with the records' results; an artifact that failed on its target is rejected."""
    artifacts = []
    for artifact in manifest.artifacts:
        if (record := records.get(artifact.id)) is not None:
            update = {"parity": record.parity, "score": record.score, "validation": record.validation}
            failed = {"status": "rejected", "reason": f"on {record.device}: {record.reason}"}
            artifact = artifact.model_copy(update=update | (failed if record.status == "failed" else {}))
        artifacts.append(artifact)
    return manifest.model_copy(update={"artifacts": tuple(artifacts)})
