"""Reports that were measured elsewhere (in a browser, on a device with the bundle), against a device's budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import (
    PERCENTILE_NEEDS,
    Latency,
    Report,
    Row,
    Subject,
    SubjectArtifact,
    checksum_notes,
    read_report,
    seal_report,
)
from edgeformer.benchmark.request import ProfileOptions, limits_of, shape_notes
from edgeformer.benchmark.verdict import Evidence, Limits, check_budget, judged_rows, spared_of_latency, unlimited_notes
from edgeformer.bundle import Bundle
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import task_named
from edgeformer.tasks.task import longest_call


def subject_of(manifest: BundleManifest, artifacts: Iterable[ArtifactManifest]) -> Subject:
    """What a report says of what was measured, so that it can be judged without the bundle.

    Args:
        manifest: of the bundle.
        artifacts: those of it that the report is about.
    """
    known = {one.id: SubjectArtifact(role=one.role, sha256=one.sha256) for one in artifacts}
    lengths = {"max_positions": manifest.max_positions, "max_length": manifest.max_length}
    return Subject(task=manifest.task, **lengths, artifacts=known, manifest_sha256=manifest.manifest_sha256)


def judge_report(path: Path, device: DeviceProfile, options: ProfileOptions, bundle: Bundle | None = None) -> Report:
    """Hold a report's measurements against a device's budget. That they are of that device is the caller's word.

    Args:
        path: of the report; its rows must be of the machine that it names, as a browser's are.
        device: whose budget it is.
        options: limits that win over the budget, and the artifacts to judge.
        bundle: that was measured: then the report must be of its files. None: the report tells what it needs to.

    Returns:
        The report with the device, its verdict, and notes on both.

    Raises:
        ArtifactError: the report is missing, damaged or edited, claims what its samples cannot carry, or is of other
            files.
        InputError: it holds nothing that was measured on the device, or lacks what only the bundle can tell.
    """
    report = read_report(path)
    _require_honest(path, report)
    subject = _subject(path, report, bundle)
    rows = tuple(row for row in report.rows if row.where == "host")
    _require_measured(path, report, rows)
    chosen = _chosen(path, rows, options.artifacts)
    task = task_named(subject.task)
    if bundle is None and not task.reads_text:
        raise InputError(f"{path}: of a {task.noun}, whose shapes only the bundle has; name it: --bundle RUN")
    data = bundle.data if bundle is not None else None
    limits = limits_of(
        options, device, task, longest_call(task, subject.max_positions, subject.max_length), data, elsewhere=True
    )
    known = [_evidence(name, rows, subject, device, limits) for name in chosen]
    verdict = check_budget(known, limits)
    notes = [f"{path.name} judged for {device.title}: that it was measured there is the word of whoever judges it"]
    notes += checksum_notes(path, report, bundle.manifest if bundle is not None else None)
    notes += shape_notes(limits)
    notes += unlimited_notes(verdict)
    if spared := spared_of_latency(known, limits):
        notes.append(f"not judged per decoded token, because other artifacts decode: {', '.join(spared)}")
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


def _require_honest(path: Path, report: Report) -> None:
    """Raises ArtifactError for figures that no measurement has."""
    for number, row in enumerate(report.rows):
        for problem in _impossible(row.latency_ms):
            raise ArtifactError(f"{path}: rows.{number}.latency_ms: {problem}; no page and no profile writes that")
        if row.size_bytes < 0 or row.batch < 1 or row.seq < 1:
            raise ArtifactError(f"{path}: rows.{number}: a size below zero, or a shape of nothing")


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


def _subject(path: Path, report: Report, bundle: Bundle | None) -> Subject:
    """What was measured, as the report says it, after it was compared with the bundle; else as the bundle does."""
    if bundle is None:
        if report.subject is None:
            raise InputError(f"{path}: by an earlier version, which names no task; name the bundle: --bundle RUN")
        return report.subject
    own = subject_of(bundle.manifest, bundle.artifacts)
    for name in dict.fromkeys(row.artifact for row in report.rows):
        told = report.subject.artifacts.get(name) if report.subject is not None else None
        mine = own.artifacts.get(name)
        if mine is None:
            raise ArtifactError(
                f"{path}: is about {name!r}, which {bundle.folder} does not have; is it of another run?"
            )
        if told is not None and told.sha256 != mine.sha256:
            raise ArtifactError(
                f"{path}: is about another {name!r} than the one in {bundle.folder}: their checksums differ; measure "
                "this one, or name the run that was measured"
            )
    return own


def _require_measured(path: Path, report: Report, rows: tuple[Row, ...]) -> None:
    """Raises InputError for a report whose rows are not of the device that it is about."""
    if not report.on_target:
        host = report.host.get("cpu", "another machine")
        raise InputError(
            f"{path}: its rows were measured on {host}; for {report.device_title} it has estimates; a report "
            "is judged that was measured on the device itself"
        )
    if not any(row.latency_ms.status == "measured" for row in rows):
        raise InputError(f"{path}: holds no measured row")


def _chosen(path: Path, rows: tuple[Row, ...], asked: tuple[str, ...]) -> list[str]:
    there = list(dict.fromkeys(row.artifact for row in rows))
    for name in asked:
        if name not in there:
            raise InputError(f"--artifact {name}: {path} has {', '.join(there)}")
    return list(dict.fromkeys(asked)) or there


def _evidence(name: str, rows: tuple[Row, ...], subject: Subject, device: DeviceProfile, limits: Limits) -> Evidence:
    own = [row for row in rows if row.artifact == name and row.phase != "cold"]
    # WebGPU computes on whatever chip there is; of the others it is known which kind of device a row is of.
    of_kind = [row for row in own if provider_facts(row.provider).kind in (None, device.kind)]
    told = subject.artifacts.get(name)
    whole_texts = told is not None and told.role in ("full", "exit")
    size_bytes = max((row.size_bytes for row in rows if row.artifact == name), default=0)
    known = Evidence(name, size_bytes, of_kind, "", whole_texts)
    if of_kind and judged_rows(known, limits):
        return known
    shapes = ", ".join(dict.fromkeys(f"{row.batch}×{row.seq}" for row in of_kind))
    why = f"{limits.batch}×{limits.seq} was not measured, but {shapes}"
    if not of_kind:
        labels = dict.fromkeys(provider_facts(row.provider).label for row in own)
        why = f"measured with {', '.join(labels)} only, which says nothing of a device of the kind {device.kind}"
    return Evidence(name, size_bytes, of_kind, why, whole_texts)
