"""What is found by running both: latency and memory of one artifact at one shape, as checks of the gate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median_high

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.gate import Gate, GateCheck, GateStatus
from edgeformer.artifacts.golden import GOLDEN_FILE
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, Silent, bar
from edgeformer.artifacts.report import Report, checksum_notes, read_report
from edgeformer.benchmark.gate_checks import ArtifactPair, GateOptions, file_checks, memory_check
from edgeformer.benchmark.gate_scores import common_rows, score_check
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.messages import CheckedArtifact, Item, MeasureSpec, phases_of
from edgeformer.benchmark.paired_run import Pair, Pairing, PairRules, SideError, compare_pair
from edgeformer.benchmark.paired_worker import PaceSpec
from edgeformer.benchmark.request import ProfileOptions, Request, find_target, resolve
from edgeformer.benchmark.sequential import MOST_ROUNDS, fewest_rounds
from edgeformer.bundle import Bundle, bundle_around
from edgeformer.run import Location
from edgeformer.runtimes import cannot_run
from edgeformer.system.host import describe_host, now

RULES = replace(MeasureRules(), warmup_max_s=1.5)
"""As for any row; but a process that does not settle goes on, for the other one meets the same machine."""


def timed_checks(
    both: ArtifactPair,
    pair: Pair,
    options: GateOptions,
    error: float,
    advance: Callable[[Pairing], None] = lambda _: None,
) -> list[GateCheck]:
    """Measure both in turns.

    Args:
        both: the artifact, which the checks name.
        pair: how baseline and candidate are opened.
        options: what the candidate may be worse by, and how long to measure.
        error: the chance that an interval of this pair misses.
        advance: is told after every round.

    Returns:
        Latency and memory; of what cannot be measured latency alone. They name no shape.
    """
    rules = PairRules(longest_s=options.longest_s, most=options.max_slowdown, error=error)
    try:
        found = compare_pair(pair, rules, advance)
    except SideError as problem:
        # A candidate that does not run is worse than any; without a baseline there is nothing to compare with.
        status: GateStatus = "fail" if problem.candidate else "undecided"
        return [GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=str(problem))]
    checks = [_latency(found, both, rules)]
    if options.max_memory_growth is not None:
        checks.append(memory_check(both, options.max_memory_growth, found.peaks))
    return checks


def _latency(found: Pairing, both: ArtifactPair, rules: PairRules) -> GateCheck:
    known, rounds = found.known, len(found.log_ratios)
    decision = known.decision(rules.most)
    reason = f"{rounds} rounds of two fresh processes"
    if found.needs_s is not None:
        reason = (
            f"{fewest_rounds(rules.error)} rounds are the fewest that say anything, and would take about "
            f"{found.needs_s / 60:.0f} minutes, as the first {rounds} did; compare at a shorter text or a smaller batch"
        )
    elif decision == "undecided":
        room = "all that are ever made" if rounds >= MOST_ROUNDS else f"what {rules.longest_s:.0f} s have room for"
        room = "the fewest that say anything" if rounds <= fewest_rounds(rules.error) else room
        reason += f", which are {room}: the machine is too noisy, or the change too close to what is allowed"
    if found.unsettled:
        reason += f"; {found.unsettled} of {2 * rounds} processes did not settle"
    if found.stumbles:
        reason += f"; measured once more after {', and '.join(found.stumbles)}"
    facts = {"name": "latency", "artifact": both.candidate.id, "status": decision, "unit": "ms", "limit": rules.most}
    facts |= {"found": known.change(rules.most), "change": known.middle, "rounds": rounds, "reason": reason}
    facts |= {"baseline": _typical(found.baseline_ms), "candidate": _typical(found.candidate_ms)}
    return GateCheck.model_validate({**facts, **known.ends, "log_ratios": found.log_ratios}, strict=False)


def _typical(values: Sequence[float]) -> float | None:
    return median_high(values) if values else None


# The gate: compare a candidate bundle with its baseline, by their manifests and measured in turns in one run.


_STATUSES: tuple[GateStatus, ...] = ("fail", "undecided", "pass")


@dataclass(frozen=True)
class _Gating:
    """One comparison of two bundles.

    Attributes:
        request: shapes, threads and runtime, resolved for the artifacts that both have.
        items: shapes to time.
        pairs: the artifacts that both have and that are compared.
        is_selection: single artifacts were asked for, not all.
    """

    baseline: Bundle
    candidate: Bundle
    request: Request
    items: tuple[tuple[int, int], ...]
    pairs: tuple[ArtifactPair, ...]
    options: GateOptions
    gpu_uuid: str | None
    progress: Progress
    is_selection: bool


def named_baseline(path: Path) -> tuple[Bundle, list[str]]:
    """Return the bundle that a report was measured on, which must be unchanged, and notes on the two.

    Args:
        path: of the report.

    Raises:
        ArtifactError: the report is damaged or edited, its bundle is not there, or another one lies in its place.
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
            return bundle, checksum_notes(path, report, bundle.manifest)
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
    notes: Sequence[str] = (),
) -> Gate:
    """Compare a bundle with its baseline, on this host.

    Args:
        location: the bundle, and the one artifact of it that was named, if one was.
        baseline: the bundle to compare it with.
        device: whose budget names the shape, where ``asked`` names none.
        asked: shapes, threads and artifacts; and what the candidate may be worse by.
        progress: where to say what is going on.
        notes: on the baseline, for the gate.

    Raises:
        ArtifactError: a bundle, or a file of it that is needed, is missing, truncated or changed.
        InputError: the two are of different tasks, neither has a named artifact, or the file of ``eval_data`` cannot
            be used.
    """
    candidate, (options, gate) = location.open_bundle(), asked
    if candidate.manifest.task != baseline.manifest.task:
        raise InputError(f"--against: {baseline.manifest.run!r} is of another task than {candidate.manifest.run!r}")
    if gate.eval_data is not None and not candidate.task.reads_text:
        raise InputError(
            f"--eval-data: {candidate.name} is a {candidate.task.noun}, which has no score on labelled rows"
        )
    began = time.perf_counter()
    named = options.artifacts or ((location.artifact,) if location.artifact is not None else ())
    checks, pairs, presence_notes = _presence(baseline, candidate, named)
    notes = [*notes, *presence_notes]
    if pairs:
        options = replace(options, artifacts=tuple(both.candidate.id for both in pairs))
        request, target = resolve(options, device, candidate.manifest), find_target(device)
        at = request.limits
        shapes = product(options.batches or (at.batch,), options.seqs or (at.seq,))
        items = tuple(dict.fromkeys(candidate.task.fit_shape(candidate.data, *shape) for shape in shapes))
        gpu = target.gpu.uuid if target.gpu is not None else None
        gating = _Gating(
            baseline, candidate, request, items, tuple(pairs), gate, gpu, progress or Silent(), is_selection=bool(named)
        )
        checks += _checks(gating)
        notes += _notes(gating)
    if not checks:
        notes.append("nothing was compared: no artifact is built in both bundles; the notes above say why")
    statuses = {check.status for check in checks}
    return Gate(
        status=next((status for status in _STATUSES if status in statuses), "undecided"),
        candidate=str(candidate.folder),
        baseline=str(baseline.folder),
        host=describe_host(),
        created=now(),
        seconds=time.perf_counter() - began,
        error=gate.error,
        checks=tuple(checks),
        notes=tuple(notes),
    )


def _presence(
    baseline: Bundle, candidate: Bundle, named: Sequence[str]
) -> tuple[list[GateCheck], list[ArtifactPair], list[str]]:
    """Compare which artifacts were built.

    Args:
        baseline: the bundle that is to be replaced.
        candidate: the other.
        named: artifacts that were asked for; empty: all that either has.

    Returns:
        A check for each artifact that cannot be compared, the artifacts that can, and notes.

    Raises:
        InputError: a named artifact is in neither bundle, or there is none at all.
    """
    before = {artifact.id: artifact for artifact in baseline.artifacts}
    after = {artifact.id: artifact for artifact in candidate.artifacts}
    have = ", ".join(dict.fromkeys((*before, *after)))
    if not have:
        raise InputError(f"--against: neither {baseline.folder} nor {candidate.folder} has an artifact")
    checks: list[GateCheck] = []
    pairs: list[ArtifactPair] = []
    notes: list[str] = []
    for name in dict.fromkeys(named or (*before, *after)):
        if name not in before and name not in after:
            raise InputError(f"--artifact {name}: neither bundle has it; they have {have}")
        old, new = before.get(name), after.get(name)
        is_old, is_new = (artifact is not None and artifact.status == "built" for artifact in (old, new))
        if is_old and is_new:
            assert old is not None and new is not None
            pairs.append(ArtifactPair(old, new))
        elif not is_new and (is_old or named):
            checks.append(GateCheck(name="presence", artifact=name, status="fail", reason=_absence("candidate", new)))
        elif is_new and named:
            reason = f"{_absence('baseline', old)}; there is nothing to compare with"
            checks.append(GateCheck(name="presence", artifact=name, status="undecided", reason=reason))
        elif is_new:
            notes.append(f"{name}: new; {_absence('baseline', old)}, so there is nothing to compare with")
        else:
            absences = "; ".join((_absence("baseline", old), _absence("candidate", new)))
            notes.append(f"{name}: not compared; {absences}")
    return checks, pairs, notes


def _absence(side: str, artifact: ArtifactManifest | None) -> str:
    if artifact is None:
        return f"the {side} does not have it"
    return f"{artifact.status} in the {side}: {artifact.reason or 'its manifest gives no reason'}"


def _checks(gating: _Gating) -> list[GateCheck]:
    """Make all checks of the artifacts that both have. A damaged file ends it before anything is measured."""
    opened = [
        (
            both,
            [CheckedArtifact.of(gating.baseline, both.baseline), CheckedArtifact.of(gating.candidate, both.candidate)],
        )
        for both in gating.pairs
    ]
    checks = [check for both in gating.pairs for check in file_checks(both, gating.options)]
    checks += _score_checks(gating)
    task = gating.candidate.task
    ways = [(both, checked, way) for both, checked in opened for way in gating.request.providers(both.candidate)]
    timed = [
        (both, checked, way, item)
        for both, checked, way in ways
        for shape in gating.items
        for item in [(phase, *shape) for phase in phases_of(both.candidate, task)]
        if cannot_run(both.candidate, way) is None
    ]
    for both in gating.pairs:
        if not gating.request.providers(both.candidate):
            reason = f"{gating.request.runtime} does not open it"
            checks.append(GateCheck(name="latency", artifact=both.candidate.id, status="undecided", reason=reason))
    for both, _, way in ways:
        if (refusal := cannot_run(both.candidate, way)) is not None:
            check = _refused(gating, both, way, refusal)
            checks.append(check.model_copy(update={"provider": _named_way(gating, way)}))
    for both, checked, way, item in timed:
        for check in _timed(gating, both, _specs(gating, checked, way, item), gating.options.error / len(timed)):
            checks.append(check.model_copy(update={"provider": _named_way(gating, way)}))
    return checks


def _score_checks(gating: _Gating) -> Iterator[GateCheck]:
    most = gating.options.max_score_loss
    if most is None or not gating.candidate.task.reads_text:
        return
    rows = common_rows(gating.baseline, gating.candidate, gating.options.eval_data)
    for both in gating.pairs:
        for provider in gating.request.providers(both.candidate):
            check = score_check((gating.baseline, gating.candidate), both, provider, rows, most, gating.progress)
            yield check.model_copy(update={"provider": _named_way(gating, provider)})


def _named_way(gating: _Gating, provider: str | None) -> str | None:
    """What a check says that it was computed with: nothing, where nobody asked for a runtime."""
    return provider if gating.request.runtime is not None else None


def _refused(gating: _Gating, both: ArtifactPair, provider: str | None, refusal: str) -> GateCheck:
    """The latency of a candidate that this machine cannot run.

    Args:
        gating: the comparison.
        both: the artifact.
        provider: that was to compute it; None: what fits.
        refusal: why it cannot.
    """
    status: GateStatus = "undecided"
    reason = f"this machine can run neither: {refusal}"
    if not gating.is_selection:
        reason += "; to compare the others only, name them: --artifact ID"
    if cannot_run(both.baseline, provider) is None:
        status, reason = "fail", f"this machine can run the baseline, but not the candidate: {refusal}"
    return GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=reason)


def _specs(gating: _Gating, checked: Sequence[CheckedArtifact], provider: str | None, item: Item) -> Pair:
    """How baseline and candidate are opened; ``provider``: that computes both."""
    threads, rules = gating.request.threads[0], gating.options.rules or RULES
    first, second = (
        PaceSpec(
            threads=threads,
            gpu_uuid=gating.gpu_uuid,
            item=item,
            measure=MeasureSpec(
                checked=one,
                provider=provider,
                threads=threads,
                shapes=(item[1:],),
                rules=rules,
                gpu_uuid=gating.gpu_uuid,
            ),
        )
        for one in checked
    )
    return first, second


def _timed(gating: _Gating, both: ArtifactPair, pair: Pair, error: float) -> Iterator[GateCheck]:
    """Latency and memory of one artifact at one shape; ``error``: its part of the run's."""
    phase, batch, seq = pair[0].item
    at = {"phase": phase, "batch": batch, "seq": seq}
    with bar(gating.progress, f"comparing {both.candidate.id} at {batch}×{seq}", None, "round"):
        found = timed_checks(both, pair, gating.options, error, lambda _: gating.progress.advance(1))
    for check in found:
        yield check.model_copy(update=at)


def _notes(gating: _Gating) -> Iterator[str]:
    yield "both were measured in turns on this host; a ratio of another processor may differ"
    if len(gating.request.threads) > 1:
        yield f"measured with {gating.request.threads[0]} threads only, the first of those asked for"
    if all(both.baseline.sha256 == both.candidate.sha256 for both in gating.pairs):
        yield "baseline and candidate are the same files"
    limits = {
        "memory": ("--max-memory-growth", gating.options.max_memory_growth),
        "size": ("--max-size-growth", gating.options.max_size_growth),
        "score": ("--max-score-loss", gating.options.max_score_loss),
    }
    for name, (option, most) in limits.items():
        if most is None:
            yield f"not checked: {name} ({option} off)"
    if not gating.candidate.task.reads_text:
        yield f"not checked: score; a {gating.candidate.task.noun} has no labelled rows, and is judged by its drift"
