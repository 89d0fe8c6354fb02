"""Search: which artifact to deploy, with the Pareto front of the candidates and the reason for the pick in words.

A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
costs are those of the device: measured there, else estimated for it. If there is neither, this host's own times rank
the candidates, but are never held against the device's limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from operator import le
from types import MappingProxyType
from typing import Any, Literal

from edgeformer.artifacts.bundle_files import REMEASURE, TargetRecord, completed, lacks_parity
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Rounded
from edgeformer.artifacts.report import Candidate, Comparison, Row, Search, Verdict
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.verdict import (
    Evidence,
    Limits,
    Quantity,
    check_budget,
    energy_of,
    judged_rows,
    latency_of,
    memory_of,
    shown,
)
from edgeformer.runtimes import builder_of, provider_facts
from edgeformer.tasks import Metric, all_tasks, get_task
from edgeformer.tasks.risk_control import share_interval

Minimize = Literal["latency", "size", "memory", "energy"]
Basis = Literal["measured", "estimated", "host"]
"""Whose times the candidates have: the device's own, estimates for it, or, without both, this host's."""

CONFIDENCE = 0.95
"""Of the interval of a score."""
NOISE = 0.025
"""Measurements that differ by less are the same: the coefficient of variation above which a row warns."""
CLOSE = 0.15
"""Medians of processes that ran minutes apart may differ by this much and be the same; a tie break measures both."""
_PRECISION_NAMES = {"fp16": "FP16 graphs", "int8": "INT8 graphs", "int4": "INT4 graphs"}


@dataclass(frozen=True)
class SearchOptions:
    """What is searched for.

    Attributes:
        bounds: a task's metric → its worst value on the validation split that will do, e.g. accuracy → 0.91; empty:
            any.
        minimize: what the pick has least of.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    minimize: Minimize = "latency"


@dataclass(frozen=True)
class Choice:
    """Search options for one task's models. ``bound``: the worst value of the metric that will do; None: any."""

    metric: Metric
    bound: float | None
    minimize: Minimize

    def meets(self, score: float) -> bool:
        """Whether a score is within the bound."""
        if self.bound is None:
            return True
        return score >= self.bound if self.metric.higher_is_better else score <= self.bound

    @property
    def demands(self) -> str:
        """What candidates must do, in words."""
        if self.bound is None:
            return "break no limit"
        sign = "≥" if self.metric.higher_is_better else "≤"
        return f"have {self.metric.name} {sign} {self.bound:g} and break no limit"


def check_options(options: SearchOptions, manifest: BundleManifest) -> Choice:
    """Resolve ``options`` for the models of a bundle. Call it before anything is measured.

    Raises:
        InputError: a bound that is not the task's or is out of range, or a model whose scores are void.
    """
    task = get_task(manifest.task)
    metric = task.metric
    for name, bound in options.bounds.items():
        if name != metric.name:
            flag = next((other.metric.flag for other in all_tasks() if other.metric.name == name), name)
            raise InputError(f"{flag}: {manifest.run!r} is a {task.noun}; bound it with {metric.flag}")
        if not metric.lowest <= bound <= (inf if metric.highest is None else metric.highest):
            if metric.highest is None:
                least = f"{metric.lowest:g}, give e.g. {25 * metric.lowest:g}"
                raise InputError(f"{metric.flag}: {bound:g}; {metric.name} is never below {least}")
            share = f"{metric.lowest:g} to {metric.highest:g}, e.g. 0.91 for 91 %"
            raise InputError(f"{metric.flag}: {bound:g} is no share; give {share}")
    if manifest.leaks:
        raise InputError(f"--search: {manifest.run!r} leaks future tokens; its scores are void, nothing to search by")
    return Choice(metric, options.bounds.get(metric.name), options.minimize)


def search(
    manifest: BundleManifest,
    rows: Sequence[Row],
    evidence: Sequence[Evidence],
    limits: Limits,
    options: SearchOptions,
    records: Mapping[str, TargetRecord] = MappingProxyType({}),
) -> Search:
    """Name the artifact to deploy among those that were profiled.

    Args:
        manifest: of the bundle.
        rows: of the whole report, host and device.
        evidence: of each artifact, on the device.
        limits: what the device's budget and the command allow.
        options: what is searched for.
        records: artifact that export did not compare → what its target measured; see
            :meth:`~edgeformer.artifacts.bundle_files.TargetRecords.completing`.

    Returns:
        All candidates in the order of the bundle, and the position of the pick: the least of ``options.minimize`` among
        those that meet the bound and break no limit. Candidates that are known to keep every limit go before those with
        a limit that cannot be decided. Differences within noise (2.5 %, or overlapping ranges: of estimates, or of
        measured times that are close) do not count: the smaller file wins.

    Raises:
        InputError: as :func:`check_options`.
    """
    choice = check_options(options, manifest)
    statuses = {row.latency_ms.status for artifact in evidence for row in artifact.rows}
    basis: Basis = "estimated" if "estimated" in statuses else "measured" if "measured" in statuses else "host"
    scored_manifest = completed(manifest, records)
    evidence_of = {artifact.artifact: artifact for artifact in evidence}
    candidates: list[Candidate] = []
    costs: list[Quantity] = []
    for artifact in {entry.id: entry for entry in scored_manifest.artifacts}.values():
        if artifact.id not in evidence_of:
            continue
        artifact_rows = [row for row in rows if row.artifact == artifact.id]
        artifact_evidence = evidence_of[artifact.id]
        if basis == "host":
            artifact_evidence = replace(artifact_evidence, rows=[row for row in artifact_rows if row.where == "host"])
        phase = "steady" if artifact_evidence.whole_texts else limits.phase
        usable: list[Row | None] = [
            row
            for row in judged_rows(artifact_evidence, limits.ranked)
            if row.latency_ms.status != "unavailable" and row.phase == phase
        ]
        for row in usable or [None]:
            provider = (row or artifact_rows[0]).provider
            score = _score_of(artifact, provider, scored_manifest, choice.metric, records.get(artifact.id))
            candidate, cost = _candidate(artifact, artifact_rows, row, artifact_evidence, limits, choice, basis, score)
            candidates.append(candidate)
            costs.append(cost)
    on_front = front(candidates, choice.metric)
    candidates = [
        candidate.model_copy(update={"on_front": position in on_front}) for position, candidate in enumerate(candidates)
    ]
    pick, reason = Ranking(candidates, costs, choice, basis).pick()
    return Search(
        metric=choice.metric.name,
        bound=choice.bound,
        minimize=options.minimize,
        candidates=tuple(candidates),
        pick=pick,
        reason=reason,
        basis=basis,
        not_in_bundle=absent_variants(manifest),
        batch=limits.ranked.batch,
        seq=limits.ranked.seq,
    )


def verdict_of_pick(result: Search, evidence: Sequence[Evidence], limits: Limits) -> Verdict:
    """Return the verdict of a search: its pick against the limits; without a pick it has failed."""
    if result.pick is None:
        return check_budget(evidence, limits).model_copy(update={"status": "fail"})
    pick = result.candidates[result.pick]
    artifact = next(artifact for artifact in evidence if artifact.artifact == pick.artifact)
    return check_budget([_rows_with(artifact, pick.provider, pick.threads)], limits)


def _rows_with(evidence: Evidence, provider: str, threads: int | None) -> Evidence:
    """Keep the rows of one provider and number of threads."""
    rows = [row for row in evidence.rows if (row.provider, row.threads) == (provider, threads)]
    return replace(evidence, rows=rows)


@dataclass(frozen=True)
class _Score:
    """A score on the split that all candidates share, or the reason why there is none."""

    value: float | None = None
    reason: str | None = None
    rows: int | None = None
    scored_as: str | None = None
    scored_on: str | None = None


def _score_of(
    artifact: ArtifactManifest, provider: str, manifest: BundleManifest, metric: Metric, record: TargetRecord | None
) -> _Score:
    """Return the score on the validation split, or, if export had no such split, on the golden inputs.

    With a provider that rounds, the score of its rounded answers. The decode graph and the step bundle compute what the
    full graph of their precision computes (export compared that with torch) and are not scored themselves.

    Args:
        artifact: of ``manifest``.
        provider: that computes it.
        manifest: completed by the records of targets.
        metric: that the score is of.
        record: of the artifact's target, if there is one.
    """
    unscored = f"its predictions were never scored (an engine runs only on its target): {REMEASURE}"
    if record is not None:
        detail = f" ({record.unscored})" if record.unscored else ""
        unscored = f"on {record.device} it was compared, but not scored on the validation split{detail}"
    if artifact.status != "built":  # it failed on its target
        return _Score(reason=artifact.reason)
    has_split = any(entry.validation is not None for entry in manifest.artifacts)
    same_answers = [artifact]
    if artifact.role in ("decode", "step"):
        if lacks_parity(artifact):  # it may compute something else
            return _Score(reason=unscored)
        variant = (artifact.format, artifact.precision, artifact.trimmed)
        same_answers += [
            entry
            for entry in manifest.artifacts
            if entry.role == "full" and (entry.format, entry.precision, entry.trimmed) == variant
        ]
    rounds_to = provider_facts(provider).rounds_to
    for entry in same_answers:
        scored = entry if rounds_to is None else entry.rounded.get(provider)
        if scored is None:
            continue
        if isinstance(scored, Rounded) and scored.reason is not None:
            return _Score(reason=f"{rounds_to}: {scored.reason}")
        score = scored.validation if has_split else scored.score
        if score is not None:
            value = metric.of(score)
            if value is None or not isfinite(value):
                return _Score(reason=f"it has no {metric.name}")
            scored_as = entry.id if entry is not artifact else None
            return _Score(value, None, score.n, scored_as, record.device if record is not None else None)
    if rounds_to is not None:
        return _Score(reason=f"its predictions in {rounds_to} were never scored: export on such a machine")
    if not artifact.is_graph:
        return _Score(reason=unscored)
    split = "the validation split" if has_split else "anything"
    return _Score(reason=f"its predictions were never scored on {split}")


def _candidate(
    artifact: ArtifactManifest,
    artifact_rows: Sequence[Row],
    row: Row | None,
    evidence: Evidence,
    limits: Limits,
    choice: Choice,
    basis: Basis,
    score: _Score,
) -> tuple[Candidate, Quantity]:
    """Return a candidate and its quantity to minimize.

    Args:
        artifact: of the candidate.
        artifact_rows: all rows of the artifact, host and device.
        row: with the candidate's costs; None: only its size is known.
        evidence: of the artifact; its rows are the host's with the basis ``host``.
        limits: what the candidate may cost.
        choice: what is searched for.
        basis: whose times the rows have.
        score: of the artifact with the row's provider.
    """
    ranked = limits.ranked
    # Without a usable row: the reason of an unavailable row, else that no row has the judged shape.
    reasons = (other.latency_ms.reason for other in artifact_rows if other.latency_ms.status == "unavailable")
    missing = Quantity(
        None,
        "unavailable",
        next(filter(None, reasons), f"{ranked.batch}×{ranked.seq} was neither measured nor estimated"),
    )
    latency, memory, energy = (missing if row is None else of(row) for of in (latency_of, memory_of, energy_of))
    size = Quantity(evidence.size_bytes, "measured", "")
    cost = {"latency": latency, "memory": memory, "energy": energy, "size": size}[choice.minimize]
    judged = replace(evidence, rows=[], why_no_rows=missing.reason)
    if row is not None and basis != "host":
        judged = _rows_with(replace(evidence, why_no_rows=missing.reason), row.provider, row.threads)
    checks = check_budget([judged], limits).checks

    interval: dict[str, Any] = {}
    if score.value is not None and score.rows and choice.metric.is_share:
        low, high = share_interval(round(score.value * score.rows), score.rows, (1 - CONFIDENCE) / 2)
        inside = None if choice.bound is None else low <= choice.bound <= high
        interval = {"score_rows": score.rows, "score_low": low, "score_high": high, "bound_inside": inside}
    objections = [score.reason] if score.reason else []
    if score.value is not None and not choice.meets(score.value):
        side = "below" if choice.metric.higher_is_better else "above"
        inside_words = ""
        if interval.get("bound_inside"):
            inside_words = f", inside its 95 % interval {interval['score_low']:.4f} to {interval['score_high']:.4f}"
        objections.append(f"{choice.metric.name} {score.value:.4f} is {side} {choice.bound:g}{inside_words}")
    if latency.value is None:
        objections.append(f"no time is known: {latency.reason}")
    has_shapes = len({(check.batch, check.seq) for check in checks if check.batch is not None}) > 1
    for check in checks:
        if check.status == "fail":
            shape = f" at {check.batch}×{check.seq}" if has_shapes and check.batch is not None else ""
            limit = shown(check.limit, check.unit)
            objections.append(f"{check.name} {shown(check.value, check.unit)}{shape} is over {limit}")
    if cost.value is None and not objections:
        objections.append(f"its {choice.minimize} is not known: {cost.reason}")
    candidate = Candidate(
        artifact=artifact.id,
        precision=artifact.precision,
        exit=artifact.exit,
        trimmed=artifact.trimmed,
        provider=(row or artifact_rows[0]).provider,
        threads=row.threads if row is not None else None,
        score=score.value,
        **interval,
        latency_ms=latency.value,
        latency_status=latency.basis,
        size_bytes=evidence.size_bytes,
        memory_bytes=None if memory.value is None else round(memory.value),
        energy_mj=energy.value,
        feasible=not objections,
        on_front=False,
        reason="; ".join(objections) or None,
        low_ms=latency.low,
        high_ms=latency.high,
        unknown=tuple(dict.fromkeys(check.name for check in checks if check.status == "unknown")),
        scored_as=score.scored_as,
        scored_on=score.scored_on,
        stable=row.latency_ms.stable if row is not None else None,
    )
    return candidate, cost


def front(candidates: Sequence[Candidate], metric: Metric) -> set[int]:
    """Return the positions of the candidates that no other dominates in score, latency and size, feasible or not.

    One dominates another if it is at least as good in all three and better in one. A candidate whose score or latency
    is not known is never on the front.
    """
    points: dict[int, tuple[float, float, int]] = {}
    for position, candidate in enumerate(candidates):
        if candidate.score is not None and candidate.latency_ms is not None:
            loss = -candidate.score if metric.higher_is_better else candidate.score
            points[position] = (loss, candidate.latency_ms, candidate.size_bytes)
    return {
        position
        for position, point in points.items()
        if not any(other != point and all(map(le, other, point)) for other in points.values())
    }


def eligible(candidates: Sequence[Candidate]) -> list[int]:
    """Return the positions of those that may be picked: feasible, and if possible known to keep every limit."""
    feasible = [position for position, candidate in enumerate(candidates) if candidate.feasible]
    return [position for position in feasible if not candidates[position].unknown] or feasible


def close_pair(result: Search) -> tuple[int, int] | None:
    """Return the two fastest eligible candidates of a search for the least latency, if a tie break is needed.

    None: the first is clearly faster, or the times were not measured on this host.
    """
    times = [
        (candidate.latency_ms, position)
        for position in eligible(result.candidates)
        if (candidate := result.candidates[position]).latency_status == "measured" and candidate.latency_ms is not None
    ]
    if result.minimize != "latency" or result.basis == "estimated" or len(times) < 2:
        return None
    (least, first), (next_least, second) = sorted(times)[:2]
    return (first, second) if next_least <= least * (1 + CLOSE) else None


def with_tie_break(result: Search, choice: Choice, comparison: Comparison) -> Search:
    """Return the search with the pick that follows from measuring two candidates in turns."""
    costs = [Quantity(c.latency_ms, c.latency_status, "", c.low_ms, c.high_ms) for c in result.candidates]
    pick, reason = Ranking(result.candidates, costs, choice, result.basis, comparison).pick()
    return result.model_copy(update={"pick": pick, "reason": reason, "compared": comparison})


@dataclass(frozen=True)
class Ranking:
    """Candidates and their quantity to minimize.

    Attributes:
        comparison: result of measuring two of them in turns; it goes before their own times.
    """

    candidates: Sequence[Candidate]
    costs: Sequence[Quantity]
    choice: Choice
    basis: Basis
    comparison: Comparison | None = None

    def pick(self) -> tuple[int | None, str]:
        """Return the position of the pick and why it is the pick; or None and why nothing is."""
        positions, comparison = eligible(self.candidates), self.comparison
        if not positions:
            return None, self._why_nothing()
        best = min(positions, key=self._value)
        if comparison is not None and comparison.found == "faster" and best == comparison.first:
            best = comparison.second

        def is_tied(position: int) -> bool:
            if comparison is not None and comparison.found != "not known" and self._is_compared(best, position):
                return comparison.found == "no different"
            # Ranges of measured times are those of two processes, not of a third one: they tie what is close.
            high, low, value = self.costs[best].high, self.costs[position].low, self._value(position)
            is_overlap = high is not None and low is not None and low <= high
            is_close = self.costs[position].basis == "estimated" or value <= self._value(best) * (1 + CLOSE)
            return value <= self._value(best) * (1 + NOISE) or (is_overlap and is_close)

        def order(position: int) -> tuple[float, ...]:
            """Smaller file; then fewer threads if the times are no different, else the faster one."""
            candidate = self.candidates[position]
            latency = candidate.latency_ms if candidate.latency_ms is not None else inf
            threads = candidate.threads or 0
            return candidate.size_bytes, *((threads, latency) if minimize == "latency" else (latency, threads))

        minimize = self.choice.minimize
        pick = min((p for p in positions if minimize == "size" or p == best or is_tied(p)), key=order)
        return pick, self._why(pick, best, positions) + self._reservations(self.candidates[pick])

    def _value(self, position: int) -> float:
        """Return the cost of a feasible candidate, which has one."""
        value = self.costs[position].value
        assert value is not None
        return value

    def _is_compared(self, first: int, second: int) -> bool:
        return self.comparison is not None and {first, second} == {self.comparison.first, self.comparison.second}

    def _why(self, pick: int, best: int, positions: Sequence[int]) -> str:
        """Return why ``pick`` was picked: it is ``best``, or no different from it within noise."""
        name, minimize, comparison = self._label(pick), self.choice.minimize, self.comparison
        demands = self.choice.demands
        among = f"of {len(positions)} that {demands}" if len(positions) > 1 else f"the only one that {demands}"
        if pick != best:
            if comparison is not None and comparison.found == "no different" and self._is_compared(pick, best):
                within = "measured in turns they are the same"
            elif self.costs[pick].basis == "estimated" and self.costs[pick].low is not None:
                within = "their ranges overlap"
            elif self._value(pick) <= self._value(best) * (1 + NOISE):
                within = f"they are within {NOISE:.1%}"
            else:
                within = "each was measured twice, and the ranges overlap"
            size = self.candidates[pick].size_bytes
            advantage = "fewer threads" if minimize == "latency" else "shorter time"
            if size < self.candidates[best].size_bytes:
                advantage = f"smaller file ({format_bytes(size)})"
            reason = (
                f"{name}: {minimize} {self._cost(pick)}, no different from the least ({self._cost(best)}, "
                f"{self._label(best)}) {among}: {within}, and it has the {advantage}"
            )
        elif len(positions) > 1:
            reason = f"{name}: smallest {minimize} ({self._cost(pick)}) {among}"
        else:
            reason = f"{name}: {among} ({minimize} {self._cost(pick)})"
        rest = [position for position in positions if position not in (pick, best)]
        if rest:
            second = min(rest, key=self._value)
            reason += f"; next: {self._label(second)}, {self._cost(second)}"
        if comparison is not None:
            reason += f"; measured in turns, {self._label(comparison.second)} against {self._label(comparison.first)}: "
            if comparison.low is None or comparison.high is None:
                reason += f"not known after {comparison.rounds} rounds"
            else:
                change = f"{comparison.change:+.1%} ({comparison.low:+.1%} to {comparison.high:+.1%})"
                reason += f"{comparison.found}, {change}"
        unstable = sum(self.candidates[position].stable is False for position in positions)
        if unstable and minimize in ("latency", "energy"):
            reason += f". {unstable} of the {len(positions)} measurements are not stable: "
            reason += "measure again when the machine is quiet"
        return reason

    def _reservations(self, pick: Candidate) -> str:
        """Return what the reader must know before deploying the pick."""
        words = interval_words(pick, self.choice.metric, self.choice.bound) if self.choice.bound is not None else ""
        words = f". {words[0].upper()}{words[1:]}" if words else ""
        if pick.unknown:
            words += f". Not known: whether it keeps the limit of {' and '.join(pick.unknown)}"
        if self.basis == "host":
            words += ". Ranked by this host's times: the device was neither measured nor estimated"
        elif pick.latency_status == "estimated":
            words += ". Its time is an estimate"
        return words

    def _why_nothing(self) -> str:
        if not self.candidates:
            return "nothing was profiled"
        choice = self.choice
        scores = [(candidate.score, candidate.artifact) for candidate in self.candidates if candidate.score is not None]
        reason = f"none of {len(self.candidates)} candidates is feasible: none is known to {choice.demands}"
        if scores and not any(choice.meets(score) for score, _ in scores):
            score, artifact = max(scores) if choice.metric.higher_is_better else min(scores)
            reason += f"; best {choice.metric.name}: {score:.4f} ({artifact})"
        return reason

    def _cost(self, position: int) -> str:
        unit = {"latency": "ms", "energy": "mJ"}.get(self.choice.minimize, "bytes")
        cost = self.costs[position]
        return ("≈ " if cost.basis == "estimated" else "") + shown(cost.value, unit)

    def _label(self, position: int) -> str:
        """Return the artifact, with runtime and threads if its candidates differ in them."""
        candidate = self.candidates[position]
        variants = [other for other in self.candidates if other.artifact == candidate.artifact]
        label = candidate.artifact
        if len({other.provider for other in variants}) > 1:
            label += f" on {candidate.provider}"
        if len({other.threads for other in variants}) > 1 and candidate.threads is not None:
            label += f" with {candidate.threads} {'thread' if candidate.threads == 1 else 'threads'}"
        return label


def interval_words(candidate: Candidate, metric: Metric, bound: float | None) -> str:
    """Return ``accuracy 0.9313 on 422 rows, 95 % interval 0.9028 to 0.9536`` and whether ``bound`` is inside; or ''."""
    if candidate.score_low is None or candidate.score_high is None:
        return ""
    low, high = metric.text(candidate.score_low), metric.text(candidate.score_high)
    words = f"{metric.name} {metric.text(candidate.score)} on {candidate.score_rows:,} rows, "
    words += f"{CONFIDENCE * 100:g} % interval {low} to {high}"
    if candidate.bound_inside:
        words += f": the bound {bound:g} lies inside it, so these rows do not decide whether it is met"
    return words


def absent_variants(manifest: BundleManifest) -> tuple[str, ...]:
    """Return a line per variant that export could add, with the command, and per artifact that was not built.

    Export replaces the whole bundle, so each command also builds what the bundle already has.
    """
    artifacts = manifest.artifacts
    present = [precision for precision in _PRECISION_NAMES if any(a.precision == precision for a in artifacts)]
    exits = sorted({a.exit for a in artifacts if a.role == "exit" and a.exit is not None})
    flags = [f"--{precision}" for precision in present]
    if any(artifact.role == "step" for artifact in artifacts):
        flags.append("--exit all")
    elif exits:
        flags.append(f"--exit {','.join(map(str, exits))}")
    if any(artifact.trimmed for artifact in artifacts):
        flags.append("--vocab-trim")
    # Other formats have a builder; one that is not installed has no flag.
    builders = [builder_of(artifact.format) for artifact in artifacts if not artifact.is_graph]
    built = [builder.flag for builder in builders if builder is not None]
    # --trt --trt-via … includes what --trt alone builds.
    flags += [flag for flag in built if not any(other.startswith(f"{flag} ") for other in built)]

    def command(added: str) -> str:
        # --exit all includes single exits.
        kept = [flag for flag in flags if added != "--exit all" or flag == added or not flag.startswith("--exit")]
        name = manifest.run if manifest.wrapped is None else "BUNDLE"
        return " ".join(["edgeformer export", name, *dict.fromkeys((*kept, added))])

    absent = [precision for precision in _PRECISION_NAMES if precision not in present]
    lines = [f"{_PRECISION_NAMES[precision]}: {command(f'--{precision}')}" for precision in absent]
    # Loops before the last that have a head but no graph. A looped classifier can exit after every loop.
    drifts = [artifact.drift for artifact in artifacts if artifact.drift is not None]
    loops = manifest.exits or tuple(loop.loop for loop in (drifts[0].loops if drifts else ()))
    exit_graphs = {artifact.exit for artifact in artifacts if artifact.role == "exit"}
    missing = sorted(set(sorted(loops)[:-1]) - exit_graphs)
    if missing:
        plural = "s" if len(missing) > 1 else ""
        lines.append(f"exit after loop{plural} {', '.join(map(str, missing))}: {command('--exit all')}")
    task = get_task(manifest.task)
    if task.writes_text and not any(artifact.role == "decode" for artifact in artifacts):
        lines.append(f"decoding with caches: {command('--exit all')}")
    if task.can_trim and not any(artifact.trimmed for artifact in artifacts):
        lines.append(f"trimmed vocabulary: {command('--vocab-trim')}")
    unbuilt = {artifact.id: artifact for artifact in artifacts if artifact.status != "built"}
    lines += [f"{id_}: {entry.status}: {entry.reason or 'no reason given'}" for id_, entry in unbuilt.items()]
    return tuple(lines)
