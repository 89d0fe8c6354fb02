"""The gate: compare a candidate bundle with its baseline, by their manifests and measured in turns on this host."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median, median_high
from typing import Literal

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.golden import GOLDEN_FILE
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import Figure, MeasureRules, checksum_notes, read_report
from edgeformer.artifacts.units import format_bytes, format_duration
from edgeformer.benchmark.gate_result import Gate, GateCheck, GateStatus
from edgeformer.benchmark.gate_scores import ArtifactPair, common_rows, score_check
from edgeformer.benchmark.limits import Limit, compare, limit_of
from edgeformer.benchmark.paired_run import (
    ERROR,
    MOST_ROUNDS,
    WARMUP_RULES,
    Pair,
    Pairing,
    PairJob,
    PairRules,
    SideError,
    compare_pair,
)
from edgeformer.benchmark.request import ProfileOptions, Request, resolve
from edgeformer.bundle import Bundle, find_enclosing_bundle
from edgeformer.measurement.artifact import Shape, check_artifact, items_of
from edgeformer.measurement.target import find_target
from edgeformer.report import sentences
from edgeformer.run import Location
from edgeformer.runtimes import cannot_run
from edgeformer.system.host import describe_host, now
from edgeformer.tasks import RowSource

_LEAST_GROWTH_BYTES = 2 * 2**20
_DRIFT_FACTOR, _DRIFT_SHARE = 2.0, 0.1
"""Twice the baseline's drift is worse; below a tenth of the tolerance it is rounding and does not count."""
_STATUSES: tuple[GateStatus, ...] = ("fail", "undecided", "pass")


GATE_LIMITS = (Limit("latency", 0.05), Limit("memory", 0.10), Limit("size", 0.05), Limit("score", 0.01))
"""Of the typical call, the peak and the file as shares of the baseline's; of the score in the metric's own unit where
it is a share, else as a share."""


@dataclass(frozen=True)
class GateOptions:
    """What a candidate may be worse by than its baseline; memory, size and score without a limit are not checked."""

    limits: tuple[Limit, ...] = GATE_LIMITS
    eval_data: Path | None = None  # labelled file that both are scored on; None: the baseline's own held-out rows
    longest_s: float = 180.0  # of measuring one artifact at one shape
    error: float = ERROR  # the chance that any interval of the run misses
    rules: MeasureRules | None = None  # of the warm-up; None: the usual rules with a short limit


def named_baseline(path: Path) -> tuple[Bundle, list[str]]:
    """Return the bundle that a report was measured on, and notes. Raises ArtifactError: one is damaged or replaced."""
    report = read_report(path)
    parent = path.resolve().parent.parent  # the folder of the reports lies in that of the run, or of the bundle
    problem = f"its bundle {report.bundle} is missing; give the folder of the bundle instead of the report"
    for folder in (parent / Path(report.bundle).name, Path(report.bundle), parent):
        if find_enclosing_bundle(folder / GOLDEN_FILE) != folder.resolve():
            continue
        bundle = Bundle.open(folder)
        checksums = {artifact.id: artifact.sha256 for artifact in bundle.artifacts}
        measured = report.subject.artifacts if report.subject is not None else {}
        changed = next((id_ for id_, artifact in measured.items() if checksums.get(id_) != artifact.sha256), None)
        if changed is None:
            return bundle, checksum_notes(path, report, bundle.manifest)
        problem = (
            f"{changed!r} in {folder} has changed since it was measured; copy the baseline's bundle before you export "
            "again, and give the folder of the copy"
        )
    raise ArtifactError(f"{path}: {problem}")


def gate_bundles(
    location: Location, baseline: Bundle, device: DeviceProfile, options: ProfileOptions, gate_options: GateOptions,
    progress: Progress = SILENT, notes: Sequence[str] = (),
) -> Gate:  # fmt: skip
    """Compare a bundle with its baseline, on this host.

    The device's budget sets the shape if ``options`` do not. ``notes`` on the baseline are those of the gate, too.
    Raises ArtifactError: a bundle, or a file that is needed, is missing, truncated or changed; InputError: the two are
    of different tasks, neither has a named artifact, or the file of ``eval_data`` cannot be used.
    """
    # 1. Models of one task
    candidate, start_s = location.open_bundle(), time.perf_counter()
    task = candidate.task
    if candidate.manifest.task != baseline.manifest.task:
        raise InputError(
            f"--against: {baseline.manifest.run!r} is a {baseline.task.noun} and {candidate.manifest.run!r} is a "
            f"{task.noun}; give two models of one task"
        )
    if gate_options.eval_data is not None and not isinstance(task, RowSource):
        raise InputError(
            f"--eval-data: {candidate.name} is a {task.noun}, which labelled rows cannot score; leave it out"
        )
    selected = options.artifacts or ((location.artifact,) if location.artifact is not None else ())
    # 2. Artifacts that only one side has built, and those that both have
    old_artifacts = {artifact.id: artifact for artifact in baseline.artifacts}
    new_artifacts = {artifact.id: artifact for artifact in candidate.artifacts}
    ids = tuple(dict.fromkeys((*old_artifacts, *new_artifacts)))
    if not ids:
        raise InputError(f"--against: neither {baseline.folder} nor {candidate.folder} has an artifact")
    notes = [*notes]
    checks: list[GateCheck] = []
    pairs: list[ArtifactPair] = []
    for name in dict.fromkeys(selected or ids):
        if name not in ids:
            raise InputError(f"--artifact {name}: neither bundle has this artifact; they have {', '.join(ids)}")
        old, new = old_artifacts.get(name), new_artifacts.get(name)
        absences = []  # why a side has no such artifact; empty: it was built
        for side, artifact in (("baseline", old), ("candidate", new)):
            absence = f"the {side} lacks it"
            if artifact is not None:
                reason = artifact.reason or "no reason is recorded"
                absence = "" if artifact.status == "built" else f"{artifact.status} in the {side}: {reason}"
            absences.append(absence)
        why_no_old, why_no_new = absences
        if old is not None and new is not None and not why_no_old and not why_no_new:
            pairs.append(ArtifactPair(old, new))
        elif why_no_new and (selected or not why_no_old):
            checks.append(GateCheck(name="presence", artifact=name, status="fail", reason=why_no_new))
        elif why_no_new:
            notes.append(f"{name}: not compared; {why_no_old}; {why_no_new}")
        elif selected:
            reason = f"{why_no_old}, so there is nothing to compare it with"
            checks.append(GateCheck(name="presence", artifact=name, status="undecided", reason=reason))
        else:
            notes.append(f"{name}: new; {why_no_old}, so there is nothing to compare it with")
    # 3. Compare it
    if pairs:
        options = replace(options, artifacts=tuple(both.candidate.id for both in pairs))
        request = resolve(options, device, candidate.manifest)
        batch, seq = request.requirements.shape
        named_shapes = product(options.batches or (batch,), options.seqs or (seq,))
        shapes = dict.fromkeys(task.fit_shape(candidate.data, *shape) for shape in named_shapes)
        gpu_uuid = gpu.uuid if (gpu := find_target(device).gpu) is not None else None
        checks += _compare_pairs((baseline, candidate), pairs, request, [*shapes], gate_options, gpu_uuid, progress)
        notes.append("both were measured alternately on this host; on another processor the ratio may differ")
        if len(request.threads) > 1:
            notes.append(f"measured with {request.threads[0]} threads only, the first number of --threads")
        if all(both.baseline.sha256 == both.candidate.sha256 for both in pairs):
            notes.append("baseline and candidate are the same files")
        limited = {limit.quantity for limit in gate_options.limits}
        flags = {"memory": "--max-memory-growth", "size": "--max-size-growth", "score": "--max-score-loss"}
        notes += [f"not checked: {name} ({flag} off)" for name, flag in flags.items() if name not in limited]
        if not isinstance(task, RowSource):
            notes.append(f"not checked: score; a {task.noun} has no labelled rows, so the gate checks its drift")
    # 4. The verdict
    if not checks:
        notes.append("nothing was compared, because no artifact is built in both bundles; the notes above say why")
    statuses = {check.status for check in checks}
    return Gate(
        status=next((status for status in _STATUSES if status in statuses), "undecided"),
        candidate=str(candidate.folder), baseline=str(baseline.folder), host=describe_host(), created=now(),
        seconds=time.perf_counter() - start_s, error=gate_options.error, checks=tuple(checks), notes=tuple(notes),
    )  # fmt: skip


def _compare_pairs(
    sides: tuple[Bundle, Bundle], pairs: Sequence[ArtifactPair], request: Request, shapes: Sequence[Shape],
    options: GateOptions, gpu_uuid: str | None, progress: Progress,
) -> list[GateCheck]:  # fmt: skip
    """Return all checks of the artifacts that both have. A damaged file is an error before anything is measured."""
    # 1. Files, as the manifests record them
    old, new = sides
    checked = [(check_artifact(old, both.baseline), check_artifact(new, both.candidate)) for both in pairs]
    checks = [check for both in pairs for check in file_checks(both, options)]

    def add(check: GateCheck, provider: str | None, **shape: object) -> None:
        # A check names the provider only if the user asked for a runtime.
        update = {"provider": provider if request.runtime is not None else None, **shape}
        checks.append(check.model_copy(update=update))

    # 2. Scores
    max_loss = limit_of(options.limits, "score")
    if max_loss is not None and isinstance(new.task, RowSource):
        rows = common_rows(old, new, options.eval_data)
        for both in pairs:
            for provider in request.providers(both.candidate):
                add(score_check(sides, both, provider, rows, max_loss, progress), provider)
    # 3. Latency and memory of what both sides can run
    runs = []
    for both, files in zip(pairs, checked, strict=True):
        name, providers = both.candidate.id, request.providers(both.candidate)
        if not providers:
            reason = f"{request.runtime} does not open it"
            checks.append(GateCheck(name="latency", artifact=name, status="undecided", reason=reason))
        for provider in providers:
            refusal = cannot_run(both.candidate, provider)
            if refusal is None:
                runs += [(both, files, provider, item) for item in items_of(both.candidate, new.task, shapes)]
                continue
            status: GateStatus = "undecided"
            reason = f"this machine cannot run it: {refusal}; to compare other artifacts only, use --artifact ID"
            if cannot_run(both.baseline, provider) is None:
                status, reason = "fail", f"this machine runs the baseline but not the candidate: {refusal}"
            add(GateCheck(name="latency", artifact=name, status=status, reason=reason), provider)
    for both, files, provider, item in runs:
        rules, threads = options.rules or WARMUP_RULES, request.threads[0]
        first, second = (
            PairJob(files=side, provider=provider, threads=threads, items=(item,), rules=rules, gpu_uuid=gpu_uuid)
            for side in files
        )
        phase, batch, seq = item
        longest = format_duration(options.longest_s)
        with bar(progress, f"Comparing {both.candidate.id} at {batch}×{seq}, {longest} at most", None, "rounds"):
            # The chance of an error is shared by all runs.
            error = options.error / len(runs)
            timed = timed_checks(both, (first, second), options, error, lambda _: progress.advance(1))
        for check in timed:
            add(check, provider, phase=phase, batch=batch, seq=seq)
    return checks


def timed_checks(
    both: ArtifactPair, pair: Pair, options: GateOptions, error: float,
    advance: Callable[[Pairing], None] = lambda _: None,
) -> list[GateCheck]:  # fmt: skip
    """Measure both in turns; return latency and memory, or latency alone if a side cannot be measured.

    ``error`` is the chance that an interval of this pair misses. The checks name no shape.
    """
    max_slowdown = limit_of(options.limits, "latency") or 0.0
    rules = PairRules(longest_s=options.longest_s, max_slowdown=max_slowdown, error=error)
    try:
        result = compare_pair(pair, rules, advance)
    except SideError as problem:
        # A candidate that does not run fails; without a baseline there is nothing to compare with.
        status: GateStatus = "fail" if problem.side == 1 else "undecided"
        return [GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=str(problem))]
    slowdown, rounds, fewest = result.slowdown, len(result.log_ratios), result.fewest_rounds
    decision, has_ends = slowdown.decision(rules.max_slowdown), slowdown.low > -1 and slowdown.high < inf
    reason = sentences.paired_rounds(
        rounds, fewest, rules.longest_s, result.needs_s, result.unsettled, result.failures,
        is_undecided=decision == "undecided", is_most=rounds >= MOST_ROUNDS,
    )  # fmt: skip
    latency = GateCheck(
        name="latency", artifact=both.candidate.id, status=decision, unit="ms", limit=rules.max_slowdown,
        found=slowdown.change(rules.max_slowdown), change=slowdown.middle, rounds=rounds, reason=reason,
        baseline=median_high(result.baseline_ms) if result.baseline_ms else None,
        candidate=median_high(result.candidate_ms) if result.candidate_ms else None,
        log_ratios=tuple(result.log_ratios), low=slowdown.low if has_ends else None,
        high=slowdown.high if has_ends else None,
    )  # fmt: skip
    max_growth = limit_of(options.limits, "memory")
    return [latency] if max_growth is None else [latency, memory_check(both, max_growth, result)]


def memory_check(both: ArtifactPair, limit: float, result: Pairing) -> GateCheck:
    """Compare the median peaks of baseline and candidate, if they were measured by the same method."""
    peaks: list[float | None] = []
    methods: list[str] = []
    for side in (0, 1):
        rounds = [memory[side] for memory in result.memory]
        measured = [memory.peak for memory in rounds if memory.peak is not None]
        peaks.append(median(measured) if measured else None)
        method = next((memory.method or memory.reason for memory in rounds), None)
        methods.append(method or "not measured")
    old, new = peaks if methods[0] == methods[1] else (None, None)
    check = _growth_check("memory", both, limit, old, new)
    sides = zip(methods, result.providers, strict=True)
    reasons = [check.reason, " and ".join(dict.fromkeys(f"{method}, with {provider}" for method, provider in sides))]
    if check.status == "fail" and old is not None and new is not None and new - old < _LEAST_GROWTH_BYTES:
        reasons[0] = f"grew by less than {format_bytes(_LEAST_GROWTH_BYTES)}, which processes vary by anyway"
        check = check.model_copy(update={"status": "pass"})
    return check.model_copy(update={"reason": "; ".join(filter(None, reasons))})


def file_checks(both: ArtifactPair, options: GateOptions) -> Iterator[GateCheck]:
    """Compare size and drift of one artifact, as the two manifests record them."""
    if (max_growth := limit_of(options.limits, "size")) is not None:
        yield _growth_check("size", both, max_growth, both.baseline.size_bytes, both.candidate.size_bytes)
    # Drift: how far the artifact is from torch in FP32, by loop if it has loops, else by its answers.
    errors: list[float | None] = []
    for artifact in (both.baseline, both.candidate):
        error = artifact.parity.max_abs_error if artifact.parity is not None else None
        if artifact.drift is not None:
            error = max((loop.rms_error for loop in artifact.drift.loops if loop.rms_error is not None), default=None)
        errors.append(error)
    (old, new), drift = errors, both.candidate.drift
    tolerance = drift.tolerance if drift is not None else None
    status: GateStatus = "fail"
    if old is None or new is None:
        sides = [side for side, error in (("baseline", old), ("candidate", new)) if error is None]
        status, reason = "undecided", sentences.DRIFT["unknown"].format(" and the ".join(sides))
    elif tolerance is not None and compare(Figure(new), tolerance) == "fail":
        reason = sentences.DRIFT["beyond the tolerance"].format(tolerance)
    elif new > _DRIFT_FACTOR * old and (tolerance is None or new > _DRIFT_SHARE * tolerance):
        reason = sentences.DRIFT["doubled"]
    else:
        status, reason = "pass", sentences.DRIFT["loops" if drift is not None else "outputs"]
    yield GateCheck(
        name="drift", artifact=both.candidate.id, status=status, baseline=old, candidate=new,
        change=(new - old) / old if old and new is not None else None, limit=_DRIFT_FACTOR - 1, reason=reason,
    )  # fmt: skip


def _growth_check(
    name: Literal["memory", "size"], both: ArtifactPair, limit: float, old: float | None, new: float | None
) -> GateCheck:
    """Check bytes that may grow by a share of ``limit``; None: not known."""
    change = (new - old) / old if old and new is not None else None
    return GateCheck(
        name=name, artifact=both.candidate.id, status="undecided" if change is None else compare(Figure(change), limit),
        unit="bytes", baseline=old, candidate=new, change=change, limit=limit,
        reason=sentences.NOT_COMPARABLE if change is None else "",
    )  # fmt: skip
