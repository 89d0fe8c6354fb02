"""targets.json, beside bundle.json: what the machines that its engines are for found of them.

bundle.json is the exporting machine's, and no other writes it again. An engine that could not run where it was exported
is compared and scored on its target, by ``verify --write``; each finding is signed with the checksums of the artifact's
files, so that it says nothing of another artifact, or of an engine that was built again. The signature is a checksum:
it tells a record that was damaged, edited or moved, and nothing of who wrote it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field
from typing_extensions import Self

from edgeformer.formats.base import Frozen
from edgeformer.formats.files import as_json
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest, Parity
from edgeformer.formats.scores import AnyScore

TARGETS_FILE = "targets.json"
REMEASURE = "run edgeformer verify --write on the target"
_SHOWN = 12  # digits of a checksum in a message


class TargetRecord(Frozen):
    """What one machine found of one artifact."""

    artifact: str
    artifact_sha256: str = Field(description="of its file, or over those of all files that it runs from")
    device: str = Field(description="what computed: the card's name")
    compute_capability: str | None = Field(None, description="of an NVIDIA card")
    runtime: dict[str, str] = Field(description="package, driver → version")
    recorded: str
    code_version: str
    status: Literal["verified", "failed"]
    reason: str | None = Field(None, description="why it failed")
    parity: Parity
    score: AnyScore | None = Field(None, description="on the golden inputs")
    validation: AnyScore | None = Field(None, description="on the rows of the validation split that export scores on")
    unscored: str | None = Field(None, description="why there is no score on the validation split")
    signature: str = Field("", description="sha256 of this record with an empty signature")

    def signed(self) -> Self:
        """The same with its signature."""
        return self.model_copy(update={"signature": self._sum()})

    def why_refused(self, manifest: BundleManifest) -> str | None:
        """Why it says nothing of the bundle's artifact; None: it does."""
        told = f"{TARGETS_FILE}: the record of {self.artifact} on {self.device}"
        if self.signature != self._sum():
            return f"{told} was changed since it was written, so it is not used: {REMEASURE}"
        held = next((entry for entry in manifest.artifacts if entry.id == self.artifact), None)
        if held is None or held.status != "built":
            return f"{told} is stale: the bundle holds no such artifact (any more)"
        sha256 = files_sha256(held, manifest.files)
        if sha256 != self.artifact_sha256:
            return (
                f"{told} is stale: it is of a file with the sha256 {self.artifact_sha256[:_SHOWN]}…, and the bundle's "
                f"has {str(sha256)[:_SHOWN]}…: another artifact, or built again; {REMEASURE}"
            )
        return None

    def _sum(self) -> str:
        return hashlib.sha256(as_json(self.model_copy(update={"signature": ""})).encode()).hexdigest()


class TargetRecords(Frozen):
    """targets.json."""

    format_version: Literal[1] = 1
    records: tuple[TargetRecord, ...] = Field((), strict=False)

    def with_new(self, found: Iterable[TargetRecord]) -> Self:
        """The same with these; each takes the place of what the same device found of the same artifact before."""
        known = {(record.artifact, record.device): record for record in (*self.records, *found)}
        return self.model_copy(update={"records": tuple(known.values())})

    def of(self, manifest: BundleManifest) -> Self:
        """Only those that say something of the bundle's artifacts."""
        kept = tuple(record for record in self.records if record.why_refused(manifest) is None)
        return self.model_copy(update={"records": kept})

    def completing(self, manifest: BundleManifest, device: str | None = None) -> dict[str, TargetRecord]:
        """Artifact that export did not compare → what a target found of it.

        Args:
            device: a part of the name of the device that is asked about: its own record goes before newer ones.
        """
        open_ = {entry.id for entry in manifest.artifacts if lacks_parity(entry)}
        found = sorted(
            (record for record in self.of(manifest).records if record.artifact in open_),
            key=lambda record: (device is not None and device.lower() in record.device.lower(), record.recorded),
        )
        return {record.artifact: record for record in found}


def lacks_parity(artifact: ArtifactManifest) -> bool:
    """Whether an artifact was built, and left to its target to compare."""
    parity = artifact.parity
    return artifact.status == "built" and parity is not None and parity.status == "unavailable"


def files_sha256(artifact: ArtifactManifest, files: Mapping[str, str]) -> str | None:
    """What an artifact's records are signed with; None: the manifest does not list its file with a checksum.

    Args:
        artifact: of the bundle.
        files: the bundle's other files → sha256: parts and weights are among them.
    """
    beside = {artifact.weights_file, *artifact.parts.values()} - {artifact.file, None}
    sums = [f"{name} {files.get(str(name))}" for name in sorted(map(str, beside))]
    if artifact.sha256 is None or not sums:
        return artifact.sha256
    return hashlib.sha256("\n".join([artifact.sha256, *sums]).encode()).hexdigest()


def completed(manifest: BundleManifest, records: Mapping[str, TargetRecord]) -> BundleManifest:
    """The manifest as it would be if export had run on those targets; an artifact that failed there is rejected."""

    def entry(artifact: ArtifactManifest) -> ArtifactManifest:
        record = records.get(artifact.id)
        if record is None:
            return artifact
        known = {name: getattr(record, name) for name in ("parity", "score", "validation")}
        failed = {"status": "rejected", "reason": f"on {record.device}: {record.reason}"}
        return artifact.model_copy(update=known | (failed if record.status == "failed" else {}))

    return manifest.model_copy(update={"artifacts": tuple(map(entry, manifest.artifacts))})
