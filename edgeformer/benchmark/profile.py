"""A card whose ONNX Runtime computes on the processor: what was measured on it all the same, how to get the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, Silent, bar
from edgeformer.artifacts.report import Report, Row, Search, SizeParts, Verdict, seal_report
from edgeformer.benchmark.launch import MeasuringInterrupted, measure_in_child
from edgeformer.benchmark.messages import CheckedArtifact, MeasureSpec, phases_of, unavailable_row
from edgeformer.benchmark.recorded_report import subject_of
from edgeformer.benchmark.request import ProfileOptions, Request, Target, find_target, resolve, shape_notes
from edgeformer.benchmark.search import check_options, search, verdict_of_pick
from edgeformer.benchmark.tie_break import Grounds, settle
from edgeformer.benchmark.verdict import Evidence, check_budget, spared_of_latency, unjudged, unlimited_notes
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import estimate, estimate_evidence
from edgeformer.run import Location
from edgeformer.runtimes import Target as BuildTarget
from edgeformer.runtimes import (
    all_builders,
    cannot_run,
    default_provider,
    how_to_use_card,
    library_versions,
    never_runs,
    on_gpu,
    opener_of,
    provider_facts,
)
from edgeformer.runtimes.runtime import Kind
from edgeformer.system.host import describe_host, now


def rest_of_card(bundle: Bundle, device: DeviceProfile, target: Target, rows: Sequence[Row]) -> Iterator[str]:
    """Notes for the report; none where the device is not here, is no card, or computed all that was measured.

    Args:
        bundle: that was profiled.
        device: that it was profiled for.
        target: whether that is here.
        rows: of host and device.
    """
    measured = [row for row in rows if row.where == "host" and row.latency_ms.status == "measured"]
    there = list(dict.fromkeys(row.artifact for row in measured if on_gpu(row.provider)))
    rest = list(dict.fromkeys(row.artifact for row in measured if row.artifact not in there))
    if not target.present or device.kind != "cuda" or not rest:
        return
    told = f"measured on the card itself: {', '.join(there)}" if there else "nothing was measured on the card itself"
    yield f"{told}; {', '.join(rest)} ran on the processor: {how_to_use_card()}"
    if there:
        return
    for builder in all_builders():
        planned = builder.plan(device) if builder.needs_device else None
        if isinstance(planned, BuildTarget) and not any(one.format == planned.format for one in bundle.built()):
            name = "BUNDLE" if bundle.manifest.wrapped is not None else bundle.name
            command = f"edgeformer export {name} --fp16 {builder.flag} --target {device.name}"
            yield f"engines run on the card without that ONNX Runtime, and can be built here: {command}"
            return


# From a bundle to a report: measure each artifact on this host in a child process, check the device's budget.


__all__ = ["ProfileInterrupted", "ProfileOptions", "profile_bundle"]


@dataclass(frozen=True)
class _Profiling:
    """A bundle, the device that it is profiled for, and where to say what is going on."""

    bundle: Bundle
    device: DeviceProfile
    target: Target
    options: ProfileOptions
    request: Request
    progress: Progress
    notes: list[str] = field(default_factory=list)
    measured: list[Row] = field(default_factory=list)
    is_interrupted: bool = False


class ProfileInterrupted(KeyboardInterrupt):
    """Ctrl-C while a bundle was profiled.

    Args:
        report: the rows that were measured before it, of which nothing was judged.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def profile_bundle(
    location: Location, device: DeviceProfile, options: ProfileOptions, progress: Progress | None = None
) -> Report:
    """Measure the bundle's artifacts here and judge them for a device.

    All files are checked before anything is measured. What fails later (an artifact that crashes its process,
    a shape that it refuses) becomes a row that says so; the other rows survive.

    Args:
        location: the bundle, and the one artifact of it that was named, if one was.
        device: that they are judged for.
        options: what to measure and to hold against it.
        progress: where to say what is going on.

    Raises:
        ArtifactError: the bundle, or a file of it that is needed, is missing, truncated or changed.
        InputError: an unknown artifact, or a shape that the model cannot take.
        ProfileInterrupted: Ctrl-C; it has a report of what was measured before.
    """
    bundle = location.open_bundle()
    request = resolve(options, device, bundle.manifest, location.artifact)
    here = _Profiling(bundle, device, find_target(device), options, request, progress or Silent())
    try:
        return _profile(here)
    except KeyboardInterrupt:
        rows = [_with_inputs(row, bundle) for row in here.measured]
        artifacts = len({row.artifact for row in rows})
        here.notes.append(
            f"interrupted: {len(rows)} rows of {artifacts} of {len(request.artifacts)} artifacts were measured; "
            "nothing was judged"
        )
        interrupted = replace(here, options=replace(options, search=None), is_interrupted=True)
        raise ProfileInterrupted(_report(interrupted, rows, [])) from None


def _profile(here: _Profiling) -> Report:
    bundle, device, request = here.bundle, here.device, here.request
    files = [(artifact, CheckedArtifact.of(bundle, artifact)) for artifact in request.artifacts]
    rows: list[Row] = []
    known: list[Evidence] = []
    for artifact, checked in files:
        measured = _measure(here, checked)
        of_device, why_none = _on_device(here, measured)
        rows += measured
        if not of_device:
            if here.target.present:
                here.notes.append(f"{artifact.id}: {why_none}; rows `device` are estimated instead")
            phases = phases_of(artifact, bundle.task)
            items = [(phase, *shape) for shape in request.shapes for phase in phases]
            with bar(here.progress, f"estimating {artifact.id} on {device.name}", None):
                of_device = estimate(bundle, artifact, device, items)
            rows += of_device
        # Without caches, every token of a text costs a pass over all of it.
        whole_texts = artifact.role in ("full", "exit")
        known.append(Evidence(artifact.id, checked.size_bytes, of_device, why_none, whole_texts))
    here.notes.extend(rest_of_card(bundle, device, here.target, rows))
    return _report(here, [_with_inputs(row, bundle) for row in rows], known)


def _left_out(here: _Profiling) -> dict[str, str]:
    """Artifacts that say nothing about a model on this device, because no such device runs them: id → why."""
    reasons = {one.id: never_runs(one, here.device) for one in here.request.artifacts}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _with_inputs(row: Row, bundle: Bundle) -> Row:
    return row.model_copy(update={"inputs": bundle.task.input_shapes(bundle.data, row.batch, row.seq)})


def _measure(here: _Profiling, checked: CheckedArtifact) -> list[Row]:
    """The host's rows of one artifact, for every runtime and every number of threads."""
    providers = here.request.providers(checked.artifact)
    if not providers:
        here.notes.append(f"{checked.artifact.id}: left out: {here.request.runtime} does not open it")
    return [row for provider in providers for row in _measure_with(here, checked, provider)]


def _measure_with(here: _Profiling, checked: CheckedArtifact, provider: str | None) -> list[Row]:
    request, gpu, artifact = here.request, here.target.gpu, checked.artifact
    refusal = cannot_run(artifact, provider)
    if refusal is not None:
        here.progress.message(f"{artifact.id}: not measured: {refusal}")
        named = opener_of(artifact, provider).provider(artifact, provider)
        return [
            unavailable_row(artifact, checked.size_bytes, ("steady", *shape), named, "host", refusal)
            for shape in request.shapes
        ]
    rows: list[Row] = []
    for threads in request.threads:
        spec = MeasureSpec(
            checked=checked,
            provider=provider,
            threads=threads,
            phases=phases_of(artifact, here.bundle.task),
            shapes=request.shapes,
            rules=request.rules,
            gpu_uuid=gpu.uuid if gpu is not None else None,
        )
        try:
            measured = measure_in_child(spec, here.progress)
        except MeasuringInterrupted as error:
            here.measured.extend(error.rows)
            raise
        here.measured.extend(measured)
        rows += measured
        if any(on_gpu(row.provider) for row in measured):
            break  # the threads of the CPU make no difference there
    return rows


def _on_device(here: _Profiling, rows: list[Row]) -> tuple[list[Row], str]:
    """The host's rows that were measured on the device itself, and why there are none."""
    if not here.target.present:
        return [], here.target.reason
    found = rows_there(rows, here.device.kind)
    if found:
        limits = here.request.limits
        return found, f"{limits.batch}×{limits.seq} was not measured"
    measured_with = [row.provider for row in rows if row.latency_ms.status == "measured"]
    if not measured_with:
        return [], next((row.latency_ms.reason for row in rows if row.latency_ms.reason), "not measured")
    wanted = default_provider(here.device.kind)
    return [], f"{here.target.reason}, but the rows were measured with {measured_with[0]}: {wanted} is needed"


def rows_there(rows: Sequence[Row], kind: Kind) -> list[Row]:
    """The rows that stand for a present device: what was measured on its kind of processor, by any provider.

    Of its usual provider also what failed: that is a fact about the device, and no estimate replaces it.

    Args:
        rows: of the host.
        kind: of the device.
    """
    usual = default_provider(kind)
    there = [row for row in rows if provider_facts(row.provider).kind == kind]
    return [row for row in there if row.latency_ms.status == "measured" or row.provider == usual]


def _report(here: _Profiling, rows: list[Row], known: list[Evidence]) -> Report:
    target, manifest = here.target, here.bundle.manifest
    limits, options = here.request.limits, here.options
    left_out = _left_out(here)
    known = [evidence for evidence in known if evidence.artifact not in left_out]
    verdict = unjudged("interrupted") if here.is_interrupted else check_budget(known, limits)
    found = _searched(here, rows, known)
    if found is not None:
        verdict = verdict_of_pick(found, known, limits)
    estimated = {row.precision for row in rows if row.latency_ms.status == "estimated"}
    report = Report(
        device=here.device.name,
        device_title=here.device.title,
        host={
            **describe_host(),
            "gpu": target.gpu.name if target.gpu is not None else None,
            "threads": max(here.request.threads),
            "versions": library_versions(),
        },
        on_target=target.present,
        run=manifest.run,
        bundle=str(here.bundle.folder),
        created=now(),
        synthetic=manifest.synthetic,
        leaks=manifest.leaks,
        parameters=manifest.parameters,
        rows=tuple(rows),
        verdict=verdict,
        notes=tuple(_notes(here, known, verdict)),
        # For which kind of device rows were estimated, and how wrong the estimator was where it could be checked.
        estimated_for=here.device.kind if estimated else None,
        estimate_error=options.estimate_error if estimated else None,
        estimate_evidence=estimate_evidence(here.device, options.estimate_error, estimated),
        sizes=tuple(_size_parts(artifact) for artifact in here.request.artifacts if artifact.size_bytes),
        search=found,
        left_out=left_out,
        question=here.request.question,
        profile=here.device.model_dump(mode="json", by_alias=True, exclude={"calibration"}),
        subject=subject_of(manifest, here.request.artifacts),
    )
    return seal_report(report)


def _searched(here: _Profiling, rows: list[Row], known: list[Evidence]) -> Search | None:
    """What was searched for, with what targets found of artifacts that export could not run."""
    if here.options.search is None:
        return None
    manifest, records = here.bundle.manifest, here.bundle.records
    here.notes.extend(filter(None, (record.why_refused(manifest) for record in records.records)))
    of_targets = records.completing(manifest, here.device.match)
    found = search(manifest, rows, known, here.request.limits, here.options.search, of_targets)
    gpu = here.target.gpu.uuid if here.target.gpu is not None else None
    choice = check_options(here.options.search, manifest)
    return settle(found, choice, Grounds(here.bundle, here.request, gpu, here.progress))


def _notes(here: _Profiling, known: list[Evidence], verdict: Verdict) -> Iterator[str]:
    of_judging = shape_notes(here.request.limits) if here.is_interrupted else []
    yield from (note for note in (*here.request.notes, *here.notes) if note not in of_judging)
    if not here.target.present:
        of_device = "no row was estimated for it" if here.is_interrupted else "rows `device` are estimated for it"
        yield f"{here.target.reason}: rows `host` were measured here, {of_device}"
    left_out = _left_out(here)
    for reason in dict.fromkeys(left_out.values()):
        names = ", ".join(name for name, why in left_out.items() if why == reason)
        yield f"left out of the verdict, because no {here.device.title} can ever run it: {names}: {reason}"
    if here.is_interrupted:
        pass  # the note of the interruption says that nothing was judged
    elif left_out and not known:
        yield "nothing was judged: no artifact can ever run on this device"
    else:
        yield from unlimited_notes(verdict)
    spared = spared_of_latency(known, here.request.limits)
    if spared:
        yield f"not judged per decoded token, because other artifacts decode: {', '.join(spared)}"
    if here.bundle.manifest.synthetic:
        yield "the model was trained on generated text"


def _size_parts(artifact: ArtifactManifest) -> SizeParts:
    """What the artifact's bytes are for; all of them are `other` where export did not count (engines)."""
    parts, size_bytes = artifact.parts_bytes, artifact.size_bytes or 0
    known = {name: parts.get(name, 0) for name in ("embeddings", "block", "heads")}
    return SizeParts(artifact=artifact.id, **known, other=max(0, size_bytes - sum(known.values())))
