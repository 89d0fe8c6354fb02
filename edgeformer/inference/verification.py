"""JSON of `verify`: the result for every file and artifact of a bundle."""

from typing import Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.bundle_files import FileCheck, TargetRecord
from edgeformer.artifacts.manifest import Parity, Precision, Role

DAMAGED, INCOMPLETE = 2, 3
"""Exit codes: a file differs from the export; an artifact fails parity or could not be checked."""


class ArtifactCheck(Frozen):
    """Result of running one artifact on the golden inputs on this machine."""

    artifact: str
    role: Role
    precision: Precision
    status: Literal["verified", "failed", "damaged", "unavailable"] = Field(
        description="failed: outside the tolerance; damaged: one of its files is damaged, or it does not load; "
        "unavailable: it cannot run here, or was not built"
    )
    reason: str | None = None
    parity: Parity | None = Field(None, description="parity with torch FP32, measured on this machine")
    tolerance: str | None = Field(None, description="tolerance that was applied")
    notes: tuple[str, ...] = Field((), description="warnings of its portability audit, and why memory was not measured")
    resident_bytes: int | None = Field(None, description="memory measured on this machine, as at export")
    resident_ratio: float | None = Field(None, description="`resident_bytes` over the weights' bytes, each stored once")


class Recorded(Frozen):
    """Result of `verify --write`."""

    file: str | None = Field(description="the bundle's targets.json; None: nothing was written")
    reason: str | None = Field(None, description="reason why nothing was written")
    records: tuple[TargetRecord, ...] = ()


class Verification(Frozen):
    """JSON of `verify`: the result for every file and artifact of a bundle."""

    bundle: str
    run: str
    manifest_sha256: str = Field(description="sha256 of bundle.json; only its origin can confirm it")
    wrapped: str | None = Field(None, description="the ONNX file that was imported; None: exported from a run")
    manifest_protected: bool = Field(description="bundle.json has a checksum of itself, and it matches")
    files: tuple[FileCheck, ...]
    artifacts: tuple[ArtifactCheck, ...]
    asked: bool = Field(description="the user chose an artifact or a runtime")
    stale: tuple[str, ...] = Field((), description="unusable records of targets.json, with the reason")
    recorded: Recorded | None = Field(None, description="result of `--write`, if given")

    @property
    def damaged(self) -> tuple[FileCheck, ...]:
        """Files that differ from the export."""
        return tuple(check for check in self.files if check.status != "intact")

    @property
    def exit_code(self) -> int:
        """Exit code: 0 verified, 2 damaged or tampered with, 3 parity failed or a requested check was impossible."""
        statuses = {check.status for check in self.artifacts}
        if self.damaged or "damaged" in statuses:
            return DAMAGED
        # An engine for another card does not fail here; a bundle of which nothing ran is not verified.
        unchecked = statuses != {"verified"} if self.asked else "verified" not in statuses
        return INCOMPLETE if "failed" in statuses or unchecked else 0
