"""Choice: which artifact to deploy, and the Pareto front of the candidates.

A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
costs are those of the device: measured there, else estimated for it. If there is neither, this host's own times rank
the candidates, but are never held against the device's limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from operator import le
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from edgeformer.artifacts.bundle_files import REMEASURE, TargetRecord, completed, lacks_parity
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Rounded
from edgeformer.artifacts.report import Candidate, Check, Choice, Figure, Report, Row
from edgeformer.benchmark.limits import UNITS, Limit, Requirements, compare, figures_of, limit_of
from edgeformer.benchmark.verdict import artifact_checks, judged_rows
from edgeformer.measurement.artifact import absent_figures
from edgeformer.report import sentences
from edgeformer.report.sentences import note
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import Metric, all_tasks, get_task
from edgeformer.tasks.risk_control import share_interval

CONFIDENCE = 0.95  # of the interval of a score
NOISE = 0.025  # memory, energy and estimates that differ by less are the same: the variation above which a row warns
CLOSE = 0.15  # measured times that differ by less are the same: processes that run minutes apart differ by as much
INSTANT_MS = 0.1  # measured times that differ by less are the same to whoever waits


@dataclass(frozen=True)
class ChoiceOptions:
    """Score limit and objective of a choice.

    Attributes:
        min_score: worst accepted score on the validation split, in the task's metric; None: no limit.
        minimize: quantity of which the chosen artifact has least.
    """

    min_score: float | None = None
    minimize: Literal["latency", "size", "memory", "energy"] = "latency"


def check_options(options: ChoiceOptions, manifest: BundleManifest) -> None:
    """Check that the models of a bundle can be chosen among with these options. Call it before anything is measured.

    Raises InputError: a score that is out of the range of the task's metric, or a model whose scores are void.
    """
    task, score = get_task(manifest.task), options.min_score
    metric = task.metric
    if score is not None and not metric.lowest <= score <= (inf if metric.highest is None else metric.highest):
        limits = f"at least {metric.lowest:g}"
        if metric.highest is not None:
            limits = f"from {metric.lowest:g} to {metric.highest:g} (0.91 is 91%)"
        accepted = f"{'lowest' if metric.higher_is_better else 'highest'} accepted {metric.name}"
        raise InputError(f"--min-score {score:g}: is the {accepted} of a {task.noun}; it must be {limits}")
    if manifest.leaks:
        raise InputError(
            f"--choose: {manifest.run!r} leaks future tokens, so its scores are void and cannot be compared; leave out "
            "--choose"
        )


def choose(
    manifest: BundleManifest,
    rows: Sequence[Row],  # of the artifacts that may be picked, host and device
    device_rows: Sequence[Row],  # of them, those on the device, measured there or estimated for it
    requirements: Requirements,
    minimize: Literal["latency", "size", "memory", "energy"] = "latency",
    records: Mapping[str, TargetRecord] = MappingProxyType({}),  # artifact that export did not compare → its target's
) -> Choice:
    """Name the artifact to deploy among those that were profiled.

    The pick is the least of ``minimize`` among those that break no limit. Candidates that are known to keep every limit
    go before those with a limit that cannot be decided. Candidates whose costs differ by less than noise (measured
    times 15%, other quantities 2.5%) or are estimates with overlapping ranges are tied: the smaller file wins. The
    candidates are in the order of the bundle.
    """
    # 1. Whose times rank the candidates: the device's, else this host's.
    metric = get_task(manifest.task).metric
    shape = (requirements.command_shapes or (requirements.shape,))[-1]  # the largest that the command names
    bound, statuses = limit_of(requirements.limits, "score"), {row.latency_ms.status for row in device_rows}
    basis: Literal["measured", "estimated", "host"] = "host"
    if statuses & {"estimated", "measured"}:
        basis = "estimated" if "estimated" in statuses else "measured"
    # 2. A candidate for every artifact, runtime and number of threads.
    scored_manifest = completed(manifest, records)
    candidates: list[Candidate] = []
    for artifact in {entry.id: entry for entry in scored_manifest.artifacts}.values():
        artifact_rows = [row for row in rows if row.artifact == artifact.id]
        if not artifact_rows:
            continue
        on_device = [row for row in device_rows if row.artifact == artifact.id]
        # The host's rows rank the candidates, but are not held against the device's limits.
        basis_rows = [row for row in artifact_rows if row.where == "host"] if basis == "host" else on_device
        is_whole_text = artifact.role in ("full", "exit")
        phase = "steady" if is_whole_text else requirements.phase
        usable = [
            row
            for row in judged_rows(basis_rows, shape, requirements, is_whole_text)
            if row.latency_ms.status != "unavailable" and row.phase == phase
        ]
        reasons = (row.latency_ms.reason for row in artifact_rows if row.latency_ms.status == "unavailable")
        why_absent = next(filter(None, reasons), note("no figure", shape=f"{shape[0]}×{shape[1]}"))
        absent = artifact_rows[0].model_copy(update={**absent_figures(why_absent), "threads": None})
        for row in usable or [absent]:
            judged = [other for other in on_device if (other.provider, other.threads) == (row.provider, row.threads)]
            if basis == "host":
                judged = judged or on_device
            elif not usable:
                judged = []
            checks = artifact_checks(judged or [absent], requirements, is_whole_text, per_call=True)
            score = _score_of(artifact, row.provider, scored_manifest, metric, records.get(artifact.id))
            candidates.append(_candidate(artifact, row, checks, score, metric, bound, minimize))
    # 3. Pick one.
    choice = Choice(
        metric=metric.name, bound=bound, minimize=minimize, candidates=tuple(mark_front(candidates, metric)),
        pick=None, reason="", basis=basis, not_in_bundle=absent_variants(manifest), batch=shape[0], seq=shape[1],
    )  # fmt: skip
    return _pick(choice, _eligible(candidates), metric)


def mark_front(candidates: Sequence[Candidate], metric: Metric) -> list[Candidate]:
    """Mark the Pareto front of score, latency and size among the candidates with both figures, feasible or not."""
    points: dict[int, tuple[float, float, int]] = {}
    for position, candidate in enumerate(candidates):
        if candidate.score is not None and candidate.latency_ms is not None:
            loss = -candidate.score if metric.higher_is_better else candidate.score
            points[position] = (loss, candidate.latency_ms, candidate.size_bytes)
    front = {
        position
        for position, point in points.items()
        if not any(other != point and all(map(le, other, point)) for other in points.values())
    }
    return [c.model_copy(update={"on_front": position in front}) for position, c in enumerate(candidates)]


def combine_choices(
    choices: Mapping[str, Choice],  # model → its choice, without limits of its own; at least one
    limits: Sequence[Limit],  # of size, latency and score, beside those of the device's budget
    minimize: Literal["latency", "size"],
    refused: Mapping[str, str] = MappingProxyType({}),  # model that is not recommended → the reason
) -> Choice:
    """Return one choice among the candidates of several models, whose artifacts are then called ``model/artifact``.

    The models answer the same task on the same validation rows. A candidate that its own choice refused stays refused.
    An estimated latency keeps a limit only with its whole range. Without a limit of the score, the pick is among the
    artifacts of the model with the best score, of which it may lose one standard error.
    """
    first = next(iter(choices.values()))
    metric = next(task.metric for task in all_tasks() if task.metric.name == first.metric)
    bound = limit_of(limits, "score")
    limits = sorted(limits, key=lambda limit: ("score", "latency", "size").index(limit.quantity))
    # 1. Hold the candidates of all models against the limits.
    candidates: list[Candidate] = []
    usable: list[int] = []
    for model, choice in choices.items():
        for candidate in choice.candidates:
            objections, unknown = [candidate.reason] if candidate.reason else [], [*candidate.unknown]
            objections += [refused[model]] if model in refused else []
            usable += [] if objections else [len(candidates)]
            figures = {"score": Figure(candidate.score), "size": Figure(candidate.size_bytes)}
            latency_ms = candidate.latency_ms
            figures["latency"] = Figure(latency_ms)  # by its median
            if candidate.latency_status == "estimated":
                ends = candidate.low_ms or latency_ms, candidate.high_ms or latency_ms
                figures["latency"] = Figure(latency_ms, "estimated", *ends)
            for limit in limits:
                figure = figures[limit.quantity]
                is_score = limit.quantity == "score"
                status = compare(figure, limit.limit, at_least=is_score and metric.higher_is_better)
                if status == "fail" and is_score:
                    objections.append(sentences.score_objection(figure.value or 0.0, limit.limit, metric, None))
                elif status == "fail":
                    value = figure.value if figure.low is None else figure.low
                    unit = UNITS[limit.quantity]
                    objections.append(sentences.limit_objection(limit.quantity, value, limit.limit, unit, None))
                elif figure.value is not None and status == "unknown" and limit.quantity not in unknown:
                    unknown.append(limit.quantity)
            changes = {
                "artifact": f"{model}/{candidate.artifact}",
                "bound_inside": _holds(candidate.score_low, candidate.score_high, bound),
                "feasible": candidate.feasible and not objections, "reason": "; ".join(objections) or None,
                "unknown": tuple(unknown),
            }  # fmt: skip
            candidates.append(candidate.model_copy(update=changes))
    # 2. Pick among them; without a limit of the score among those of the best model.
    bases = {choice.basis for choice in choices.values()}
    update: dict[str, Any] = {
        "bound": bound, "minimize": minimize, "candidates": tuple(mark_front(candidates, metric)), "pick": None,
        "basis": "host" if "host" in bases else "estimated" if "estimated" in bases else "measured",
        "not_in_bundle": (),
    }  # fmt: skip
    combined = first.model_copy(update=update)
    positions, sign = _eligible(candidates), 1 if metric.higher_is_better else -1
    ranks = [-inf if candidate.score is None else sign * candidate.score for candidate in candidates]
    best = max(positions, key=ranks.__getitem__, default=None)
    if best is not None and bound is None and (score := candidates[best].score) is not None:
        rows = candidates[best].score_rows or 0
        error = sqrt(score * (1 - score) / rows) if metric.is_share and rows else 0.0
        models = [candidate.artifact.partition("/")[0] for candidate in candidates]
        best_models = {models[position] for position in positions if ranks[position] == ranks[best]}
        positions = [p for p in positions if models[p] in best_models and ranks[p] >= ranks[best] - error]
        return _pick(combined, positions, metric, best_score=score, score_loss=error)
    picked = _pick(combined, positions, metric)
    closest = max(usable, key=ranks.__getitem__, default=None) if best is None else None
    return picked.model_copy(update={"closest": closest})


class CandidateScore(NamedTuple):
    """The fields of a :class:`Candidate` that describe its score; the interval is that of a share of rows."""

    score: float
    scored_as: str | None
    scored_on: str | None
    score_rows: int | None = None
    score_low: float | None = None
    score_high: float | None = None


def _score_of(
    artifact: ArtifactManifest, provider: str, manifest: BundleManifest, metric: Metric, record: TargetRecord | None
) -> CandidateScore | str:
    """Return the score of a candidate, or the reason why there is none.

    It is of the validation split, or, if export had no such split, of the golden inputs; with a provider that rounds,
    of its rounded answers. The decode graph and the step artifact have the score of the full graph of their precision.
    """
    unscored = note("no score: engine", remedy=REMEASURE)
    if record is not None:
        detail = f" ({record.unscored})" if record.unscored else ""
        unscored = note("no score: target", device=record.device, detail=detail)
    if artifact.status != "built":  # it failed on its target
        return artifact.reason or note("not built")
    has_split = any(entry.validation is not None for entry in manifest.artifacts)
    same_answers = [artifact]
    if artifact.role in ("decode", "step"):
        if lacks_parity(artifact):  # it may compute something else
            return unscored
        variant = ("full", artifact.format, artifact.precision, artifact.trimmed)
        # Its own score on the golden inputs is of fewer tokens, so the full graph's goes first.
        same_answers[:0] = [
            entry
            for entry in manifest.artifacts
            if (entry.role, entry.format, entry.precision, entry.trimmed) == variant
        ]
    rounds_to = provider_facts(provider).rounds_to
    for entry in same_answers:
        scored = entry if rounds_to is None else entry.rounded.get(provider)
        if scored is None:
            continue
        if isinstance(scored, Rounded) and scored.reason is not None:
            return f"{rounds_to}: {scored.reason}"
        score = scored.validation if has_split else scored.score
        if score is not None:
            value = metric.of(score)
            if value is None or not isfinite(value):
                return note("no score: metric", metric=metric.name)
            scored_as = entry.id if entry is not artifact else None
            candidate_score = CandidateScore(value, scored_as, record.device if record is not None else None)
            if score.n and metric.is_share:
                low, high = share_interval(round(value * score.n), score.n, (1 - CONFIDENCE) / 2)
                return candidate_score._replace(score_rows=score.n, score_low=low, score_high=high)
            return candidate_score
    if rounds_to is not None:
        return note("no score: rounded", precision=rounds_to)
    if not artifact.is_graph:
        return unscored
    return note("no score: split" if has_split else "no score")


def _candidate(
    artifact: ArtifactManifest, row: Row, checks: Sequence[Check], score: CandidateScore | str, metric: Metric,
    bound: float | None, minimize: str,
) -> Candidate:  # fmt: skip
    """Return a candidate; ``row`` has its costs, or the reason why they are not known."""
    # 1. Objections: no score, no time, or a limit that is not kept.
    figures = figures_of(row)
    latency, memory, cost = figures["latency"], figures["memory"], figures[minimize]
    facts: dict[str, Any] = {"score": None}
    objections: list[str] = []
    if isinstance(score, str):
        objections.append(score)
    else:
        low, high = score.score_low, score.score_high
        facts = {**score._asdict(), "bound_inside": _holds(low, high, bound)}
        if bound is not None and compare(Figure(score.score), bound, at_least=metric.higher_is_better) == "fail":
            interval = (low or 0.0, high or 0.0) if facts["bound_inside"] else None
            objections.append(sentences.score_objection(score.score, bound, metric, interval))
    if latency.value is None:
        objections.append(note("unknown figure", figure="latency", reason=latency.reason or sentences.NO_REASON))
    has_shapes = len({(check.batch, check.seq) for check in checks if check.batch is not None}) > 1
    for check in checks:
        if check.status == "fail":
            shape = (check.batch, check.seq) if has_shapes and check.batch and check.seq else None
            objections.append(sentences.limit_objection(check.name, check.value, check.limit, check.unit, shape))
    if cost.value is None and not objections:
        objections.append(note("unknown figure", figure=minimize, reason=cost.reason or sentences.NO_REASON))
    # 2. Its figures.
    return Candidate(
        artifact=artifact.id, precision=artifact.precision, exit=artifact.exit, trimmed=artifact.trimmed,
        provider=row.provider, threads=row.threads, **facts, latency_ms=latency.value, latency_status=latency.basis,
        size_bytes=row.size_bytes, memory_bytes=None if memory.value is None else round(memory.value),
        energy_mj=figures["energy"].value, feasible=not objections, on_front=False,
        reason="; ".join(objections) or None, low_ms=latency.low, high_ms=latency.high,
        unknown=tuple(dict.fromkeys(check.name for check in checks if check.status == "unknown")),
        stable=row.latency_ms.stable, row=row, checks=tuple(checks),
    )  # fmt: skip


def _holds(low: float | None, high: float | None, bound: float | None) -> bool | None:
    """Return whether an interval holds a limit; None: there is no interval or no limit."""
    return None if low is None or high is None or bound is None else low <= bound <= high


def _eligible(candidates: Sequence[Candidate]) -> list[int]:
    """Return the positions of those that may be picked: feasible, and if possible known to keep every limit."""
    feasible = [position for position, candidate in enumerate(candidates) if candidate.feasible]
    return [position for position in feasible if not candidates[position].unknown] or feasible


def _pick(
    choice: Choice, positions: Sequence[int], metric: Metric, best_score: float | None = None, score_loss: float = 0.0
) -> Choice:
    """Return the choice with its pick among the candidates at ``positions``, and the reason.

    ``best_score``, ``score_loss``: of the decision, if only artifacts of the model with the best score are there.
    """
    # 1. The cost of every candidate.
    candidates, minimize = choice.candidates, choice.minimize
    costs: list[Figure] = []
    for candidate in candidates:
        if candidate.row is not None:
            costs.append(figures_of(candidate.row)[minimize])
        elif minimize == "size":  # read from a file
            costs.append(Figure(candidate.size_bytes))
        else:
            costs.append(candidate.latency)
    values = [inf if cost.value is None else cost.value for cost in costs]  # a feasible candidate has one
    cheapest = min(positions, key=values.__getitem__, default=None)

    # 2. Among those that cost no more than the cheapest, the smallest.
    ties: dict[int, sentences.Tie] = {}  # position → why its cost is no different from the least
    for position in positions:
        assert cheapest is not None
        cost, value, least = costs[position], values[position], costs[cheapest]
        is_estimate = cost.basis == "estimated"
        is_time = minimize == "latency" and not is_estimate
        tie = sentences.Tie("times", CLOSE, INSTANT_MS) if is_time else sentences.Tie("values", NOISE)
        if is_estimate and least.high is not None and cost.low is not None and cost.low <= least.high:
            ties[position] = sentences.Tie("ranges")
        elif value <= values[cheapest] * (1 + tie.tolerance) or value - values[cheapest] < tie.instant_ms:
            ties[position] = tie

    def order(position: int) -> tuple[float, ...]:
        """Smaller file; then fewer threads if the times are no different, else the faster one."""
        candidate = candidates[position]
        latency = candidate.latency_ms if candidate.latency_ms is not None else inf
        threads = candidate.threads or 0
        return candidate.size_bytes, *((threads, latency) if minimize == "latency" else (latency, threads))

    tied = [p for p in positions if minimize == "size" or p == cheapest or p in ties]
    pick = min(tied, key=order, default=None)
    # 3. The decision in words.
    decision = sentences.Decision(
        eligible=tuple(positions), costs=costs, unit=UNITS[minimize], pick=pick, cheapest=cheapest,
        tie=ties.get(pick) if pick is not None and pick != cheapest else None,
        runner_up=min({*positions} - {pick, cheapest}, key=lambda p: (values[p], p), default=None),
        best_score=best_score, score_loss=score_loss,
    )  # fmt: skip
    labels = {candidate.provider: provider_facts(candidate.provider).label for candidate in candidates}
    reason = sentences.pick_reason(choice, decision, metric, labels)
    return choice.model_copy(update={"pick": pick, "reason": reason})


def cheapest_artifact(report: Report) -> dict[str, Any] | None:
    """Return the artifact to deploy: the pick of --choose, else the fastest that breaks no limit; None: there is none.

    The fastest at the shape of the latency limit, or at the smallest measured one without such a limit.
    """
    if report.search is not None:
        if report.search.pick is None:
            return None
        pick, by = report.search.candidates[report.search.pick], report.search.minimize
        return {"artifact": pick.artifact, "p50_ms": pick.latency_ms, "size_bytes": pick.size_bytes, "by": by}
    checks = report.verdict.checks
    failed = {check.artifact for check in checks if check.status == "fail"} | report.left_out.keys()
    limited = {(check.batch, check.seq) for check in checks if check.name == "latency"}
    rows = [row for row in report.rows if row.where == "host" and row.phase != "cold" and row.artifact not in failed]
    rows = [row for row in rows if row.latency_ms.status == "measured"]
    smallest = min(((row.batch, row.seq) for row in rows), key=lambda shape: shape[0] * shape[1], default=None)
    rows = [row for row in rows if (row.batch, row.seq) in limited] or [
        row for row in rows if (row.batch, row.seq) == smallest
    ]
    if not rows:
        return None
    fastest = min(rows, key=lambda row: row.latency_ms.p50 or 0.0)
    p50_ms, size_bytes = fastest.latency_ms.p50, fastest.size_bytes
    return {"artifact": fastest.artifact, "p50_ms": p50_ms, "size_bytes": size_bytes, "by": "latency"}


def absent_variants(manifest: BundleManifest) -> tuple[str, ...]:
    """Return a line per variant that export could add, with the option, and per artifact that was not built."""
    artifacts, task = manifest.artifacts, get_task(manifest.task)
    options = {
        f"{precision.upper()} graphs": f"--{precision}"
        for precision in ("fp16", "int8", "int4")
        if not any(artifact.precision == precision for artifact in artifacts)
    }
    # Loops before the last that have a head but no graph. A looped classifier can exit after every loop.
    drift = next((artifact.drift for artifact in artifacts if artifact.drift is not None), None)
    loops = manifest.exits or tuple(loop.loop for loop in (drift.loops if drift is not None else ()))
    missing = sorted({*sorted(loops)[:-1]} - {artifact.exit for artifact in artifacts if artifact.role == "exit"})
    if missing:
        options[f"exit after loop{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"] = "--exit all"
    if task.can_write and not any(artifact.role == "decode" for artifact in artifacts):
        options["decoding with caches"] = "--exit all"
    if task.can_trim and not any(artifact.trimmed for artifact in artifacts):
        options["trimmed vocabulary"] = "--vocab-trim"
    lines = [note("not exported", variant=variant, option=option) for variant, option in options.items()]
    return (*lines, *sentences.unbuilt_notes({artifact.id: artifact for artifact in artifacts}.values()))
