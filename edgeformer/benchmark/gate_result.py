"""JSON of `gate`: the checks of a candidate against its baseline."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Phase

GateStatus = Literal["pass", "fail", "undecided", "unknown"]

UNDECIDED = 4
"""Exit code of a gate that could not decide. Not 0: a worse bundle must not pass because the machine was noisy, cannot
run it, or has no rows to score it on. Not 3, because the candidate is not at fault."""


class GateCheck(Frozen):
    """Comparison of one metric of one artifact between candidate and baseline."""

    name: Literal["latency", "memory", "size", "score", "drift", "presence"]
    artifact: str
    status: GateStatus = Field(
        description="undecided: the machine is too noisy, it cannot run the artifact, or there is nothing to "
        "compare; the reason says which. unknown: no longer written; earlier versions passed such checks"
    )
    phase: Phase | None = Field(None, description="latency and memory: per call or per token")
    batch: int | None = None
    seq: int | None = None
    provider: str | None = Field(None, description="latency, memory and score: runtime of both, if one was chosen")
    unit: str = ""
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = Field(None, description="(candidate - baseline) / baseline; scores: the difference")
    low: float | None = Field(None, description="lower bound of the change: latency over all looks, score with 95%")
    high: float | None = Field(None, description="latency and score: upper bound of the change")
    rows: int = Field(0, description="score: rows (embeddings: pairs) scored with both; 0: scores recorded by export")
    found: Literal["slower", "faster", "no different", "not known"] | None = Field(
        None, description="latency. no different: the interval is within half of the limit; not known: it is wider"
    )
    limit: float | None = Field(None, description="largest allowed change for the worse")
    rounds: int = Field(0, description="latency: pairs of fresh processes that were measured")
    log_ratios: tuple[float, ...] = Field((), description="latency: one per round, in order")
    reason: str = ""


class Gate(Frozen):
    """JSON of `gate`. `fail` if any check fails, else `undecided` if any is, else `pass`."""

    format_version: Literal[1] = 1
    status: GateStatus
    candidate: str = Field(description="bundle under test")
    baseline: str = Field(description="bundle that it is compared with")
    host: dict[str, Any]
    created: str
    seconds: float
    error: float = Field(description="family-wise error: probability that any of all intervals misses")
    checks: tuple[GateCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code: 0 passed, 3 failed, 4 undecided."""
        return {"pass": 0, "fail": 3, "undecided": UNDECIDED, "unknown": UNDECIDED}[self.status]
