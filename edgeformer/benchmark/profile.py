"""Profile: measure a bundle's artifacts on this host, estimate them for an absent device, and judge its budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, Silent, bar
from edgeformer.artifacts.report import Comparison, Report, Row, Search, SizeParts, Verdict, seal_report
from edgeformer.benchmark.measurement import (
    CheckedArtifact,
    MeasureSpec,
    MeasuringInterrupted,
    measure_artifact,
    phases_of,
    unavailable_row,
)
from edgeformer.benchmark.paired_run import WARMUP_RULES, PairRules, SideError, compare_pair
from edgeformer.benchmark.recorded_report import subject_of
from edgeformer.benchmark.request import ProfileOptions, Request, Target, find_target, resolve, shape_notes
from edgeformer.benchmark.search import (
    NOISE,
    Choice,
    check_options,
    close_pair,
    search,
    verdict_of_pick,
    with_tie_break,
)
from edgeformer.benchmark.verdict import Evidence, check_budget, exempt_from_latency, unjudged, unlimited_notes
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

__all__ = ["ProfileInterrupted", "ProfileOptions", "profile_bundle"]

_TIE_BREAK_S, _TIE_BREAK_ROWS = 60.0, 20
"""No round of a tie break begins later, nor later than this many times what a row takes: a quick look remains one."""


@dataclass(frozen=True)
class _Profiling:
    """A bundle, the device that it is profiled for, and what is measured and noted so far."""

    bundle: Bundle
    device: DeviceProfile
    target: Target
    options: ProfileOptions
    request: Request
    progress: Progress
    notes: list[str] = field(default_factory=list)
    measured: list[Row] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def gpu_uuid(self) -> str | None:
        return self.target.gpu.uuid if self.target.gpu is not None else None


class ProfileInterrupted(KeyboardInterrupt):
    """Ctrl-C while a bundle was profiled; ``report`` has the rows measured before it, of which nothing was judged."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def profile_bundle(
    location: Location, device: DeviceProfile, options: ProfileOptions, progress: Progress | None = None
) -> Report:
    """Measure the bundle's artifacts on this host and judge them for a device.

    All files are checked before anything is measured. A failure after that (an artifact that crashes its process, a
    shape that it refuses) becomes a row with the reason; the other rows are kept.

    Args:
        location: the bundle, and the artifact that the user named, if any.
        device: to judge the artifacts for.
        options: what to measure and to judge.
        progress: shows what is measured.

    Raises:
        ArtifactError: the bundle, or a file of it that is needed, is missing, truncated or changed.
        InputError: an unknown artifact, or a shape that the model cannot take.
        ProfileInterrupted: Ctrl-C; it has a report of what was measured before.
    """
    bundle = location.open_bundle()
    request = resolve(options, device, bundle.manifest, location.artifact)
    profiling = _Profiling(bundle, device, find_target(device), options, request, progress or Silent())
    try:
        checked_artifacts = [CheckedArtifact.of(bundle, artifact) for artifact in request.artifacts]
        rows: list[Row] = []
        evidence: list[Evidence] = []
        for checked in checked_artifacts:
            artifact_rows, artifact_evidence = _profile_artifact(profiling, checked)
            rows += artifact_rows
            evidence.append(artifact_evidence)
        profiling.notes.extend(card_notes(bundle, device, profiling.target, rows))
        return _report(profiling, rows, evidence)
    except KeyboardInterrupt:
        measured = profiling.measured
        profiling.notes.append(
            f"interrupted: {len(measured)} rows of {len({row.artifact for row in measured})} of "
            f"{len(request.artifacts)} artifacts were measured; nothing was judged"
        )
        interrupted = replace(profiling, options=replace(options, search=None), is_interrupted=True)
        raise ProfileInterrupted(_report(interrupted, measured, [])) from None


def _profile_artifact(profiling: _Profiling, checked: CheckedArtifact) -> tuple[list[Row], Evidence]:
    """Return the rows of one artifact, of the host and of an absent device, and its evidence for the verdict."""
    artifact, device, request = checked.artifact, profiling.device, profiling.request
    rows = _measure(profiling, checked)
    device_rows: list[Row] = []
    reason = profiling.target.reason
    if profiling.target.present:
        device_rows = rows_of_kind(rows, device.kind)
        reason = f"{request.limits.batch}×{request.limits.seq} was not measured"
        measured = [row for row in rows if row.latency_ms.status == "measured"]
        if not device_rows and measured:
            reason = f"{profiling.target.reason}, but the rows were measured with {measured[0].provider}: "
            reason += f"{default_provider(device.kind)} is needed"
        elif not device_rows:
            reason = next((row.latency_ms.reason for row in rows if row.latency_ms.reason), "not measured")
    if not device_rows:
        if profiling.target.present:
            profiling.notes.append(f"{artifact.id}: {reason}; rows `device` are estimated instead")
        phases = phases_of(artifact, profiling.bundle.task)
        items = [(phase, *shape) for shape in request.shapes for phase in phases]
        with bar(profiling.progress, f"estimating {artifact.id} on {device.name}", None):
            device_rows = estimate(profiling.bundle, artifact, device, items)
        rows += device_rows
    # Without caches, every token of a text costs a pass over all of it.
    whole_texts = artifact.role in ("full", "exit")
    return rows, Evidence(artifact.id, checked.size_bytes, device_rows, reason, whole_texts)


def _measure(profiling: _Profiling, checked: CheckedArtifact) -> list[Row]:
    """Return the host's rows of one artifact, for every runtime and every number of threads."""
    request, artifact = profiling.request, checked.artifact
    rows: list[Row] = []
    providers = request.providers(artifact)
    if not providers:
        profiling.notes.append(f"{artifact.id}: left out: {request.runtime} does not open it")
    for provider in providers:
        refusal = cannot_run(artifact, provider)
        if refusal is not None:
            profiling.progress.message(f"{artifact.id}: not measured: {refusal}")
            name = opener_of(artifact, provider).provider(artifact, provider)
            rows += [
                unavailable_row(artifact, checked.size_bytes, ("steady", *shape), name, "host", refusal)
                for shape in request.shapes
            ]
            continue
        for threads in request.threads:
            spec = MeasureSpec(
                checked=checked,
                provider=provider,
                threads=threads,
                phases=phases_of(artifact, profiling.bundle.task),
                shapes=request.shapes,
                rules=request.rules,
                gpu_uuid=profiling.gpu_uuid,
            )
            try:
                measured = measure_artifact(spec, profiling.progress)
            except MeasuringInterrupted as error:
                profiling.measured.extend(error.rows)
                raise
            profiling.measured.extend(measured)
            rows += measured
            if any(on_gpu(row.provider) for row in measured):
                break  # CPU threads make no difference there
    return rows


def rows_of_kind(rows: Sequence[Row], kind: Kind) -> list[Row]:
    """Return the host's rows that stand for a present device: what its kind of processor measured, by any provider.

    With the device's usual provider also rows that failed: that is a fact about the device, and no estimate replaces
    it.
    """
    usual = default_provider(kind)
    of_kind = [row for row in rows if provider_facts(row.provider).kind == kind]
    return [row for row in of_kind if row.latency_ms.status == "measured" or row.provider == usual]


def card_notes(bundle: Bundle, device: DeviceProfile, target: Target, rows: Sequence[Row]) -> Iterator[str]:
    """Yield how to measure on a present card what ONNX Runtime computed on the processor."""
    measured = [row for row in rows if row.where == "host" and row.latency_ms.status == "measured"]
    on_card = list(dict.fromkeys(row.artifact for row in measured if on_gpu(row.provider)))
    on_cpu = list(dict.fromkeys(row.artifact for row in measured if row.artifact not in on_card))
    if not target.present or device.kind != "cuda" or not on_cpu:
        return
    result = "nothing was measured on the card itself"
    if on_card:
        result = f"measured on the card itself: {', '.join(on_card)}"
    yield f"{result}; {', '.join(on_cpu)} ran on the processor: {how_to_use_card()}"
    if on_card:
        return
    for builder in all_builders():
        plan = builder.plan(device) if builder.needs_device else None
        if isinstance(plan, BuildTarget) and not any(artifact.format == plan.format for artifact in bundle.built()):
            name = "BUNDLE" if bundle.manifest.wrapped is not None else bundle.name
            command = f"edgeformer export {name} --fp16 {builder.flag} --target {device.name}"
            yield f"engines run on the card without that ONNX Runtime, and can be built here: {command}"
            return


def _report(profiling: _Profiling, rows: Sequence[Row], evidence: list[Evidence]) -> Report:
    bundle, device, target, request = profiling.bundle, profiling.device, profiling.target, profiling.request
    manifest, limits, options = bundle.manifest, request.limits, profiling.options
    # No such device runs these artifacts, so they say nothing about a model on it.
    refusals = {artifact.id: never_runs(artifact, device) for artifact in request.artifacts}
    left_out = {name: reason for name, reason in refusals.items() if reason is not None}
    evidence = [artifact for artifact in evidence if artifact.artifact not in left_out]
    rows = [
        row.model_copy(update={"inputs": bundle.task.input_shapes(bundle.data, row.batch, row.seq)}) for row in rows
    ]
    verdict = unjudged("interrupted") if profiling.is_interrupted else check_budget(evidence, limits)
    result: Search | None = None
    if options.search is not None:
        records = bundle.records
        profiling.notes.extend(filter(None, (record.why_refused(manifest) for record in records.records)))
        result = search(manifest, rows, evidence, limits, options.search, records.completing(manifest, device.match))
        choice = check_options(options.search, manifest)
        result = break_tie(result, choice, bundle, request, profiling.gpu_uuid, profiling.progress)
        verdict = verdict_of_pick(result, evidence, limits)
    estimated = {row.precision for row in rows if row.latency_ms.status == "estimated"}
    report = Report(
        device=device.name,
        device_title=device.title,
        host={
            **describe_host(),
            "gpu": target.gpu.name if target.gpu is not None else None,
            "threads": max(request.threads),
            "versions": library_versions(),
        },
        on_target=target.present,
        run=manifest.run,
        bundle=str(bundle.folder),
        created=now(),
        synthetic=manifest.synthetic,
        leaks=manifest.leaks,
        parameters=manifest.parameters,
        rows=tuple(rows),
        verdict=verdict,
        notes=tuple(_notes(profiling, evidence, verdict, left_out)),
        estimated_for=device.kind if estimated else None,
        estimate_error=options.estimate_error if estimated else None,
        estimate_evidence=estimate_evidence(device, options.estimate_error, estimated),
        sizes=tuple(_size_parts(artifact) for artifact in request.artifacts if artifact.size_bytes),
        search=result,
        left_out=left_out,
        question=request.question,
        profile=device.model_dump(mode="json", by_alias=True, exclude={"calibration"}),
        subject=subject_of(manifest, request.artifacts),
    )
    return seal_report(report)


def break_tie(
    result: Search, choice: Choice, bundle: Bundle, request: Request, gpu_uuid: str | None, progress: Progress
) -> Search:
    """Decide the pick of a search by measuring its two fastest candidates in turns, if they are close.

    A candidate's time is the median of two processes; the next candidate's was measured minutes later. Candidates that
    the gate would call no different must not be picked by such times.
    """
    positions = close_pair(result)
    if positions is None:
        return result

    def spec(artifact_id: str, provider: str, threads: int | None) -> MeasureSpec:
        artifact, limits = bundle.artifact(artifact_id), request.limits.ranked
        return MeasureSpec(
            kind="pair",
            checked=CheckedArtifact.of(bundle, artifact),
            provider=provider,
            threads=threads or request.threads[0],
            phases=("steady" if artifact.role in ("full", "exit") else request.limits.phase,),
            shapes=((limits.batch, limits.seq),),
            rules=replace(request.rules, warmup_max_s=min(request.rules.warmup_max_s, WARMUP_RULES.warmup_max_s)),
            gpu_uuid=gpu_uuid,
        )

    first, second = (result.candidates[position] for position in positions)
    rules = PairRules(longest_s=min(_TIE_BREAK_S, _TIE_BREAK_ROWS * request.rules.min_s), max_slowdown=2 * NOISE)
    try:
        with bar(progress, f"comparing {first.artifact} with {second.artifact}", None, "round"):
            pairing = compare_pair(
                (
                    spec(first.artifact, first.provider, first.threads),
                    spec(second.artifact, second.provider, second.threads),
                ),
                rules,
                lambda _: progress.advance(1),
            )
    except SideError as error:
        progress.message(f"not compared in turns: {error}")
        return result
    comparison = Comparison(
        first=positions[0],
        second=positions[1],
        found=pairing.slowdown.change(rules.max_slowdown),
        change=pairing.slowdown.middle,
        rounds=len(pairing.log_ratios),
        **pairing.slowdown.ends,
    )
    return with_tie_break(result, choice, comparison)


def _notes(
    profiling: _Profiling, evidence: list[Evidence], verdict: Verdict, left_out: dict[str, str]
) -> Iterator[str]:
    request, is_interrupted = profiling.request, profiling.is_interrupted
    unused = shape_notes(request.limits) if is_interrupted else []
    yield from (note for note in (*request.notes, *profiling.notes) if note not in unused)
    if not profiling.target.present:
        estimates = "no row was estimated for it" if is_interrupted else "rows `device` are estimated for it"
        yield f"{profiling.target.reason}: rows `host` were measured here, {estimates}"
    for reason in dict.fromkeys(left_out.values()):
        names = ", ".join(name for name, refusal in left_out.items() if refusal == reason)
        yield f"left out of the verdict, because no {profiling.device.title} can ever run it: {names}: {reason}"
    if not is_interrupted:  # the note of the interruption says that nothing was judged
        if left_out and not evidence:
            yield "nothing was judged: no artifact can ever run on this device"
        else:
            yield from unlimited_notes(verdict)
    exempt = exempt_from_latency(evidence, request.limits)
    if exempt:
        yield f"not judged per decoded token, because other artifacts decode: {', '.join(exempt)}"
    if profiling.bundle.manifest.synthetic:
        yield "the model was trained on generated text"


def _size_parts(artifact: ArtifactManifest) -> SizeParts:
    """Return what the artifact's bytes are for; all are `other` if export did not count (engines)."""
    parts, size_bytes = artifact.parts_bytes, artifact.size_bytes or 0
    counted = {name: parts.get(name, 0) for name in ("embeddings", "block", "heads")}
    return SizeParts(artifact=artifact.id, **counted, other=max(0, size_bytes - sum(counted.values())))
