"""Whether a report that was measured elsewhere agrees with itself, and with the bundle that it says it is of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import BundleManifest
from edgeformer.formats.measure_rules import PERCENTILE_NEEDS, QUANTILES
from edgeformer.formats.report import Check, Latency, Report, Row, Verdict
from edgeformer.stages.profiling.verdict import Quantity, status_of

_ROUNDING = 1e-3
"""Relative: what rounding, here or in a browser, may make of one number that two others give."""
_LEAST = 1e-6
"""The same, absolute: a sample's distribution is written to the nanosecond."""


def require_honest(path: Path, report: Report) -> None:
    """Raises ArtifactError for figures that no measurement has.

    Args:
        path: of the report, for messages.
        report: of anybody.
    """
    for number, row in enumerate(report.rows):
        for problem in _impossible(row.latency_ms):
            raise ArtifactError(f"{path}: rows.{number}.latency_ms: {problem}; no page and no profile writes that")
        if row.size_bytes < 0 or row.batch < 1 or row.seq < 1:
            raise ArtifactError(f"{path}: rows.{number}: a size below zero, or a shape of nothing")


def require_consistent(path: Path, report: Report, manifest: BundleManifest) -> None:
    """Raises ArtifactError for a report that contradicts itself, or that is not of this bundle.

    Args:
        path: of the report, for messages.
        report: of anybody.
        manifest: of the bundle that it is said to be of.
    """
    require_honest(path, report)
    # One after the other: the later ones trust what the earlier ones found nothing wrong with.
    for problem in chain(
        _of_another(report, manifest), _of_rows(report, manifest), _of_verdict(report.verdict, report)
    ):
        raise ArtifactError(f"{path}: {problem}; make it again with edgeformer profile")


def _impossible(latency: Latency) -> Iterator[str]:
    named = ("min", "p50", *(f"p{percentile}" for percentile in PERCENTILE_NEEDS))
    known = [(name, value) for name in named if (value := getattr(latency, name)) is not None]
    for name, value in known:
        if value < 0:
            yield f"{name} is below zero"
    for (lower, less), (higher, more) in pairwise(known):
        if less > more:
            yield f"{lower} is above {higher}"
    if latency.status == "measured":
        if latency.p50 is None or latency.n < 1:
            yield "measured, but without a time or a call"
        for percentile, needed in PERCENTILE_NEEDS.items():
            if latency.n < needed and getattr(latency, f"p{percentile}") is not None:
                yield f"p{percentile} of {latency.n} calls, where {needed} are needed"


def _of_another(report: Report, manifest: BundleManifest) -> Iterator[str]:
    """Whether report and bundle belong together."""
    for name in ("run", "parameters", "synthetic", "leaks"):
        if (told := getattr(report, name)) != (own := getattr(manifest, name)):
            yield f"{name}: says {told!r}, where the bundle says {own!r}: they do not belong together"
    if report.subject is None:
        yield "says no checksums of what was measured; it was written by an earlier version"
        return
    if report.subject.task != manifest.task:
        yield f"subject.task: says {report.subject.task!r}, where the bundle says {manifest.task!r}"
    own = {artifact.id: artifact.sha256 for artifact in manifest.artifacts}
    for name, artifact in report.subject.artifacts.items():
        if name not in own or own[name] != artifact.sha256:
            yield f"subject.artifacts.{name}: the bundle has another artifact of that name, or none"


def _of_rows(report: Report, manifest: BundleManifest) -> Iterator[str]:
    known = {artifact.id: artifact for artifact in manifest.artifacts}
    measured = report.subject.artifacts if report.subject is not None else {}
    for number, row in enumerate(report.rows):
        where = f"rows.{number}"
        if row.artifact not in measured:
            yield f"{where}.artifact: {row.artifact!r} is not among those that were measured"
            continue
        artifact = known[row.artifact]
        if row.precision != artifact.precision:
            yield f"{where}.precision: says {row.precision}, where the bundle says {artifact.precision}"
        if artifact.size_bytes is not None and row.size_bytes != artifact.size_bytes:
            yield f"{where}.size_bytes: says {row.size_bytes:,}, where the bundle says {artifact.size_bytes:,}"
        if row.latency_ms.status == "measured":
            yield from (f"{where}.{problem}" for problem in _of_times(row))


def _of_times(row: Row) -> Iterator[str]:
    """Numbers of one row that give one another."""
    latency = row.latency_ms
    if latency.mean is not None and latency.mean > 0 and row.throughput_per_s is not None:
        expected = row.batch * 1000 / latency.mean
        if not _close(row.throughput_per_s, expected):
            yield f"throughput_per_s: says {row.throughput_per_s:.4g}, but its mean gives {expected:.4g}"
    if latency.mean is not None and latency.min is not None and latency.mean < latency.min * (1 - _ROUNDING):
        yield f"latency_ms: its mean of {latency.mean:.4g} ms is below its shortest call of {latency.min:.4g} ms"
    drawn = latency.quantiles_ms
    if any(less > more for less, more in pairwise(drawn)):
        yield "latency_ms.quantiles_ms: do not grow"
    if len(drawn) == QUANTILES and latency.p50 is not None and not _close(drawn[QUANTILES // 2], latency.p50):
        yield f"latency_ms.p50: says {latency.p50:.4g} ms, but its distribution {drawn[QUANTILES // 2]:.4g} ms"
    for name in (f"p{percentile}" for percentile in PERCENTILE_NEEDS):
        value = getattr(latency, name)
        if drawn and value is not None and value > drawn[-1] and not _close(value, drawn[-1]):
            yield f"latency_ms.{name}: says {value:.4g} ms, but its longest call {drawn[-1]:.4g} ms"


def _of_verdict(verdict: Verdict, report: Report) -> Iterator[str]:
    for number, check in enumerate(verdict.checks):
        if check.basis is None:
            continue  # of an earlier version, which did not say what its value is
        quantity = Quantity(check.value, check.basis, "", check.low, check.high)
        if (expected := status_of(check.limit, quantity)) != check.status:
            yield f"verdict.checks.{number}: says {check.status}, but its figures say {expected}"
        if not _has_row(check, report):
            yield f"verdict.checks.{number}.value: is of no row"
    decided = {check.name for check in verdict.checks if check.status != "unknown"}
    if (verdict.judged or verdict.not_judged) and set(verdict.judged) != decided:  # earlier versions wrote neither
        yield f"verdict.judged: says {', '.join(verdict.judged) or 'nothing'}, but its checks say otherwise"
    if contradicted := [kind.name for kind in verdict.not_judged if kind.name in decided]:
        yield f"verdict.not_judged: names {contradicted[0]}, which a check decides"
    found = {check.status for check in verdict.checks}
    given = next((status for status in ("fail", "unknown", "pass") if status in found), verdict.status)
    if report.search is not None and report.search.pick is None:
        given = "fail"  # a search that picks nothing has failed, whatever single artifacts keep
    if given != verdict.status:
        yield f"verdict.status: says {verdict.status}, but its checks say {given}"


def _has_row(check: Check, report: Report) -> bool:
    """Whether a row holds what was measured of the artifact, or nothing of it was."""
    if check.basis != "measured" or check.value is None:
        return True
    rows = [row for row in report.rows if row.artifact == check.artifact]
    held: dict[str, list[float | None]] = {
        "latency": [row.latency_ms.p50 for row in rows],
        "memory": [row.memory_bytes.peak for row in rows],
        "energy": [row.energy_mj.value for row in rows],
        "size": [row.size_bytes for row in rows],
    }
    return check.name not in held or check.value in held[check.name]


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other)) + _LEAST
