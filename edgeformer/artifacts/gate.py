"""The JSON of `gate`: a candidate bundle compared with its baseline, check by check."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen

GateStatus = Literal["pass", "fail", "undecided", "unknown"]

UNDECIDED = 4
"""Exit code of a gate that could not decide. Not 0: a worse bundle must not pass because the machine was noisy, cannot
run it, or has no rows to score it on. Not 3, because the candidate is not at fault."""


class GateCheck(Frozen):
    """One figure of one artifact: the candidate's against the baseline's."""

    name: Literal["latency", "memory", "size", "score", "drift", "presence"]
    artifact: str
    status: GateStatus = Field(
        description="undecided: the machine is too noisy to say, cannot run the artifact, or there is nothing to "
        "compare; the reason says which. unknown: no longer written; earlier versions passed such checks"
    )
    phase: Literal["steady", "decode"] | None = Field(None, description="latency and memory: of a call or of a token")
    batch: int | None = None
    seq: int | None = None
    provider: str | None = Field(
        None, description="latency, memory and score: that computed both, where a runtime was named"
    )
    unit: str = ""
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = Field(None, description="(candidate - baseline) / baseline; of a score the difference")
    low: float | None = Field(
        None, description="latency: the change is at least this; holds with all other looks. score: the same, with 95 %"
    )
    high: float | None = Field(None, description="latency and score: the change is at most this")
    rows: int = Field(0, description="score: rows (embeddings: pairs) that both answered; 0: as export recorded it")
    found: Literal["slower", "faster", "no different", "not known"] | None = Field(
        None,
        description="latency: of the direction. no different: the whole range is within half of the limit, to either "
        "side; not known: it reaches further, and holds zero",
    )
    limit: float | None = Field(None, description="the largest change for the worse that is allowed")
    rounds: int = Field(0, description="latency: pairs of fresh processes that were measured")
    log_ratios: tuple[float, ...] = Field((), strict=False, description="latency: one per round, in their order")
    reason: str = ""


class Gate(Frozen):
    """All checks. `fail` if any fails, else `undecided` if any is, else `pass`."""

    format_version: Literal[1] = 1
    status: GateStatus
    candidate: str = Field(description="the bundle that is judged")
    baseline: str = Field(description="the bundle that it is held against")
    host: dict[str, Any]
    created: str
    seconds: float
    error: float = Field(description="chance that any interval misses, for all that was measured together")
    checks: tuple[GateCheck, ...] = Field(strict=False)
    notes: tuple[str, ...] = Field((), strict=False)

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed, 4 undecided."""
        return {"pass": 0, "fail": 3, "undecided": UNDECIDED, "unknown": UNDECIDED}[self.status]
