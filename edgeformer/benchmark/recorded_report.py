"""Recorded reports: judge rows that a browser or another machine measured against a device's budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import (
    PERCENTILE_NEEDS,
    Report,
    Row,
    Subject,
    SubjectArtifact,
    checksum_notes,
    read_report,
    seal_report,
)
from edgeformer.benchmark.request import ProfileOptions, limits_of, shape_notes
from edgeformer.benchmark.verdict import (
    Evidence,
    Limits,
    check_budget,
    exempt_from_latency,
    judged_rows,
    unlimited_notes,
)
from edgeformer.bundle import Bundle
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import get_task
from edgeformer.tasks.task import max_call_tokens


def subject_of(manifest: BundleManifest, artifacts: Iterable[ArtifactManifest]) -> Subject:
    """Return what a report records of the measured ``artifacts``, so that it can be judged without the bundle."""
    return Subject(
        task=manifest.task,
        max_positions=manifest.max_positions,
        max_length=manifest.max_length,
        artifacts={entry.id: SubjectArtifact(role=entry.role, sha256=entry.sha256) for entry in artifacts},
        manifest_sha256=manifest.manifest_sha256,
    )


def judge_report(path: Path, device: DeviceProfile, options: ProfileOptions, bundle: Bundle | None = None) -> Report:
    """Judge a report's measurements for a device. The caller vouches that they are of that device.

    Args:
        path: of the report; its rows must be of the machine that it names, as a browser's are.
        device: has the budget.
        options: limits that win over the budget, and the artifacts to judge.
        bundle: that was measured: then the report must be of its files. None: the report itself records enough.

    Returns:
        The report with the device, its verdict, and notes on both.

    Raises:
        ArtifactError: the report is missing, damaged or edited, claims what its samples cannot carry, or is of other
            files.
        InputError: it holds nothing that was measured on the device, or lacks what only the bundle has.
    """
    report = read_report(path)
    _check_figures(path, report)
    subject = _subject(path, report, bundle)
    rows = tuple(row for row in report.rows if row.where == "host")
    if not report.on_target:
        host = report.host.get("cpu", "another machine")
        raise InputError(
            f"{path}: its rows were measured on {host}; for {report.device_title} it has estimates; a report "
            "is judged that was measured on the device itself"
        )
    if not any(row.latency_ms.status == "measured" for row in rows):
        raise InputError(f"{path}: holds no measured row")
    names = list(dict.fromkeys(row.artifact for row in rows))
    for name in options.artifacts:
        if name not in names:
            raise InputError(f"--artifact {name}: {path} has {', '.join(names)}")
    task = get_task(subject.task)
    if bundle is None and not task.reads_text:
        raise InputError(f"{path}: of a {task.noun}, whose shapes only the bundle has; name it: --bundle RUN")
    limits = limits_of(
        options,
        device,
        task,
        max_call_tokens(task, subject.max_positions, subject.max_length),
        bundle.data if bundle is not None else None,
        is_other_host=True,
    )
    evidence = [
        _evidence(name, rows, subject, device, limits) for name in dict.fromkeys(options.artifacts or tuple(names))
    ]
    verdict = check_budget(evidence, limits)
    notes = [f"{path.name} judged for {device.title}: that it was measured there is the word of whoever judges it"]
    notes += checksum_notes(path, report, bundle.manifest if bundle is not None else None)
    notes += shape_notes(limits)
    notes += unlimited_notes(verdict)
    if exempt := exempt_from_latency(evidence, limits):
        notes.append(f"not judged per decoded token, because other artifacts decode: {', '.join(exempt)}")
    judged = {
        "device": device.name,
        "device_title": device.title,
        "rows": rows,
        "verdict": verdict,
        "search": None,
        "notes": (*report.notes, *notes),
        "profile": device.model_dump(mode="json", by_alias=True, exclude={"calibration"}),
        "judged_from": str(path),
    }
    return seal_report(report.model_copy(update=judged))


def _check_figures(path: Path, report: Report) -> None:
    """Raise ArtifactError for figures that no measurement has."""
    percentiles = {f"p{percentile}": needed for percentile, needed in PERCENTILE_NEEDS.items()}
    for number, row in enumerate(report.rows):
        latency = row.latency_ms
        values = [
            (name, value) for name in ("min", "p50", *percentiles) if (value := getattr(latency, name)) is not None
        ]
        problems = [f"{name} is below zero" for name, value in values if value < 0]
        problems += [f"{lower} is above {higher}" for (lower, a), (higher, b) in pairwise(values) if a > b]
        if latency.status == "measured":
            if latency.p50 is None or latency.n < 1:
                problems.append("measured, but without a time or a call")
            problems += [
                f"{name} of {latency.n} calls, where {needed} are needed"
                for name, needed in percentiles.items()
                if latency.n < needed and getattr(latency, name) is not None
            ]
        if problems:
            raise ArtifactError(f"{path}: rows.{number}.latency_ms: {problems[0]}; no page and no profile writes that")
        if row.size_bytes < 0 or row.batch < 1 or row.seq < 1:
            raise ArtifactError(f"{path}: rows.{number}: a size below zero, or a shape of nothing")


def _subject(path: Path, report: Report, bundle: Bundle | None) -> Subject:
    """Return what was measured: as the report records it, or as the bundle does if it has the report's artifacts."""
    if bundle is None:
        if report.subject is None:
            raise InputError(f"{path}: by an earlier version, which names no task; name the bundle: --bundle RUN")
        return report.subject
    subject = subject_of(bundle.manifest, bundle.artifacts)
    recorded = report.subject.artifacts if report.subject is not None else {}
    for name in dict.fromkeys(row.artifact for row in report.rows):
        if name not in subject.artifacts:
            raise ArtifactError(
                f"{path}: is about {name!r}, which {bundle.folder} does not have; is it of another run?"
            )
        if name in recorded and recorded[name].sha256 != subject.artifacts[name].sha256:
            raise ArtifactError(
                f"{path}: is about another {name!r} than the one in {bundle.folder}: their checksums differ; measure "
                "this one, or name the run that was measured"
            )
    return subject


def _evidence(name: str, rows: Sequence[Row], subject: Subject, device: DeviceProfile, limits: Limits) -> Evidence:
    artifact_rows = [row for row in rows if row.artifact == name]
    warm = [row for row in artifact_rows if row.phase != "cold"]
    # WebGPU computes on any chip; the other providers determine the kind of device.
    of_kind = [row for row in warm if provider_facts(row.provider).kind in (None, device.kind)]
    artifact = subject.artifacts.get(name)
    whole_texts = artifact is not None and artifact.role in ("full", "exit")
    evidence = Evidence(name, max(row.size_bytes for row in artifact_rows), of_kind, "", whole_texts)
    if of_kind and judged_rows(evidence, limits):
        return evidence
    shapes = ", ".join(dict.fromkeys(f"{row.batch}×{row.seq}" for row in of_kind))
    reason = f"{limits.batch}×{limits.seq} was not measured, but {shapes}"
    if not of_kind:
        labels = ", ".join(dict.fromkeys(provider_facts(row.provider).label for row in warm))
        reason = f"measured with {labels} only, which says nothing of a device of the kind {device.kind}"
    return replace(evidence, why_no_rows=reason)
