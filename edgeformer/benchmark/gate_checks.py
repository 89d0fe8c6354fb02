"""Options of the gate, and its checks of memory, size and drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from edgeformer.artifacts.gate import GateCheck, GateStatus
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Memory
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.sequential import ERROR

_LEAST_BYTES = 2 * 2**20
_DRIFT_FACTOR, _DRIFT_SHARE = 2.0, 0.1
"""A drift is worse that is twice the baseline's; below a tenth of the tolerance it is rounding, and of no account."""


@dataclass(frozen=True)
class GateOptions:
    """What a candidate may be worse by than its baseline. A limit of None: the check is not made.

    Attributes:
        max_slowdown: of the typical call, as a share of the baseline's.
        max_memory_growth: of the peak, as a share.
        max_size_growth: of the file, as a share.
        max_score_loss: in the metric's own unit where it is a share (0.01 of accuracy is a point), else as a share.
        eval_data: labelled file that both are scored on; None: the baseline's own held-out rows.
        longest_s: of measuring one artifact at one shape.
        error: the chance that any interval of the run misses.
        rules: of the warm-up; None: the usual ones, cut off where a process does not settle.
    """

    max_slowdown: float = 0.05
    max_memory_growth: float | None = 0.10
    max_size_growth: float | None = 0.05
    max_score_loss: float | None = 0.01
    eval_data: Path | None = None
    longest_s: float = 180.0
    error: float = ERROR
    rules: MeasureRules | None = None


@dataclass(frozen=True)
class ArtifactPair:
    """An artifact in the two bundles."""

    baseline: ArtifactManifest
    candidate: ArtifactManifest


@dataclass(frozen=True)
class SidePeak:
    """The memory of one of the two.

    Attributes:
        median: bytes, over the rounds' peaks; None: not known.
        method: what told them, or why nothing did.
        provider: what computed.
    """

    median: float | None
    method: str
    provider: str

    @classmethod
    def of(cls, rounds: Sequence[Memory], provider: str) -> SidePeak:
        """That of the rounds' processes, which are told in the same way."""
        peaks = [memory.peak for memory in rounds if memory.peak is not None]
        how = next((memory.method or memory.reason for memory in rounds), None)
        return cls(median(peaks) if peaks else None, how or "no round was measured", provider)


def _against(
    name: str, both: ArtifactPair, limit: float, figures: tuple[float | None, float | None], unit: str
) -> GateCheck:
    """A figure that may grow by a share.

    Args:
        name: of the check.
        both: whose figure it is.
        limit: the largest growth that is allowed.
        figures: the baseline's and the candidate's; None: not known.
        unit: of both.
    """
    before, after = figures
    known = {"name": name, "artifact": both.candidate.id, "unit": unit, "limit": limit}
    known |= {"baseline": before, "candidate": after}
    if not before or after is None:
        return GateCheck.model_validate({**known, "status": "undecided", "reason": "not known of both"})
    change = (after - before) / before
    return GateCheck.model_validate({**known, "change": change, "status": "fail" if change > limit else "pass"})


def memory_check(both: ArtifactPair, most: float, peaks: tuple[SidePeak, SidePeak]) -> GateCheck:
    """The median peaks of baseline and candidate, where they are of one kind of memory.

    Args:
        both: whose peaks they are.
        most: the largest growth that is allowed, as a share.
        peaks: of the two.
    """
    one_kind = peaks[0].method == peaks[1].method
    before, after = (peak.median if one_kind else None for peak in peaks)
    check = _against("memory", both, most, (before, after), "bytes")
    told = " and ".join(dict.fromkeys(f"{peak.method}, with {peak.provider}" for peak in peaks))
    said = [check.reason, told]
    if check.status == "fail" and before is not None and after is not None and after - before < _LEAST_BYTES:
        said = [f"less than {format_bytes(_LEAST_BYTES)} more, which a process may take for anything", told]
        check = check.model_copy(update={"status": "pass"})
    return check.model_copy(update={"reason": "; ".join(filter(None, said))})


def file_checks(both: ArtifactPair, options: GateOptions) -> Iterator[GateCheck]:
    """Size and drift of one artifact, as the two manifests have them.

    Args:
        both: the artifact.
        options: what it may be worse by.
    """
    if options.max_size_growth is not None:
        sizes = both.baseline.size_bytes, both.candidate.size_bytes
        yield _against("size", both, options.max_size_growth, sizes, "bytes")
    yield _drift(both)


def _drift(both: ArtifactPair) -> GateCheck:
    """How far the artifact is from torch in FP32: loop by loop where it has loops, else its answers."""
    before, after = _error(both.baseline), _error(both.candidate)
    known = {"name": "drift", "artifact": both.candidate.id, "limit": _DRIFT_FACTOR - 1}
    known |= {"baseline": before, "candidate": after}
    if before is None or after is None:
        return GateCheck.model_validate({**known, "status": "undecided", "reason": _no_drift(both)})
    drift = both.candidate.drift
    tolerance = drift.tolerance if drift is not None else None
    status: GateStatus = "pass"
    if tolerance is not None and after > tolerance:
        status, why = "fail", f"beyond its tolerance of {tolerance:g}"
    elif after > _DRIFT_FACTOR * before and (tolerance is None or after > _DRIFT_SHARE * tolerance):
        status, why = "fail", "more than twice the baseline's"
    else:
        why = "RMS error of the worst loop" if drift is not None else "largest error of an answer"
    change = (after - before) / before if before else None
    return GateCheck.model_validate({**known, "change": change, "status": status, "reason": why})


def _no_drift(both: ArtifactPair) -> str:
    sides = [side for side in ("baseline", "candidate") if _error(getattr(both, side)) is None]
    return f"the bundle of the {' and the '.join(sides)} does not record how far it is from torch: export it again"


def _error(artifact: ArtifactManifest) -> float | None:
    if artifact.drift is not None:
        return max((loop.rms_error for loop in artifact.drift.loops if loop.rms_error is not None), default=None)
    return artifact.parity.max_abs_error if artifact.parity is not None else None
