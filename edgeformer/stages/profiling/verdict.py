"""Budgets against values: what passes, what fails, and what nobody can know without the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgeformer.schema.report import Check, CheckStatus, Row, Verdict


@dataclass(frozen=True)
class Limits:
    """What an artifact may cost, and at which shape it is judged. An absent limit is not checked.

    ``phase`` is what the latency is of; memory is always that of whole calls.
    """

    size_bytes: int | None
    latency_ms: float | None
    memory_bytes: int | None
    batch: int
    seq: int
    phase: Literal["steady", "decode"] = "steady"
    shape_note: str | None = None


@dataclass(frozen=True)
class Judged:
    """One artifact: its file's size and the rows that were measured on the device itself."""

    artifact: str
    size_bytes: int
    rows: Sequence[Row]
    why_no_rows: str


def judge(artifacts: Sequence[Judged], limits: Limits) -> Verdict:
    """Check every artifact. ``fail`` outweighs ``unknown``, that outweighs ``pass``; no check is unknown."""
    checks = [check for artifact in artifacts for check in _checks(artifact, limits)]
    statuses = {check.status for check in checks}
    status: CheckStatus = "pass"
    if "fail" in statuses:
        status = "fail"
    elif "unknown" in statuses or not checks:
        status = "unknown"
    return Verdict(status=status, checks=tuple(checks))


def _checks(artifact: Judged, limits: Limits) -> list[Check]:
    checks: list[Check] = []
    if limits.size_bytes is not None:
        checks.append(_compare("size", artifact.artifact, limits.size_bytes, artifact.size_bytes, "bytes", None))
    judged = {row.phase: row for row in artifact.rows if (row.batch, row.seq) == (limits.batch, limits.seq)}
    where = f"at {limits.batch}×{limits.seq}" + (f": {limits.shape_note}" if limits.shape_note else "")
    if limits.latency_ms is not None:
        value, reason = _latency(judged.get(limits.phase), artifact.why_no_rows, where)
        checks.append(_compare("latency", artifact.artifact, limits.latency_ms, value, "ms", reason))
    if limits.memory_bytes is not None:
        memory, reason = _memory(judged.get("steady"), artifact.why_no_rows, where)
        checks.append(_compare("memory", artifact.artifact, limits.memory_bytes, memory, "bytes", reason))
    return checks


def _latency(row: Row | None, why_no_rows: str, where: str) -> tuple[float | None, str]:
    if row is None:
        return None, why_no_rows
    latency = row.latency_ms
    if latency.status != "measured":
        return None, latency.reason or "not measured"
    return latency.p50, f"p50 {where}" + ("" if latency.stable else "; the measurement is not stable")


def _memory(row: Row | None, why_no_rows: str, where: str) -> tuple[float | None, str]:
    if row is None:
        return None, why_no_rows
    memory = row.memory_bytes
    if memory.status != "measured":
        return None, memory.reason or "not measured"
    return memory.peak, f"peak {where}"


def _compare(name: str, artifact: str, limit: float, value: float | None, unit: str, reason: str | None) -> Check:
    status: CheckStatus = "unknown" if value is None else "pass" if value <= limit else "fail"
    return Check(name=name, artifact=artifact, limit=limit, value=value, unit=unit, status=status, reason=reason)
