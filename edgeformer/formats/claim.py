"""A claim: a report, what it was measured on and with, in one file that another machine measures again; and what that
machine found."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.device import DeviceProfile

CaseStatus = Literal["confirmed", "contradicted", "undecided", "not comparable"]

CONTRADICTED, UNDECIDED = 3, 4
"""Exit codes, as a gate's: a figure does not hold here; or nothing contradicts the claim, but too little could be said:
measure again, or on a machine of the claimed kind."""


class Environment(Frozen):
    """What the report was measured on and with, as far as it is known."""

    host: dict[str, Any] = Field(description="system, processor, cores, memory, GPU, versions: as in the report")
    threads: tuple[int, ...] = Field(strict=False, description="of one operator, of all measured rows")
    power: tuple[str, ...] = Field((), strict=False, description="battery or mains, as the rows say it")
    governor: tuple[str, ...] = Field((), strict=False, description="of the processor's frequency, as the rows say it")
    cpu_flags: tuple[str, ...] | None = Field(
        None, strict=False, description="instructions that decide kernels; None: the claim was not made on this host"
    )
    code_version: str | None = Field(None, description="of edgeformer; None: the claim was not made on this host")


class Claim(Frozen):
    """claim.json: what a claim's file holds, beside the report and the bundle's manifest."""

    format_version: Literal[1] = 1
    created: str
    run: str
    device: str = Field(description="profile that the report judges for")
    members: dict[str, str] = Field(description="every other file inside → sha256: the report, bundle.json, …")
    whole_bundle: bool = Field(description="all of the bundle is inside; else its manifest with all checksums")
    environment: Environment
    profile: DeviceProfile | None = Field(
        None, description="the calibrated profile of that machine, with its measured facts; None: it has none"
    )


class ClaimCase(Frozen):
    """One measured row of the claim, measured again here."""

    artifact: str
    provider: str
    phase: Literal["steady", "decode"]
    batch: int
    seq: int
    threads: int | None = None
    status: CaseStatus
    claimed_ms: float
    here_ms: float | None = Field(None, description="median over the rounds")
    change: float | None = Field(None, description="(here - claimed) / claimed")
    low: float | None = Field(None, description="the change is at least this; holds together with all other looks")
    high: float | None = Field(None, description="the change is at most this")
    slowness: float | None = Field(
        None, description="how many times as slow this processor was, by a product and a copy that both timed beside it"
    )
    rounds: int = Field(0, description="fresh processes that were measured, in turn with those of the other cases")
    reason: str = ""


class ClaimVerification(Frozen):
    """What `verify-claim` found: the file is whole and agrees with itself, and per row, whether its time holds here."""

    format_version: Literal[1] = 1
    claim: str
    sha256: str = Field(description="of the claim's file, which ends with it")
    run: str
    device: str
    claimed_on: str = Field(description="processor, and card")
    host: dict[str, Any] = Field(description="this machine")
    created: str
    seconds: float
    tolerance: float = Field(description="a time holds that is off by less, as a share")
    error: float = Field(description="chance that any interval misses, for all cases together")
    measured: bool = Field(description="whether anything was to be measured here")
    bundle: str | None = Field(description="that was measured; None: none is at hand")
    cases: tuple[ClaimCase, ...] = Field(strict=False)
    not_again: dict[str, int] = Field(
        default_factory=dict,
        description="figures that the report states and that are never measured again → of how many rows",
    )
    notes: tuple[str, ...] = Field((), strict=False)

    @property
    def exit_code(self) -> int:
        """0 what can be compared holds, 3 something is contradicted, 4 nothing is, but too little could be said.

        A time that was measured here, does not hold, and is excused leaves the claim open: it was not confirmed.
        """
        found = {case.status for case in self.cases}
        if "contradicted" in found:
            return CONTRADICTED
        excused = any(case.status == "not comparable" and case.rounds for case in self.cases)
        settled = "confirmed" in found and "undecided" not in found and not excused
        return 0 if settled or not self.measured else UNDECIDED
