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
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.report import Candidate, Check, Row, Search
from edgeformer.formats.scores import Score
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.stages.profiling.absent_variants import absent_variants
from edgeformer.stages.profiling.choosing import Choice, Metric, Minimize, Option, choose, front
from edgeformer.stages.profiling.verdict import Judged, Limits, Quantity, energy_of, judge, latency_of, memory_of

__all__ = ["SearchOptions", "check_options", "search"]

Basis = Literal["measured", "estimated", "host"]


@dataclass(frozen=True)
class SearchOptions:
    """What is searched for.

    Attributes:
        min_accuracy: classification: lowest accuracy on the validation split, 0 to 1; None: any.
        max_perplexity: language modelling: highest perplexity on the validation split; None: any.
        minimize: what the pick has least of.
    """

    min_accuracy: float | None = None
    max_perplexity: float | None = None
    minimize: Minimize = "latency"


@dataclass(frozen=True)
class _Scored:
    """A score on the split that all candidates share; None with the reason."""

    value: float | None
    scored_as: str | None = None
    why_none: str | None = None


def check_options(options: SearchOptions, manifest: BundleManifest) -> None:
    """Refuse what cannot be searched for in this bundle, before anything is measured.

    Raises:
        InputError: a bound that is not the task's or is out of range, or a model whose scores are void.
    """
    language = manifest.task == "language-modeling"
    if options.min_accuracy is not None and language:
        raise InputError(f"--min-accuracy: {manifest.run!r} is a language model; bound it with --max-perplexity")
    if options.max_perplexity is not None and not language:
        raise InputError(f"--max-perplexity: {manifest.run!r} is a classifier; bound it with --min-accuracy")
    if options.min_accuracy is not None and not 0 <= options.min_accuracy <= 1:
        raise InputError(f"--min-accuracy: {options.min_accuracy:g} is no share; give 0 to 1, e.g. 0.91 for 91 %")
    if options.max_perplexity is not None and not options.max_perplexity >= 1:
        raise InputError(f"--max-perplexity: {options.max_perplexity:g}; perplexity is never below 1, give e.g. 25")
    if manifest.leaks:
        raise InputError(f"--search: {manifest.run!r} leaks future tokens; its scores are void, nothing to search by")


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
        rows: of the whole report, host and device.
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
    metric: Metric = "perplexity" if manifest.task == "language-modeling" else "accuracy"
    bound = options.max_perplexity if metric == "perplexity" else options.min_accuracy
    choice = Choice(metric, bound, options.minimize)
    basis, usable = _usable(rows, kind, on_target)
    found: list[Option] = []
    for artifact in {known.id: known for known in manifest.artifacts}.values():
        own = [row for row in rows if row.artifact == artifact.id]
        if not own:
            continue
        known = (_score(artifact, manifest, metric), _why_none(own, limits), basis)
        ways: list[Row | None] = [*_ways(artifact, usable.get(artifact.id, []), limits)]
        found += [_option(artifact, row, own[0], known, (limits, choice)) for row in ways or [None]]
    on_front = front([option.candidate for option in found], metric)
    candidates = tuple(
        option.candidate.model_copy(update={"on_front": position in on_front}) for position, option in enumerate(found)
    )
    pick, reason = choose(found, choice, basis)
    return Search(
        metric=metric,
        bound=bound,
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
    phase = "steady" if _whole_texts(artifact) else limits.phase
    judged = [row for row in rows if (row.batch, row.seq, row.phase) == (limits.batch, limits.seq, phase)]
    return list({(row.provider, row.threads): row for row in judged}.values())


def _whole_texts(artifact: ArtifactManifest) -> bool:
    return artifact.role in ("full", "exit")


def _why_none(rows: Sequence[Row], limits: Limits) -> str:
    """Why an artifact has no usable row: what its rows say, else that none is of the judged shape."""
    said = [row.latency_ms.reason for row in rows if row.latency_ms.status == "unavailable" and row.latency_ms.reason]
    return said[0] if said else f"{limits.batch}×{limits.seq} was neither measured nor estimated"


def _score(artifact: ArtifactManifest, manifest: BundleManifest, metric: Metric) -> _Scored:
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
                return _Scored(_checked(score, metric).value, scored_as=full.id)
    if not artifact.is_graph:
        return _Scored(None, why_none="its predictions were never scored (an engine runs only on its target)")
    split = "the validation split" if anywhere else "anything"
    return _Scored(None, why_none=f"its predictions were never scored on {split}")


def _kind(artifact: ArtifactManifest) -> tuple[str, str, bool]:
    return artifact.format, artifact.precision, artifact.trimmed


def _checked(score: Score, metric: Metric) -> _Scored:
    value: float | None = getattr(score, metric, None)  # None: another task's score
    return _Scored(value) if value is not None and isfinite(value) else _Scored(None, why_none=f"it has no {metric}")


def _option(
    artifact: ArtifactManifest,
    row: Row | None,
    any_row: Row,
    known: tuple[_Scored, str, Basis],
    asked: tuple[Limits, Choice],
) -> Option:
    """``row`` as a candidate; None: nothing usable is known of the artifact, ``any_row`` says at least its size."""
    score, why_none, basis = known
    limits, choice = asked
    size = any_row.size_bytes
    missing = Quantity(None, "unavailable", why_none)
    latency = latency_of(row) if row is not None else missing
    memory = memory_of(row) if row is not None else missing
    energy = energy_of(row) if row is not None else missing
    of_device = [row] if row is not None and basis != "host" else []
    checks = judge([Judged(artifact.id, size, of_device, why_none, _whole_texts(artifact))], limits).checks
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
        provider=(row or any_row).provider,
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


def _against(checks: Sequence[Check], score: _Scored, latency: Quantity, choice: Choice) -> list[str]:
    """Everything that speaks against a candidate, in words."""
    against = [score.why_none] if score.why_none else []
    if score.value is not None and not choice.meets(score.value):
        side = "below" if choice.metric == "accuracy" else "above"
        against.append(f"{choice.metric} {score.value:.4f} is {side} {choice.bound:g}")
    if latency.value is None:
        against.append(f"no time is known: {latency.reason}")
    for check in checks:
        if check.status == "fail":
            against.append(f"{check.name} {_shown(check.value, check)} is over {_shown(check.limit, check)}")
    return against


def _shown(value: float | None, check: Check) -> str:
    return format_bytes(value) if check.unit == "bytes" else f"{format_milliseconds(value)} {check.unit}"
