"""Search: which artifact to deploy, with the Pareto front of the candidates and the reason for the pick in words.

A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
costs are those of the device: measured there, else estimated for it. If there is neither, this host's own times rank
the candidates, but are never held against the device's limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from operator import le
from types import MappingProxyType
from typing import Any, Literal

from edgeformer.artifacts.bundle_files import REMEASURE, TargetRecord, completed, lacks_parity
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Rounded
from edgeformer.artifacts.report import Candidate, Check, Row, Search
from edgeformer.artifacts.units import format_bytes, format_threads
from edgeformer.benchmark.verdict import Limits, check_budget, judged_rows, quantities, shown
from edgeformer.measurement.artifact import absent_figures
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import Metric, all_tasks, get_task
from edgeformer.tasks.risk_control import share_interval
from edgeformer.tasks.texts import TextTask
from edgeformer.tasks.tokens import TokenTask

CONFIDENCE = 0.95
"""Of the interval of a score."""
NOISE = 0.025
"""Memory, energy and estimates that differ by less are the same: the variation above which a row warns."""
CLOSE = 0.15
"""Measured times that differ by less are the same: processes that run minutes apart differ by as much."""
INSTANT_MS = 0.1
"""Measured times that differ by less are the same to whoever waits."""


@dataclass(frozen=True)
class SearchOptions:
    """Score limit and objective of a search.

    Attributes:
        min_score: worst accepted score on the validation split, in the task's metric; None: no limit.
        minimize: quantity of which the chosen artifact has least.
    """

    min_score: float | None = None
    minimize: Literal["latency", "size", "memory", "energy"] = "latency"


def check_options(options: SearchOptions, manifest: BundleManifest) -> None:
    """Check that the models of a bundle can be searched with these options. Call it before anything is measured.

    Raises:
        InputError: a score that is out of the range of the task's metric, or a model whose scores are void.
    """
    task, score = get_task(manifest.task), options.min_score
    metric = task.metric
    if score is not None and not metric.lowest <= score <= (inf if metric.highest is None else metric.highest):
        limits = f"at least {metric.lowest:g}"
        if metric.highest is not None:
            limits = f"from {metric.lowest:g} to {metric.highest:g} (0.91 is 91%)"
        raise InputError(f"--min-score {score:g}: is the {metric.accepted} of a {task.noun}; it must be {limits}")
    if manifest.leaks:
        raise InputError(
            f"--search: {manifest.run!r} leaks future tokens, so its scores are void and cannot be compared; leave out "
            "--search"
        )


def search(
    manifest: BundleManifest,
    rows: Sequence[Row],
    device_rows: Sequence[Row],
    limits: Limits,
    options: SearchOptions,
    records: Mapping[str, TargetRecord] = MappingProxyType({}),
) -> Search:
    """Name the artifact to deploy among those that were profiled.

    The pick is the least of ``options.minimize`` among those that meet the bound and break no limit. Candidates that
    are known to keep every limit go before those with a limit that cannot be decided. Candidates whose costs differ
    by less than noise (measured times 15%, other quantities 2.5%) or are estimates with overlapping ranges are tied:
    the smaller file wins.

    Args:
        manifest: of the bundle, whose order is that of the candidates.
        rows: of the artifacts that may be picked, host and device.
        device_rows: of them, those on the device, measured there or estimated for it.
        limits: what the device's budget and the command allow.
        options: what is searched for.
        records: artifact that export did not compare → what its target measured.

    Raises:
        InputError: as :func:`check_options`.
    """
    check_options(options, manifest)
    metric, at_shape = get_task(manifest.task).metric, limits.ranked
    bound, statuses = options.min_score, {row.latency_ms.status for row in device_rows}
    basis: Literal["measured", "estimated", "host"] = "host"
    if statuses & {"estimated", "measured"}:
        basis = "estimated" if "estimated" in statuses else "measured"
    scored_manifest = completed(manifest, records)
    candidates: list[Candidate] = []
    costs: list[Check] = []
    for artifact in {entry.id: entry for entry in scored_manifest.artifacts}.values():
        artifact_rows = [row for row in rows if row.artifact == artifact.id]
        if not artifact_rows:
            continue
        # The host's rows rank the candidates, but are not held against the device's limits.
        basis_rows = [row for row in artifact_rows if row.where == "host"] if basis == "host" else device_rows
        basis_rows = [row for row in basis_rows if row.artifact == artifact.id]
        is_whole_text = artifact.role in ("full", "exit")
        phase = "steady" if is_whole_text else limits.phase
        usable = [
            row
            for row in judged_rows(basis_rows, at_shape, is_whole_text)
            if row.latency_ms.status != "unavailable" and row.phase == phase
        ]
        reasons = (row.latency_ms.reason for row in artifact_rows if row.latency_ms.status == "unavailable")
        shape = f"{at_shape.batch}×{at_shape.seq}"
        why_absent = next(filter(None, reasons), f"there is no measurement or estimate at {shape}")
        absent = absent_figures(why_absent)
        for row in usable or [artifact_rows[0].model_copy(update={**absent, "threads": None})]:
            judged = [row.model_copy(update=absent)]
            if usable and basis != "host":
                judged = same_setting(basis_rows, row.provider, row.threads)
            checks = check_budget(judged, limits, (artifact.id,) if is_whole_text else ()).checks
            score = _score_of(artifact, row.provider, scored_manifest, metric, records.get(artifact.id))
            candidates.append(_candidate(artifact, row, checks, score, metric, bound, options.minimize))
            costs.append(quantities(row)[options.minimize])
    candidates = mark_front(candidates, metric)
    result = Search(
        metric=metric.name,
        bound=bound,
        minimize=options.minimize,
        candidates=tuple(candidates),
        pick=None,
        reason="",
        basis=basis,
        not_in_bundle=absent_variants(manifest),
        batch=at_shape.batch,
        seq=at_shape.seq,
    )
    return _pick(result, costs, metric)


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


@dataclass(frozen=True)
class CandidateLimits:
    """Limits of the candidates of several models, beside those of the device's budget. None is no limit."""

    score: float | None = None
    latency_ms: float | None = None
    size_bytes: int | None = None


def combine_searches(
    searches: Mapping[str, Search],
    limits: CandidateLimits,
    minimize: Literal["latency", "size"],
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Search:
    """Return one search over the candidates of several models, whose artifacts are then called ``model/artifact``.

    The models answer the same task on the same validation rows. A candidate that its own search refused stays refused.
    An estimated latency keeps a limit only with its whole range. Without a limit of the score, the pick is among the
    artifacts of the model with the best score, of which it may lose one standard error.

    Args:
        searches: model → its search, without limits of its own; at least one.
        refused: model that is not recommended → the reason.
    """
    first = next(iter(searches.values()))
    metric = next(task.metric for task in all_tasks() if task.metric.name == first.metric)
    candidates: list[Candidate] = []
    costs: list[Check] = []
    usable: list[int] = []
    for model, search in searches.items():
        for candidate in search.candidates:
            objections, unknown = [candidate.reason] if candidate.reason else [], [*candidate.unknown]
            objections += [refused[model]] if model in refused else []
            usable += [] if objections else [len(candidates)]
            is_inside = None
            if limits.score is not None and candidate.score is not None:
                low, high = candidate.score_low, candidate.score_high
                is_inside = None if low is None or high is None else low <= limits.score <= high
                if not _meets(candidate.score, limits.score, metric):
                    side = "below" if metric.higher_is_better else "above"
                    objections.append(f"{metric.name} {candidate.score:.4f} is {side} {limits.score:g}")
            if limits.latency_ms is not None and candidate.latency_ms is not None:
                low, high = candidate.latency_ms, candidate.latency_ms
                if candidate.latency_status == "estimated":
                    low, high = candidate.low_ms or low, candidate.high_ms or high
                if low > limits.latency_ms:
                    objections.append(f"latency {shown(low, 'ms')} is over {shown(limits.latency_ms, 'ms')}")
                elif high > limits.latency_ms and "latency" not in unknown:
                    unknown.append("latency")
            if limits.size_bytes is not None and candidate.size_bytes > limits.size_bytes:
                sizes = format_bytes(candidate.size_bytes), format_bytes(limits.size_bytes)
                objections.append("size {} is over {}".format(*sizes))
            changes = {
                "artifact": f"{model}/{candidate.artifact}",
                "bound_inside": is_inside,
                "feasible": candidate.feasible and not objections,
                "reason": "; ".join(objections) or None,
                "unknown": tuple(unknown),
            }
            candidates.append(candidate.model_copy(update=changes))
            value: float | None = candidate.latency_ms if minimize == "latency" else candidate.size_bytes
            costs.append(
                Check(
                    name=minimize,
                    artifact=candidates[-1].artifact,
                    limit=inf,
                    value=value,
                    unit="ms" if minimize == "latency" else "bytes",
                    status="pass",
                    basis=candidate.latency_status if minimize == "latency" else "measured",
                    low=candidate.low_ms if minimize == "latency" else None,
                    high=candidate.high_ms if minimize == "latency" else None,
                )
            )
    bases = {search.basis for search in searches.values()}
    combined = first.model_copy(
        update={
            "bound": limits.score,
            "minimize": minimize,
            "candidates": tuple(mark_front(candidates, metric)),
            "pick": None,
            "basis": "host" if "host" in bases else "estimated" if "estimated" in bases else "measured",
            "not_in_bundle": (),
        }
    )
    positions, sign = _eligible(candidates), 1 if metric.higher_is_better else -1

    def rank(position: int) -> float:
        score = candidates[position].score
        return -inf if score is None else sign * score

    best = max(positions, key=rank, default=None)
    if best is not None and limits.score is None and (score := candidates[best].score) is not None:
        rows = candidates[best].score_rows or 0
        error = sqrt(score * (1 - score) / rows) if metric.is_share and rows else 0.0
        models = [candidate.artifact.partition("/")[0] for candidate in candidates]
        best_models = {models[position] for position in positions if rank(position) == rank(best)}
        positions = [p for p in positions if models[p] in best_models and rank(p) >= rank(best) - error]
        demands = (
            f"are of the model with the best {metric.name} ({metric.text(score)}) and lose at most one standard error "
            f"({error:.4f})"
        )
        return _pick(combined, costs, metric, positions, demands)
    picked = _pick(combined, costs, metric)
    return picked.model_copy(update={"closest": max(usable, key=rank, default=None) if best is None else None})


def same_setting(rows: Sequence[Row], provider: str, threads: int | None) -> list[Row]:
    """Return the rows of one provider and thread count."""
    return [row for row in rows if (row.provider, row.threads) == (provider, threads)]


def _score_of(
    artifact: ArtifactManifest, provider: str, manifest: BundleManifest, metric: Metric, record: TargetRecord | None
) -> tuple[float, int, dict[str, Any]] | str:
    """Return score, its number of rows and the candidate's facts on who scored it; or the reason why there is none.

    It is of the validation split, or, if export had no such split, of the golden inputs; with a provider that rounds,
    of its rounded answers. The decode graph and the step artifact have the score of the full graph of their precision.
    """
    unscored = f"it has no score, because an engine runs only on its target: {REMEASURE}"
    if record is not None:
        detail = f" ({record.unscored})" if record.unscored else ""
        unscored = f"{record.device} compared its outputs but did not score it on the validation split{detail}"
    if artifact.status != "built":  # it failed on its target
        return artifact.reason or "it was not built"
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
                return f"it has no {metric.name}"
            scored_as = entry.id if entry is not artifact else None
            return value, score.n, {"scored_as": scored_as, "scored_on": record.device if record is not None else None}
    if rounds_to is not None:
        return f"it has no score in {rounds_to}; export on a machine that computes in {rounds_to}"
    if not artifact.is_graph:
        return unscored
    return "it has no score on the validation split" if has_split else "it has no score"


def _candidate(
    artifact: ArtifactManifest,
    row: Row,
    checks: Sequence[Check],
    score: tuple[float, int, dict[str, Any]] | str,
    metric: Metric,
    bound: float | None,
    minimize: str,
) -> Candidate:
    """Return a candidate; ``row`` has its costs, or the reason why they are not known."""
    values = quantities(row)
    latency, memory, cost = values["latency"], values["memory"], values[minimize]
    facts: dict[str, Any] = {"score": None}
    objections: list[str] = []
    if isinstance(score, str):
        objections.append(score)
    else:
        value, count, scored = score
        facts, interval = {"score": value, **scored}, ""
        if count and metric.is_share:
            low, high = share_interval(round(value * count), count, (1 - CONFIDENCE) / 2)
            inside = None if bound is None else low <= bound <= high
            facts |= {"score_rows": count, "score_low": low, "score_high": high, "bound_inside": inside}
            interval = f", inside its 95% interval {low:.4f} to {high:.4f}" if inside else ""
        if bound is not None and not _meets(value, bound, metric):
            side = "below" if metric.higher_is_better else "above"
            objections.append(f"{metric.name} {value:.4f} is {side} {bound:g}{interval}")
    if latency.value is None:
        objections.append(f"its latency is unknown: {latency.reason or 'no reason is recorded'}")
    has_shapes = len({(check.batch, check.seq) for check in checks if check.batch is not None}) > 1
    for check in checks:
        if check.status == "fail":
            shape = f" at {check.batch}×{check.seq}" if has_shapes and check.batch is not None else ""
            limit = shown(check.limit, check.unit)
            objections.append(f"{check.name} {shown(check.value, check.unit)}{shape} is over {limit}")
    if cost.value is None and not objections:
        objections.append(f"its {minimize} is unknown: {cost.reason}")
    return Candidate(
        artifact=artifact.id,
        precision=artifact.precision,
        exit=artifact.exit,
        trimmed=artifact.trimmed,
        provider=row.provider,
        threads=row.threads,
        **facts,
        latency_ms=latency.value,
        latency_status=latency.basis or "unavailable",
        size_bytes=row.size_bytes,
        memory_bytes=None if memory.value is None else round(memory.value),
        energy_mj=values["energy"].value,
        feasible=not objections,
        on_front=False,
        reason="; ".join(objections) or None,
        low_ms=latency.low,
        high_ms=latency.high,
        unknown=tuple(dict.fromkeys(check.name for check in checks if check.status == "unknown")),
        stable=row.latency_ms.stable,
    )


def _meets(score: float, bound: float, metric: Metric) -> bool:
    return score >= bound if metric.higher_is_better else score <= bound


def _eligible(candidates: Sequence[Candidate]) -> list[int]:
    """Return the positions of those that may be picked: feasible, and if possible known to keep every limit."""
    feasible = [position for position, candidate in enumerate(candidates) if candidate.feasible]
    return [position for position in feasible if not candidates[position].unknown] or feasible


def _pick(
    result: Search,
    costs: Sequence[Check],
    metric: Metric,
    positions: Sequence[int] | None = None,
    demands: str = "break no limit",
) -> Search:
    """Return the search with its pick and why it is the pick; or with none and why nothing is.

    ``costs`` of the candidates are the quantity to minimize. ``positions``: of the candidates that may be picked, which
    ``demands`` describes; None: all that are eligible.
    """
    candidates, minimize, bound = result.candidates, result.minimize, result.bound
    if bound is not None:
        demands = f"have {metric.name} {'≥' if metric.higher_is_better else '≤'} {bound:g} and {demands}"
    positions = _eligible(candidates) if positions is None else positions
    if not positions:
        reason = "nothing was profiled"
        if candidates:
            reason = f"none of {len(candidates)} candidates is known to {demands}"
        scores = [(candidate.score, candidate.artifact) for candidate in candidates if candidate.score is not None]
        if scores and bound is not None and not any(_meets(score, bound, metric) for score, _ in scores):
            score, artifact = max(scores) if metric.higher_is_better else min(scores)
            reason += f"; best {metric.name}: {score:.4f} ({artifact})"
        return result.model_copy(update={"reason": reason})

    values = [inf if cost.value is None else cost.value for cost in costs]  # a feasible candidate has one
    best = min(positions, key=values.__getitem__)

    def why_tied(position: int) -> str | None:
        """Return why the cost of a candidate is no different from the least; None: it is different."""
        cost, value, least = costs[position], values[position], costs[best]
        is_estimate = cost.basis == "estimated"
        if is_estimate and least.high is not None and cost.low is not None and cost.low <= least.high:
            return "their ranges overlap"
        tolerance = CLOSE if minimize == "latency" and not is_estimate else NOISE
        is_instant = tolerance == CLOSE and value - values[best] < INSTANT_MS
        if value > values[best] * (1 + tolerance) and not is_instant:
            return None
        kind, instant = ("measured times", f" or {INSTANT_MS:g} ms") if tolerance == CLOSE else ("values", "")
        return f"a tie: {kind} that differ by less than {tolerance * 100:g}%{instant} are no different"

    def order(position: int) -> tuple[float, ...]:
        """Smaller file; then fewer threads if the times are no different, else the faster one."""
        candidate = candidates[position]
        latency = candidate.latency_ms if candidate.latency_ms is not None else inf
        threads = candidate.threads or 0
        return candidate.size_bytes, *((threads, latency) if minimize == "latency" else (latency, threads))

    def cost_text(position: int) -> str:
        cost = costs[position]
        return ("≈ " if cost.basis == "estimated" else "") + shown(cost.value, cost.unit)

    def label(position: int) -> str:
        """Return the artifact, with runtime and threads if its candidates differ in them."""
        candidate = candidates[position]
        variants = [other for other in candidates if other.artifact == candidate.artifact]
        text = candidate.artifact
        if len({other.provider for other in variants}) > 1:
            text += f" on {provider_facts(candidate.provider).label}"
        if len({other.threads for other in variants}) > 1 and candidate.threads is not None:
            text += f" with {format_threads(candidate.threads)}"
        return text

    pick = min((p for p in positions if minimize == "size" or p == best or why_tied(p) is not None), key=order)
    picked = candidates[pick]
    among = f"of {len(positions)} that {demands}" if len(positions) > 1 else f"the only candidate known to {demands}"
    if pick != best:
        advantage = "fewer threads" if minimize == "latency" else "shorter time"
        if picked.size_bytes < candidates[best].size_bytes:
            advantage = f"smaller file ({format_bytes(picked.size_bytes)})"
        reason = (
            f"{label(pick)}: {minimize} {cost_text(pick)}, equal to the smallest ({cost_text(best)}, {label(best)}) "
            f"{among}: {why_tied(pick)}, and it has the {advantage}"
        )
    elif len(positions) > 1:
        reason = f"{label(pick)}: smallest {minimize} ({cost_text(pick)}) {among}"
    else:
        reason = f"{label(pick)}: {among} ({minimize} {cost_text(pick)})"
    rest = [position for position in positions if position not in (pick, best)]
    if rest:
        second = min(rest, key=values.__getitem__)
        reason += f"; next: {label(second)}, {cost_text(second)}"
    unstable = sum(candidates[position].stable is False for position in positions)
    if unstable and minimize in ("latency", "energy"):
        reason += f". {unstable} of the {len(positions)} measurements are unstable: measure again on an idle machine"
    if bound is not None and picked.score_low is not None and picked.score_high is not None:
        low, high = metric.text(picked.score_low), metric.text(picked.score_high)
        reason += f". {metric.name[0].upper()}{metric.name[1:]} {metric.text(picked.score)} on {picked.score_rows:,} "
        reason += f"rows, {CONFIDENCE * 100:g}% interval {low} to {high}"
        if picked.bound_inside:
            reason += f": the limit {bound:g} lies inside it, so these rows do not decide whether it is met"
    if picked.unknown:
        reason += f". Unknown: whether it keeps the limit of {' and '.join(picked.unknown)}"
    if result.basis == "host":
        reason += ". Ranked by the times of this host, because there are none of the device"
    elif picked.latency_status == "estimated":
        reason += ". Its time is an estimate"
    return result.model_copy(update={"pick": pick, "reason": reason})


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
    if isinstance(task, TokenTask) and not any(artifact.role == "decode" for artifact in artifacts):
        options["decoding with caches"] = "--exit all"
    if isinstance(task, TextTask) and not any(artifact.trimmed for artifact in artifacts):
        options["trimmed vocabulary"] = "--vocab-trim"
    lines = [f"{variant}: add them with edgeformer export {option}" for variant, option in options.items()]
    unbuilt = {artifact.id: artifact for artifact in artifacts if artifact.status != "built"}
    lines += [f"{id_}: {entry.status}: {entry.reason or 'no reason is recorded'}" for id_, entry in unbuilt.items()]
    return tuple(lines)
