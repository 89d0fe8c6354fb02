"""Profile: measure a bundle's artifacts on this host, estimate them for an absent device, and judge its budget.

Rows that a browser or another machine measured are judged here, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import (
    Choice,
    NotJudged,
    Report,
    Row,
    SizeParts,
    Subject,
    Verdict,
    checksum_notes,
    read_report,
    seal_report,
)
from edgeformer.artifacts.units import format_duration
from edgeformer.benchmark.choice import choose
from edgeformer.benchmark.request import ProfileOptions, Request, requirements_of, resolve, shape_notes
from edgeformer.benchmark.verdict import EXPECTED_CHECKS, check_budget, exempt_from_latency, judged_rows, verdict_of
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import estimate, estimate_evidence, estimated_providers
from edgeformer.measurement.artifact import (
    Item,
    MeasureJob,
    MeasuringInterrupted,
    absent_figures,
    check_artifact,
    items_of,
    measure_artifact,
    row_of,
)
from edgeformer.measurement.target import DevicePresence, find_target
from edgeformer.report import sentences
from edgeformer.report.sentences import note
from edgeformer.run import Location
from edgeformer.runtimes import (
    cannot_run,
    default_provider,
    library_versions,
    never_runs,
    on_gpu,
    opener_of,
    provider_facts,
)
from edgeformer.runtimes.session import Kind
from edgeformer.system.host import describe_host, now
from edgeformer.tasks import RowSource, get_task

__all__ = ["ProfileInterrupted", "ProfileOptions", "judge_report", "profile_bundle"]


@dataclass(eq=False)
class ProfileInterrupted(KeyboardInterrupt):
    """Ctrl-C while a bundle was profiled; ``report`` has the rows measured before it, of which nothing was judged."""

    report: Report


def profile_bundle(
    location: Location, device: DeviceProfile, options: ProfileOptions, progress: Progress = SILENT,
    on_estimates: Callable[[Report], object] = lambda report: None,
) -> Report:  # fmt: skip
    """Measure the bundle's artifacts on this host and judge them for a device.

    For a device that is not this host, they are estimated first, and ``on_estimates`` gets a report of the estimates
    before anything is measured. All files are checked first. A failure after that (an artifact that crashes its
    process, a shape that it refuses) becomes a row with the reason; the other rows are kept. Raises ArtifactError: the
    bundle, or a file of it that is needed, is missing, truncated or changed; InputError: an unknown artifact, a shape
    that the model cannot take, or ``no_host`` for this host; ProfileInterrupted: Ctrl-C; it has a report of what was
    measured before.
    """
    # 1. What is measured, and on which device.
    bundle = location.open_bundle()
    request, target = resolve(options, device, bundle.manifest, location.artifact), find_target(device)
    if target.present and options.no_host:
        raise InputError(f"--no-host: {device.title} is this host, so nothing would be left; leave the option out")
    all_items = {a.id: items_of(a, bundle.task, request.shapes, options.phase) for a in request.artifacts}
    measured_artifacts = [artifact for artifact in request.artifacts if all_items[artifact.id]]
    providers = [(artifact, name) for artifact in measured_artifacts for name in request.providers(artifact)]
    jobs = len(request.threads) * sum(cannot_run(*pair) is None for pair in providers)
    begun_jobs, started_s = 0, time.monotonic()
    notes: list[str] = []
    host_rows: list[Row] = []

    def estimate_rows(artifact: ArtifactManifest) -> list[Row]:
        with bar(progress, f"Estimating {artifact.id} on {device.name}", None):
            estimated_for = estimated_providers(artifact, device.kind, request.runtime)
            return estimate(bundle, artifact, device, all_items[artifact.id], estimated_for)

    try:
        # 2. Check all files; estimate an absent device, and judge it before anything is measured.
        checked = [check_artifact(bundle, artifact) for artifact in measured_artifacts]
        estimated: dict[str, list[Row]] = {}
        if not target.present:
            estimated = {files.artifact.id: estimate_rows(files.artifact) for files in checked}
            every = [*chain(*estimated.values())]
            report = _report(bundle, request, target, notes, every, every)
            if options.no_host:
                return report
            on_estimates(report)
        # 3. Measure each artifact with every runtime and every number of threads.
        rows: list[Row] = []
        device_rows: list[Row] = []
        for files in checked:
            artifact, first_row = files.artifact, len(host_rows)
            artifact_providers = request.providers(artifact)
            if not artifact_providers:
                notes.append(note("not opened", artifact=artifact.id, runtime=request.runtime))
            for requested_provider in artifact_providers:
                refusal = cannot_run(artifact, requested_provider)
                if refusal is not None:
                    progress.message(f"{artifact.id}: not measured: {refusal}")
                    name = opener_of(artifact, requested_provider).provider(artifact, requested_provider)
                    items: list[Item] = [("steady", *shape) for shape in request.shapes]
                    host_rows += [row_of(artifact, item, name, "host", refusal) for item in items]
                    continue
                for threads in request.threads:
                    job = MeasureJob(
                        files=files, provider=requested_provider, threads=threads, items=all_items[artifact.id],
                        rules=request.rules, gpu_uuid=target.gpu.uuid if target.gpu is not None else None,
                    )  # fmt: skip
                    left = ""  # if the jobs to come take as long as the others
                    if begun_jobs:
                        left_s = (time.monotonic() - started_s) / begun_jobs * (jobs - begun_jobs)
                        left = f", about {format_duration(left_s)} left"
                    begun_jobs += 1
                    place = f" ({begun_jobs} of {jobs}{left})" if jobs > 1 else ""
                    try:
                        job_rows = measure_artifact(job, progress, place)
                    except MeasuringInterrupted as error:
                        host_rows += error.rows
                        raise
                    host_rows += job_rows
                    if any(on_gpu(row.provider) for row in job_rows):
                        break  # CPU threads make no difference there
            # 4. Estimate what this host cannot measure of the device.
            measured = host_rows[first_row:]
            rows += measured
            artifact_device_rows = rows_of_kind(measured, device.kind) if target.present else estimated[artifact.id]
            if target.present and not artifact_device_rows:
                reason = next((row.latency_ms.reason for row in measured if row.latency_ms.reason), "not measured")
                provider = next((row.provider for row in measured if row.latency_ms.status == "measured"), None)
                if provider is not None:
                    needed = default_provider(device.kind)
                    reason = note("other provider", reason=target.reason, provider=provider, needed=needed)
                notes.append(note("estimated instead", artifact=artifact.id, reason=reason))
                artifact_device_rows = estimate_rows(artifact)
            if not target.present or artifact_device_rows[0].where == "device":
                rows += artifact_device_rows
            device_rows += artifact_device_rows
        notes += card_notes(device, target, rows)
        return _report(bundle, request, target, notes, rows, device_rows)
    except KeyboardInterrupt:
        count, measured_count = len(host_rows), len({row.artifact for row in host_rows})
        notes.append(note("interrupted", rows=count, measured=measured_count, artifacts=len(request.artifacts)))
        raise ProfileInterrupted(_report(bundle, request, target, notes, host_rows, None)) from None


def rows_of_kind(rows: Sequence[Row], kind: Kind) -> list[Row]:
    """Return the host's rows that stand for a present device: what its kind of processor measured, by any provider.

    With the device's usual provider also rows that failed: no estimate replaces a failure on the device itself.
    """
    usual = default_provider(kind)
    of_kind = [row for row in rows if provider_facts(row.provider).kind == kind]
    return [row for row in of_kind if row.latency_ms.status == "measured" or row.provider == usual]


def card_notes(device: DeviceProfile, target: DevicePresence, rows: Sequence[Row]) -> list[str]:
    """Return a note on how to measure on a present card what ONNX Runtime computed on the processor, if anything."""
    measured = [row for row in rows if row.where == "host" and row.latency_ms.status == "measured"]
    on_card = list(dict.fromkeys(row.artifact for row in measured if on_gpu(row.provider)))
    on_cpu = list(dict.fromkeys(row.artifact for row in measured if row.artifact not in on_card))
    if not target.present or device.kind != "cuda" or not on_cpu:
        return []
    return [note("card", on_card=", ".join(on_card) or "nothing", on_cpu=", ".join(on_cpu))]


def _report(
    bundle: Bundle, request: Request, target: DevicePresence, measuring_notes: Sequence[str], rows: Sequence[Row],
    device_rows: Sequence[Row] | None,
) -> Report:  # fmt: skip
    """Return the report; ``device_rows`` are judged, None: the profile was interrupted."""
    manifest, device, options, requirements = bundle.manifest, request.device, request.options, request.requirements
    is_interrupted = device_rows is None
    choice: Choice | None = None
    notes = [*request.notes, *measuring_notes]
    # 1. No such device runs these artifacts, so they say nothing about a model on it.
    refusals = {artifact.id: never_runs(artifact, device) for artifact in request.artifacts}
    left_out = {name: reason for name, reason in refusals.items() if reason is not None}
    judged = [row for row in device_rows or () if row.artifact not in left_out]
    # Without caches, every token of a text costs a pass over all of it.
    whole_texts = [artifact.id for artifact in request.artifacts if artifact.role in ("full", "exit")]
    rows = [
        row.model_copy(update={"inputs": bundle.task.input_shapes(bundle.data, row.batch, row.seq)}) for row in rows
    ]

    # 2. Judge the rows of the device.
    if is_interrupted:
        not_judged = tuple(NotJudged(name=name, reason="interrupted") for name in EXPECTED_CHECKS)
        verdict = Verdict(status="unknown", not_judged=not_judged)
    elif options.choose is None:
        verdict = check_budget(judged, requirements, whole_texts)
    else:
        records = bundle.records
        notes += filter(None, (record.why_refused(manifest) for record in records.records))
        eligible = [row for row in rows if row.artifact not in left_out]
        completing = records.completing(manifest, device.match)
        choice = choose(manifest, eligible, judged, requirements, options.choose.minimize, completing)
        if choice.pick is None:
            verdict = check_budget(judged, requirements, whole_texts).model_copy(update={"status": "fail"})
        else:
            verdict = verdict_of(choice.candidates[choice.pick].checks, requirements, has_rows=True)

    # 3. Notes.
    if is_interrupted:  # nothing was judged
        unused = shape_notes(requirements)
        notes = [text for text in notes if text not in unused]
    if not target.present:
        measured = note("no measurement" if options.no_host else "host times")
        estimated = note("no estimate" if is_interrupted else "estimates")
        notes.append(note("absent device", reason=target.reason, measured=measured, estimated=estimated))
    for reason in dict.fromkeys(left_out.values()):
        names = ", ".join(name for name, refusal in left_out.items() if refusal == reason)
        notes.append(note("left out", device=device.title, artifacts=names, reason=reason))
    if left_out and not judged and not is_interrupted:
        notes.append(note("nothing can run"))
    elif not is_interrupted:  # the note of the interruption says that nothing was judged
        notes += sentences.verdict_notes(verdict, exempt_from_latency(judged, requirements, whole_texts))
    notes += [note("synthetic")] if manifest.synthetic else []
    notes += [sentences.import_proof(manifest.proof)] if manifest.proof is not None else []
    notes += [
        note("early exit", artifact=artifact.id, guarantee=sentences.exit_guarantee(artifact.guarantee))
        for artifact in request.artifacts
        if artifact.guarantee is not None
    ]

    # 4. The report.
    precisions = {row.precision for row in rows if row.latency_ms.status == "estimated"}
    report = Report(
        device=device.name, device_title=device.title,
        host={
            **describe_host(), "gpu": target.gpu.name if target.gpu is not None else None,
            "threads": max(request.threads), "versions": library_versions(),
        },
        on_target=target.present, run=manifest.run, bundle=str(bundle.folder), created=now(),
        synthetic=manifest.synthetic, leaks=manifest.leaks, proof=manifest.proof, parameters=manifest.parameters,
        rows=tuple(rows), verdict=verdict, notes=tuple(notes), estimated_for=device.kind if precisions else None,
        estimate_error=options.estimate_error if precisions else None,
        estimate_evidence=estimate_evidence(device, options.estimate_error, precisions),
        sizes=tuple(SizeParts.of(artifact) for artifact in request.artifacts if artifact.size_bytes), search=choice,
        left_out=left_out, question=request.question, profile=device,
        subject=Subject.of(manifest, request.artifacts),
    )  # fmt: skip
    return seal_report(report)


def judge_report(path: Path, device: DeviceProfile, options: ProfileOptions, bundle: Bundle | None = None) -> Report:
    """Judge a report's measurements for a device. The caller vouches that they are of that device.

    With ``bundle``, the report must be of its files; without it, the report itself has to record enough. Raises
    ArtifactError: the report is missing, damaged or edited, or is of other files; InputError: it holds nothing that was
    measured on the device, or lacks what only the bundle has.
    """
    # 1. Read the report, and check that it is of the bundle and of the device.
    report = read_report(path)
    subject = recorded = report.subject
    if bundle is not None:
        subject = Subject.of(bundle.manifest, bundle.artifacts)
        for name in dict.fromkeys(row.artifact for row in report.rows):
            bundled, other = subject.artifacts.get(name), recorded.artifacts.get(name) if recorded is not None else None
            if bundled is None or (other is not None and other.sha256 != bundled.sha256):
                raise ArtifactError(
                    f"{path}: was measured with another {name!r} than that of {bundle.folder}; give the measured run "
                    "to --bundle"
                )
    if subject is None:
        raise InputError(f"{path}: is of an earlier version and names no task; give its bundle: --bundle RUN")
    rows = tuple(row for row in report.rows if row.where == "host")
    if not report.on_target:
        host = report.host.get("cpu", "another machine")
        raise InputError(
            f"{path}: was measured on {host} and has only estimates for {report.device_title}; give a report that was "
            "measured on the device itself"
        )
    if not any(row.latency_ms.status == "measured" for row in rows):
        raise InputError(f"{path}: has no measured row; measure again with edgeformer profile")
    names = list(dict.fromkeys(row.artifact for row in rows))
    for name in options.artifacts:
        if name not in names:
            raise InputError(f"--artifact {name}: {path} has no such artifact; it has {', '.join(names)}")
    task = get_task(subject.task)
    if bundle is None and not isinstance(task, RowSource):
        raise InputError(f"{path}: is of a {task.noun}, whose shapes only its bundle records; give it: --bundle RUN")
    longest = task.max_call_tokens(subject.max_positions, subject.max_length)
    data = bundle.data if bundle is not None else None
    requirements = requirements_of(options, device, task, longest, data, is_other_host=True)

    # 2. The rows of each artifact that stand for the device.
    whole_texts = [name for name, artifact in subject.artifacts.items() if artifact.role in ("full", "exit")]
    judged: list[Row] = []
    for name in dict.fromkeys(options.artifacts or names):
        warm = [row for row in rows if row.artifact == name and row.phase != "cold"]
        # WebGPU computes on any chip; the other providers determine the kind of device.
        of_kind = [row for row in warm if provider_facts(row.provider).kind in (None, device.kind)]
        if judged_rows(of_kind, requirements.shape, requirements, name in whole_texts):
            judged += of_kind
            continue
        shapes, (batch, seq) = dict.fromkeys(f"{row.batch}×{row.seq}" for row in of_kind), requirements.shape
        reason = note("no such row", shape=f"{batch}×{seq}", shapes=", ".join(shapes))
        if not of_kind:
            labels = ", ".join(dict.fromkeys(provider_facts(row.provider).label for row in warm))
            reason = note("other kind", labels=labels, kind="a GPU" if device.kind == "cuda" else "a CPU")
        judged += [row.model_copy(update=absent_figures(reason)) for row in rows if row.artifact == name]
    # A report from elsewhere may state several sizes of one artifact: the largest counts.
    sizes: dict[str, int] = {}
    for row in judged:
        sizes[row.artifact] = max(row.size_bytes, sizes.get(row.artifact, 0))
    judged = [row.model_copy(update={"size_bytes": sizes[row.artifact]}) for row in judged]
    # 3. Judge them.
    verdict = check_budget(judged, requirements, whole_texts)
    notes = [note("judged", file=path.name, device=device.title)]
    notes += checksum_notes(path, report, bundle.manifest if bundle is not None else None)
    notes += shape_notes(requirements)
    notes += sentences.verdict_notes(verdict, exempt_from_latency(judged, requirements, whole_texts))
    update = {
        "device": device.name, "device_title": device.title, "rows": rows, "verdict": verdict, "search": None,
        "notes": (*report.notes, *notes), "profile": device, "judged_from": str(path),
    }  # fmt: skip
    return seal_report(report.model_copy(update=update))
