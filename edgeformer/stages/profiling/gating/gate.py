"""A bundle against the one that it shall replace: what their manifests say, and both measured in turns in one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from edgeformer.backends import cannot_run
from edgeformer.bundle import Bundle, bundle_around
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.gate import Gate, GateCheck, GateStatus
from edgeformer.formats.golden import GOLDEN_FILE
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.progress import Progress, Silent, bar
from edgeformer.formats.report import Report
from edgeformer.formats.report_file import read_report
from edgeformer.machine.host import describe_host, now
from edgeformer.run import Location
from edgeformer.stages.profiling.gating.files import Both, GateOptions, file_checks
from edgeformer.stages.profiling.gating.pacing import PaceSpec
from edgeformer.stages.profiling.gating.pair import Pair
from edgeformer.stages.profiling.gating.timed import RULES, timed_checks
from edgeformer.stages.profiling.messages import CheckedArtifact, Item, MeasureSpec, phases_of
from edgeformer.stages.profiling.request import ProfileOptions, Request, find_target, resolve

_STATUSES: tuple[GateStatus, ...] = ("fail", "undecided", "pass")


@dataclass(frozen=True)
class _Gating:
    """What is asked. ``named``: single artifacts of the candidate, not all that it has."""

    baseline: Bundle
    candidate: Bundle
    request: Request
    items: tuple[tuple[int, int], ...]
    options: GateOptions
    gpu_uuid: str | None
    progress: Progress
    named: bool


def named_baseline(path: Path) -> Bundle:
    """The bundle that a report was measured on, which must still be what it was.

    Args:
        path: of the report.

    Raises:
        ArtifactError: the report is damaged, its bundle is not there, or another one lies in its place.
    """
    report = read_report(path)
    beside = path.resolve().parent.parent  # reports lie in a folder of the run, or of the bundle
    problem = f"its bundle {report.bundle} is not here; name the bundle's folder instead"
    for place in (beside / Path(report.bundle).name, Path(report.bundle), beside):
        if bundle_around(place / GOLDEN_FILE) != place.resolve():
            continue
        bundle = Bundle.open(place)
        changed = _changed(report, bundle)
        if changed is None:
            return bundle
        problem = (
            f"{changed!r} in {place} is not the one that was measured; keep the baseline's bundle somewhere else, and "
            "name its folder"
        )
    raise ArtifactError(f"{path}: {problem}")


def _changed(report: Report, bundle: Bundle) -> str | None:
    """An artifact of the report that the bundle has not, or another one of that name."""
    told = report.subject.artifacts if report.subject is not None else {}
    own = {artifact.id: artifact.sha256 for artifact in bundle.artifacts}
    return next((name for name, artifact in told.items() if own.get(name) != artifact.sha256), None)


def gate_bundles(
    location: Location,
    baseline: Bundle,
    device: DeviceProfile,
    asked: tuple[ProfileOptions, GateOptions],
    progress: Progress | None = None,
) -> Gate:
    """Hold a bundle against its baseline, on this host.

    Args:
        location: the bundle, and the one artifact of it that was named, if one was.
        baseline: the bundle that it shall replace.
        device: whose budget names the shape, where ``asked`` names none.
        asked: shapes, threads and artifacts; and what the candidate may be worse by.
        progress: where to say what is going on.

    Raises:
        ArtifactError: a bundle, or a file of it that is needed, is missing, truncated or changed.
        InputError: the two are of different tasks, or have no artifact in common.
    """
    candidate, (options, gate) = location.open_bundle(), asked
    if candidate.manifest.task != baseline.manifest.task:
        raise InputError(f"--against: {baseline.manifest.run!r} is of another task than {candidate.manifest.run!r}")
    request, target = resolve(options, device, candidate.manifest, location.artifact), find_target(device)
    at = request.limits
    named = product(options.batches or (at.batch,), options.seqs or (at.seq,))
    items = tuple(dict.fromkeys(candidate.task.fit_shape(candidate.data, *shape) for shape in named))
    gpu = target.gpu.uuid if target.gpu is not None else None
    alone = bool(options.artifacts) or location.artifact is not None
    here = _Gating(baseline, candidate, request, items, gate, gpu, progress or Silent(), alone)
    began = time.perf_counter()
    chosen = _in_both(here)
    checks = [*_lost(here), *_checks(here, chosen)]
    found = {check.status for check in checks}
    return Gate(
        status=next((status for status in _STATUSES if status in found), "undecided"),
        candidate=str(candidate.folder),
        baseline=str(baseline.folder),
        host=describe_host(),
        created=now(),
        seconds=time.perf_counter() - began,
        error=gate.error,
        checks=tuple(checks),
        notes=tuple(_notes(here, chosen)),
    )


def _in_both(here: _Gating) -> list[Both]:
    old = {artifact.id: artifact for artifact in here.baseline.artifacts if artifact.status == "built"}
    both = [Both(old[one.id], one) for one in here.request.artifacts if one.id in old]
    missing = [one.id for one in here.request.artifacts if one.id not in old]
    if not both or (here.named and missing):
        has = ", ".join(old) or "nothing"
        raise InputError(f"--against: the baseline {here.baseline.folder} has no {', '.join(missing)}; it has {has}")
    return both


def _lost(here: _Gating) -> Iterator[GateCheck]:
    """What the baseline has and the candidate does not; where single artifacts are asked for, only they matter."""
    asked = {artifact.id for artifact in here.request.artifacts}
    whole = asked == {one.id for one in here.candidate.artifacts if one.status == "built"}
    for artifact in here.baseline.artifacts if whole else ():
        if artifact.status == "built" and artifact.id not in asked:
            why = _why_lost(here.candidate, artifact)
            yield GateCheck(name="presence", artifact=artifact.id, status="fail", reason=why)


def _why_lost(candidate: Bundle, artifact: ArtifactManifest) -> str:
    for one in candidate.artifacts:
        if one.id == artifact.id:
            return f"{one.status}: {one.reason or 'no reason given'}"
    return "the candidate does not have it"


def _checks(here: _Gating, chosen: Sequence[Both]) -> Iterator[GateCheck]:
    # All files first: a damaged one ends everything before anything is measured.
    opened = [
        (both, [CheckedArtifact.of(here.baseline, both.baseline), CheckedArtifact.of(here.candidate, both.candidate)])
        for both in chosen
    ]
    task = here.candidate.task
    ways = [(both, checked, way) for both, checked in opened for way in here.request.providers(both.candidate)]
    timed = [
        (both, checked, way, item)
        for both, checked, way in ways
        for shape in here.items
        for item in [(phase, *shape) for phase in phases_of(both.candidate, task)]
        if cannot_run(both.candidate, way) is None
    ]
    for both, _ in opened:
        yield from file_checks(here.baseline.manifest, here.candidate.manifest, both, here.options)
        if not here.request.providers(both.candidate):
            status: GateStatus = "undecided" if here.named else "unknown"
            why = f"{here.request.runtime} does not open it"
            yield GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=why)
    for both, _, way in ways:
        if (refusal := cannot_run(both.candidate, way)) is not None:
            told = _refused(both, way, refusal, matters=here.named or not timed)
            yield told.model_copy(update={"provider": _named_way(here, way)})
    for both, checked, way, item in timed:
        for check in _timed(here, both, _specs(here, checked, way, item), here.options.error / len(timed)):
            yield check.model_copy(update={"provider": _named_way(here, way)})


def _named_way(here: _Gating, provider: str | None) -> str | None:
    """What a check says that it was computed with: nothing, where nobody asked for a runtime."""
    return provider if here.request.runtime is not None else None


def _refused(both: Both, provider: str | None, refusal: str, matters: bool) -> GateCheck:
    """The latency of a candidate that this machine cannot run.

    Args:
        both: the artifact.
        provider: that was to compute it; None: what fits.
        refusal: why it cannot.
        matters: somebody asked for this artifact, or no other one was timed.
    """
    status: GateStatus = "undecided" if matters else "unknown"
    reason = f"this machine can run neither: {refusal}"
    if cannot_run(both.baseline, provider) is None:
        status, reason = "fail", f"this machine can run the baseline, but not the candidate: {refusal}"
    return GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=reason)


def _specs(here: _Gating, checked: Sequence[CheckedArtifact], provider: str | None, item: Item) -> Pair:
    """How baseline and candidate are opened; ``provider``: that computes both."""
    threads, rules = here.request.threads[0], here.options.rules or RULES
    first, second = (
        PaceSpec(
            threads=threads,
            gpu_uuid=here.gpu_uuid,
            item=item,
            measure=MeasureSpec(
                checked=one,
                provider=provider,
                threads=threads,
                shapes=(item[1:],),
                rules=rules,
                gpu_uuid=here.gpu_uuid,
            ),
        )
        for one in checked
    )
    return first, second


def _timed(here: _Gating, both: Both, pair: Pair, error: float) -> Iterator[GateCheck]:
    """Latency and memory of one artifact at one shape; ``error``: its part of the run's."""
    phase, batch, seq = pair[0].item
    at = {"phase": phase, "batch": batch, "seq": seq}
    with bar(here.progress, f"comparing {both.candidate.id} at {batch}×{seq}", None, "round"):
        found = timed_checks(both, pair, here.options, error, lambda _: here.progress.advance(1))
    for check in found:
        yield check.model_copy(update=at)


def _notes(here: _Gating, chosen: Sequence[Both]) -> Iterator[str]:
    yield "both were measured in turns on this host; a ratio of another processor may differ"
    if len(here.request.threads) > 1:
        yield f"measured with {here.request.threads[0]} threads only, the first of those asked for"
    if all(both.baseline.sha256 == both.candidate.sha256 for both in chosen):
        yield "baseline and candidate are the same files"
    asked, known = here.request.artifacts, {both.candidate.id for both in chosen}
    for artifact in asked:
        if artifact.id not in known:
            yield f"{artifact.id}: new, the baseline does not have it; nothing to compare"
