"""The JSON of `verify` that scripts rely on: every file and artifact of a bundle, checked."""

from typing import Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.bundle_files import FileCheck, TargetRecord
from edgeformer.artifacts.manifest import Parity, Precision

DAMAGED, INCOMPLETE = 2, 3
"""Exit codes: a file is not what was exported; or an artifact computes something else, or could not be checked."""


class ArtifactCheck(Frozen):
    """One artifact, run here on the golden inputs."""

    artifact: str
    role: Literal["full", "exit", "step", "decode"]
    precision: Precision
    status: Literal["verified", "failed", "damaged", "unavailable"] = Field(
        description="failed: outside the tolerance; damaged: a file of it is, or it does not open; unavailable: it "
        "cannot run here, or was not built"
    )
    reason: str | None = None
    parity: Parity | None = Field(None, description="with torch FP32, measured here")
    tolerance: str | None = Field(None, description="what it was held to")
    notes: tuple[str, ...] = Field((), strict=False, description="what its portability audit says of this machine")


class Recorded(Frozen):
    """What `--write` wrote."""

    file: str | None = Field(description="the bundle's targets.json; None: nothing was written")
    reason: str | None = Field(None, description="why nothing was")
    records: tuple[TargetRecord, ...] = Field((), strict=False)


class Verification(Frozen):
    """The whole bundle."""

    bundle: str
    run: str
    manifest_sha256: str = Field(
        description="of bundle.json as it is; that it is the origin's, only the origin can tell"
    )
    wrapped: str | None = Field(None, description="the ONNX file that the bundle was made of; None: of a run")
    manifest_protected: bool = Field(description="bundle.json has a checksum of itself, and is what that says")
    files: tuple[FileCheck, ...] = Field(strict=False)
    artifacts: tuple[ArtifactCheck, ...] = Field(strict=False)
    asked: bool = Field(description="one artifact was asked for by name")
    stale: tuple[str, ...] = Field((), strict=False, description="records of targets.json that say nothing, and why")
    recorded: Recorded | None = Field(None, description="with `--write`")

    @property
    def damaged(self) -> tuple[FileCheck, ...]:
        """Files that are not what was exported."""
        return tuple(check for check in self.files if check.status != "intact")

    @property
    def exit_code(self) -> int:
        """0 fine, 2 damaged or tampered with, 3 parity failed or what was asked for could not be checked."""
        statuses = {check.status for check in self.artifacts}
        if self.damaged or "damaged" in statuses:
            return DAMAGED
        # An engine for another card is no failure of this machine; a bundle of which nothing ran is not verified.
        unchecked = statuses != {"verified"} if self.asked else "verified" not in statuses
        return INCOMPLETE if "failed" in statuses or unchecked else 0
