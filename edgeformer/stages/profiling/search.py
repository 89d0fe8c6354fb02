"""Which artifact to deploy: every one that was profiled, as a candidate with its score, cost and verdict.

A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
costs are those of the device: measured there, else estimated for it. Only where there is neither do this host's own
times stand in; they rank the candidates, but are never held against the device's limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from edgeformer.backends import provider_facts
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest, Rounded
from edgeformer.formats.report import Candidate, Check, Row, Search, Verdict
from edgeformer.formats.target_record import REMEASURE, TargetRecord, completed, lacks_parity
from edgeformer.stages.profiling.absent_variants import absent_variants
from edgeformer.stages.profiling.choosing import Basis, Choice, Option, SearchOptions, check_options, choose, front
from edgeformer.stages.profiling.verdict import (
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


@dataclass(frozen=True)
class _KnownScore:
    """A score on the split that all candidates share; None with the reason."""

    value: float | None
    scored_as: str | None = None
    why_none: str | None = None
    rows: int | None = None


@dataclass(frozen=True)
class _Question:
    """What every candidate is held against, and whose times it has. ``manifest``: completed by ``records``."""

    manifest: BundleManifest
    limits: Limits
    choice: Choice
    basis: Basis
    records: Mapping[str, TargetRecord]


def search(
    manifest: BundleManifest,
    rows: Sequence[Row],
    known: Sequence[Evidence],
    limits: Limits,
    options: SearchOptions,
    records: Mapping[str, TargetRecord] = MappingProxyType({}),
) -> Search:
    """Look at every artifact that was profiled and name the one to deploy.

    Args:
        manifest: of the bundle.
        rows: of the whole report, host and device.
        known: of each artifact, on the device.
        limits: what the device's budget and the command allow.
        options: what is searched for.
        records: artifact that export did not compare → what its target found; see
            :meth:`~edgeformer.formats.target_record.TargetRecords.completing`.

    Returns:
        All candidates in the order of the bundle, and the position of the pick: the least of ``options.minimize`` among
        those that meet the bound and break no limit. Candidates of which every limit is known to be kept go before
        those with a limit that nobody can decide. Differences within noise (2.5 %, or overlapping ranges: of estimates,
        or of measured times that are close) do not count: the smaller file wins.

    Raises:
        InputError: as :func:`check_options`.
    """
    choice = check_options(options, manifest)
    statuses = {row.latency_ms.status for evidence in known for row in evidence.rows}
    basis: Basis = "estimated" if "estimated" in statuses else "measured" if "measured" in statuses else "host"
    found_there = completed(manifest, records)
    question, evidences = _Question(found_there, limits, choice, basis, records), {one.artifact: one for one in known}
    found: list[Option] = []
    for artifact in {entry.id: entry for entry in found_there.artifacts}.values():
        if artifact.id in evidences:
            own = [row for row in rows if row.artifact == artifact.id]
            found += _options(artifact, own, evidences[artifact.id], question)
    on_front = front([option.candidate for option in found], choice.metric)
    candidates = tuple(
        option.candidate.model_copy(update={"on_front": position in on_front}) for position, option in enumerate(found)
    )
    pick, reason = choose(found, choice, basis)
    return Search(
        metric=choice.metric.name,
        bound=choice.bound,
        minimize=options.minimize,
        candidates=candidates,
        pick=pick,
        reason=reason,
        basis=basis,
        not_in_bundle=absent_variants(manifest),
        batch=limits.ranked.batch,
        seq=limits.ranked.seq,
    )


def verdict_of_pick(found: Search, known: Sequence[Evidence], limits: Limits) -> Verdict:
    """The verdict of a search: what it picked against the limits; where nothing can be picked, it has failed.

    Args:
        found: of :func:`search`.
        known: of each artifact, on the device.
        limits: what the device's budget and the command allow.
    """
    if found.pick is None:
        return check_budget(known, limits).model_copy(update={"status": "fail"})
    pick = found.candidates[found.pick]
    picked = next(evidence for evidence in known if evidence.artifact == pick.artifact)
    return check_budget([_as_opened(picked, pick.provider, pick.threads)], limits)


def _as_opened(known: Evidence, provider: str, threads: int | None) -> Evidence:
    """What is known of an artifact with one runtime and number of threads."""
    return replace(known, rows=[row for row in known.rows if (row.provider, row.threads) == (provider, threads)])


def _options(artifact: ArtifactManifest, own: Sequence[Row], known: Evidence, question: _Question) -> list[Option]:
    """A candidate per runtime and thread count; one alone where no time is known. ``own``: the artifact's rows."""
    if question.basis == "host":
        known = replace(known, rows=[row for row in own if row.where == "host"])
    phase = "steady" if known.whole_texts else question.limits.phase
    ways: list[Row | None] = [
        row
        for row in judged_rows(known, question.limits.ranked)
        if row.latency_ms.status != "unavailable" and row.phase == phase
    ]
    return [_option(artifact, own, row, known, question) for row in ways or [None]]


def _score(artifact: ArtifactManifest, question: _Question, provider: str) -> _KnownScore:
    """The score on the validation split, or, where export found no such split, on the golden inputs.

    With a provider that rounds, the score of what that answers.

    The decode graph and the step bundle compute what the full graph of their precision computes (export checked that
    against torch), token by token or loop by loop, and are not scored by themselves.
    """
    manifest, metric = question.manifest, question.choice.metric
    if artifact.status != "built":  # it failed on its target
        return _KnownScore(None, why_none=artifact.reason)
    anywhere = any(known.validation is not None for known in manifest.artifacts)
    same = [artifact]
    if artifact.role in ("decode", "step"):
        if lacks_parity(artifact):  # that it computes the same is not known
            return _KnownScore(None, why_none=_unscored(None))
        kind = attrgetter("format", "precision", "trimmed")
        same += [full for full in manifest.artifacts if full.role == "full" and kind(full) == kind(artifact)]
    rounds_to = provider_facts(provider).rounds_to
    for entry in same:
        scored = entry if rounds_to is None else entry.rounded.get(provider)
        if scored is None:
            continue
        if isinstance(scored, Rounded) and scored.reason is not None:
            return _KnownScore(None, why_none=f"{rounds_to}: {scored.reason}")
        score = scored.validation if anywhere else scored.score
        if score is not None:
            value = metric.of(score)
            if value is None or not isfinite(value):
                return _KnownScore(None, why_none=f"it has no {metric.name}")
            return _KnownScore(value, scored_as=entry.id if entry is not artifact else None, rows=score.n)
    if rounds_to is not None:
        return _KnownScore(None, why_none=f"its predictions in {rounds_to} were never scored: export on such a machine")
    if not artifact.is_graph:
        return _KnownScore(None, why_none=_unscored(question.records.get(artifact.id)))
    split = "the validation split" if anywhere else "anything"
    return _KnownScore(None, why_none=f"its predictions were never scored on {split}")


def _unscored(record: TargetRecord | None) -> str:
    """Why what a builder made has no score, and what to do about it."""
    if record is None:
        return f"its predictions were never scored (an engine runs only on its target): {REMEASURE}"
    why = f" ({record.unscored})" if record.unscored else ""
    return f"on {record.device} it was compared, but not scored on the validation split{why}"


def _option(
    artifact: ArtifactManifest, rows: Sequence[Row], row: Row | None, known: Evidence, question: _Question
) -> Option:
    """``row``, one of the artifact's ``rows``, as a candidate; None: nothing usable is known but the size."""
    limits, choice, at = question.limits, question.choice, question.limits.ranked
    provider = (row or rows[0]).provider
    score, record = _score(artifact, question, provider), question.records.get(artifact.id)
    # Why there is no usable row: what the rows say, else that none is of the judged shape.
    said = (row.latency_ms.reason for row in rows if row.latency_ms.status == "unavailable")
    shape = f"{at.batch}×{at.seq} was neither measured nor estimated"
    missing = Quantity(None, "unavailable", next(filter(None, said), shape))
    latency, memory, energy = (missing if row is None else of(row) for of in (latency_of, memory_of, energy_of))
    of_device = known if row is not None and question.basis != "host" else replace(known, rows=[])
    of_row = _as_opened(of_device, row.provider, row.threads) if row is not None else of_device
    checks = check_budget([replace(of_row, why_no_rows=missing.reason)], limits).checks
    costs = {"latency": latency, "memory": memory, "energy": energy, "size": Quantity(known.size_bytes, "measured", "")}
    interval = choice.interval_fields(score.value, score.rows)
    against = _against(checks, score, interval, latency, choice)
    least = costs[choice.minimize]
    if least.value is None and not against:
        against.append(f"its {choice.minimize} is not known: {least.reason}")
    candidate = Candidate(
        artifact=artifact.id,
        precision=artifact.precision,
        exit=artifact.exit,
        trimmed=artifact.trimmed,
        provider=provider,
        threads=row.threads if row is not None else None,
        score=score.value,
        **interval,
        latency_ms=latency.value,
        latency_status=latency.basis,
        size_bytes=known.size_bytes,
        memory_bytes=None if memory.value is None else round(memory.value),
        energy_mj=energy.value,
        feasible=not against,
        on_front=False,
        reason="; ".join(against) or None,
        low_ms=latency.low,
        high_ms=latency.high,
        unknown=tuple(dict.fromkeys(check.name for check in checks if check.status == "unknown")),
        scored_as=score.scored_as,
        scored_on=record.device if record is not None and score.value is not None else None,
        stable=row.latency_ms.stable if row is not None else None,
    )
    return Option(candidate, least)


def _against(
    checks: Sequence[Check], score: _KnownScore, interval: Mapping[str, Any], latency: Quantity, choice: Choice
) -> list[str]:
    """Everything that speaks against a candidate, in words. ``interval``: see :meth:`Choice.interval_fields`."""
    against = [score.why_none] if score.why_none else []
    if score.value is not None and not choice.meets(score.value):
        side = "below" if choice.metric.higher_is_better else "above"
        inside = ""
        if interval.get("bound_inside"):
            inside = f", inside its 95 % interval {interval['score_low']:.4f} to {interval['score_high']:.4f}"
        against.append(f"{choice.metric.name} {score.value:.4f} is {side} {choice.bound:g}{inside}")
    if latency.value is None:
        against.append(f"no time is known: {latency.reason}")
    several = len({(check.batch, check.seq) for check in checks if check.batch is not None}) > 1
    for check in checks:
        if check.status == "fail":
            at = f" at {check.batch}×{check.seq}" if several and check.batch is not None else ""
            over = f"is over {shown(check.limit, check.unit)}"
            against.append(f"{check.name} {shown(check.value, check.unit)}{at} {over}")
    return against
