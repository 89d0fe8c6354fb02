"""Which artifact to deploy: every one that was profiled, as a candidate with its score, cost and verdict.

A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
costs are those of the device: measured there, else estimated for it. Only where there is neither do this host's own
times stand in; they rank the candidates, but are never held against the device's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from edgeformer.backends import on_gpu
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.report import Candidate, Check, Row, Search
from edgeformer.formats.scores import Score
from edgeformer.stages.profiling.absent_variants import absent_variants
from edgeformer.stages.profiling.choosing import (
    Basis,
    Choice,
    Option,
    SearchOptions,
    check_options,
    choose,
    front,
)
from edgeformer.stages.profiling.verdict import (
    Evidence,
    Limits,
    Quantity,
    check_budget,
    energy_of,
    latency_of,
    memory_of,
    shown,
)
from edgeformer.tasks import Metric

__all__ = ["SearchOptions", "check_options", "search"]


@dataclass(frozen=True)
class _KnownScore:
    """A score on the split that all candidates share; None with the reason."""

    value: float | None
    scored_as: str | None = None
    why_none: str | None = None


@dataclass(frozen=True)
class _Question:
    """What every candidate is held against, and whose times it has."""

    manifest: BundleManifest
    limits: Limits
    choice: Choice
    basis: Basis


def search(
    manifest: BundleManifest,
    rows: Sequence[Row],
    limits: Limits,
    options: SearchOptions,
    *,
    kind: Literal["cuda", "cpu"],
    on_target: bool,
) -> Search:
    """Look at every artifact that ``rows`` are of and name the one to deploy.

    Args:
        manifest: of the bundle.
        rows: of the whole report, host and device.
        limits: what the device's budget and the command allow.
        options: what is searched for.
        kind: the device's.
        on_target: this host is the device, so that host rows of its kind are the device's own.

    Returns:
        All candidates in the order of the bundle, and the position of the pick: the least of ``options.minimize`` among
        those that meet the bound and break no limit. Candidates of which every limit is known to be kept go before
        those with a limit that nobody can decide. Differences within noise (2.5 %, or overlapping ranges of estimates)
        do not count: the smaller file wins.

    Raises:
        InputError: as :func:`check_options`.
    """
    check_options(options, manifest)
    basis, usable = _usable(rows, kind, on_target)
    question = _Question(manifest, limits, Choice.of(options, manifest), basis)
    metric = question.choice.metric
    found: list[Option] = []
    for artifact in {entry.id: entry for entry in manifest.artifacts}.values():
        own = [row for row in rows if row.artifact == artifact.id]
        if own:
            ways: Sequence[Row | None] = _ways(artifact, usable.get(artifact.id, []), limits) or [None]
            found += [_option(artifact, own, row, question) for row in ways]
    on_front = front([option.candidate for option in found], metric)
    candidates = tuple(
        option.candidate.model_copy(update={"on_front": position in on_front}) for position, option in enumerate(found)
    )
    pick, reason = choose(found, question.choice, basis)
    return Search(
        metric=metric.name,
        bound=question.choice.bound,
        minimize=options.minimize,
        candidates=candidates,
        pick=pick,
        reason=reason,
        basis=basis,
        not_in_bundle=absent_variants(manifest),
    )


def _usable(rows: Sequence[Row], kind: str, on_target: bool) -> tuple[Basis, dict[str, list[Row]]]:
    """What the rows are, and per artifact those that count: of the device, measured there rather than estimated."""
    measured: dict[str, list[Row]] = {}
    estimated: dict[str, list[Row]] = {}
    host: dict[str, list[Row]] = {}
    for row in rows:
        if row.where == "device" and row.latency_ms.status == "estimated":
            estimated.setdefault(row.artifact, []).append(row)
        elif row.where == "host" and row.latency_ms.status == "measured":
            host.setdefault(row.artifact, []).append(row)
            if on_target and on_gpu(row.provider) == (kind == "cuda"):
                measured.setdefault(row.artifact, []).append(row)
    of_device = estimated | measured
    if not of_device:
        return "host", host
    return ("measured" if of_device.keys() == measured.keys() else "estimated"), of_device


def _ways(artifact: ArtifactManifest, rows: Sequence[Row], limits: Limits) -> list[Row]:
    """One row per runtime and thread count at the judged shape.

    A language model's graph for whole texts spends a whole pass on each token, so its passes are what compares with
    the tokens of a graph that decodes.
    """
    phase = "steady" if whole_texts(artifact) else limits.phase
    judged = [row for row in rows if (row.batch, row.seq, row.phase) == (limits.batch, limits.seq, phase)]
    return list({(row.provider, row.threads): row for row in judged}.values())


def whole_texts(artifact: ArtifactManifest) -> bool:
    """Whether it is a graph without caches, to which every token of a text costs a pass over all of it."""
    return artifact.role in ("full", "exit")


def _score(artifact: ArtifactManifest, manifest: BundleManifest, metric: Metric) -> _KnownScore:
    """The score on the validation split, or, where export found no such split, on the golden inputs.

    The decode graph and the step bundle compute what the full graph of their precision computes (export checked that
    against torch), token by token or loop by loop, and are not scored by themselves.
    """
    anywhere = any(known.validation is not None for known in manifest.artifacts)
    own = artifact.validation if anywhere else artifact.score
    if own is not None:
        return _checked(own, metric)
    if artifact.role in ("decode", "step"):
        for full in manifest.artifacts:
            score = full.validation if anywhere else full.score
            if full.role == "full" and _kind(full) == _kind(artifact) and score is not None:
                return _KnownScore(_checked(score, metric).value, scored_as=full.id)
    if not artifact.is_graph:
        return _KnownScore(None, why_none="its predictions were never scored (an engine runs only on its target)")
    split = "the validation split" if anywhere else "anything"
    return _KnownScore(None, why_none=f"its predictions were never scored on {split}")


def _kind(artifact: ArtifactManifest) -> tuple[str, str, bool]:
    return artifact.format, artifact.precision, artifact.trimmed


def _checked(score: Score, metric: Metric) -> _KnownScore:
    value = metric.of(score)
    if value is None or not isfinite(value):
        return _KnownScore(None, why_none=f"it has no {metric.name}")
    return _KnownScore(value)


def _option(artifact: ArtifactManifest, rows: Sequence[Row], row: Row | None, question: _Question) -> Option:
    """``row``, one of the artifact's ``rows``, as a candidate; None: nothing usable is known but the size."""
    limits, choice = question.limits, question.choice
    score = _score(artifact, question.manifest, choice.metric)
    any_row = row or rows[0]
    size = any_row.size_bytes
    # Why there is no usable row: what the rows say, else that none is of the judged shape.
    said = (row.latency_ms.reason for row in rows if row.latency_ms.status == "unavailable")
    shape = f"{limits.batch}×{limits.seq} was neither measured nor estimated"
    missing = Quantity(None, "unavailable", next(filter(None, said), shape))
    latency, memory, energy = (missing if row is None else of(row) for of in (latency_of, memory_of, energy_of))
    of_device = [row] if row is not None and question.basis != "host" else []
    evidence = [Evidence(artifact.id, size, of_device, missing.reason, whole_texts(artifact))]
    checks = check_budget(evidence, limits).checks
    costs = {"latency": latency, "memory": memory, "energy": energy, "size": Quantity(size, "measured", "")}
    against = _against(checks, score, latency, choice)
    least = costs[choice.minimize]
    if least.value is None and not against:
        against.append(f"its {choice.minimize} is not known: {least.reason}")
    candidate = Candidate(
        artifact=artifact.id,
        precision=artifact.precision,
        exit=artifact.exit,
        trimmed=artifact.trimmed,
        provider=any_row.provider,
        threads=row.threads if row is not None else None,
        score=score.value,
        latency_ms=latency.value,
        latency_status=latency.basis,
        size_bytes=size,
        memory_bytes=None if memory.value is None else round(memory.value),
        energy_mj=energy.value,
        feasible=not against,
        on_front=False,
        reason="; ".join(against) or None,
        low_ms=latency.low,
        high_ms=latency.high,
        unknown=tuple(check.name for check in checks if check.status == "unknown"),
        scored_as=score.scored_as,
    )
    return Option(candidate, least, stable=row is None or row.latency_ms.stable is not False)


def _against(checks: Sequence[Check], score: _KnownScore, latency: Quantity, choice: Choice) -> list[str]:
    """Everything that speaks against a candidate, in words."""
    against = [score.why_none] if score.why_none else []
    if score.value is not None and not choice.meets(score.value):
        side = "below" if choice.metric.higher_is_better else "above"
        against.append(f"{choice.metric.name} {score.value:.4f} is {side} {choice.bound:g}")
    if latency.value is None:
        against.append(f"no time is known: {latency.reason}")
    for check in checks:
        if check.status == "fail":
            against.append(f"{check.name} {shown(check.value, check.unit)} is over {shown(check.limit, check.unit)}")
    return against
