"""What a bundle does not hold although export could write it, with the command that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from operator import attrgetter, le
from types import MappingProxyType
from typing import Any, Literal

from edgeformer.artifacts.bundle_files import REMEASURE, TargetRecord, completed, lacks_parity
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Rounded
from edgeformer.artifacts.report import Candidate, Check, Comparison, Row, Search, Verdict
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
from edgeformer.tasks import Metric, all_tasks, task_named
from edgeformer.tasks.risk_control import share_interval

_NAMES = {"fp16": "FP16 graphs", "int8": "INT8 graphs", "int4": "INT4 graphs"}


def absent_variants(manifest: BundleManifest) -> tuple[str, ...]:
    """One line per absent variant, and one per artifact that was asked for and not built.

    Export replaces the whole bundle, so each command also asks for what is there already.
    """
    asked = {artifact.precision for artifact in manifest.artifacts}
    absent = [precision for precision in _NAMES if precision not in asked]
    lines = [f"{_NAMES[precision]}: {_command(manifest, f'--{precision}')}" for precision in absent]
    # Loops before the last that have a head but no graph. A looped classifier can leave after every loop.
    drifts = [artifact.drift for artifact in manifest.artifacts if artifact.drift is not None]
    loops = manifest.exits or tuple(loop.loop for loop in (drifts[0].loops if drifts else ()))
    have = {artifact.exit for artifact in manifest.artifacts if artifact.role == "exit"}
    missing = sorted(set(sorted(loops)[:-1]) - have)
    if missing:
        plural = "s" if len(missing) > 1 else ""
        lines.append(f"exit after loop{plural} {', '.join(map(str, missing))}: {_command(manifest, '--exit all')}")
    task = task_named(manifest.task)
    if task.writes_text and not any(artifact.role == "decode" for artifact in manifest.artifacts):
        lines.append(f"decoding with caches: {_command(manifest, '--exit all')}")
    if task.can_trim and not any(artifact.trimmed for artifact in manifest.artifacts):
        lines.append(f"trimmed vocabulary: {_command(manifest, '--vocab-trim')}")
    unbuilt = {a.id: a for a in manifest.artifacts if a.status != "built"}
    lines += [f"{name}: {known.status}: {known.reason or 'no reason given'}" for name, known in unbuilt.items()]
    return tuple(lines)


def _command(manifest: BundleManifest, added: str) -> str:
    """The export that writes what the bundle holds and ``added``."""
    flags = [*_held(manifest.artifacts), added]
    if "--exit all" in flags:  # it includes single exits
        flags = [flag for flag in flags if flag == "--exit all" or not flag.startswith("--exit")]
    name = manifest.run if manifest.wrapped is None else "BUNDLE"
    return " ".join(["edgeformer export", name, *dict.fromkeys(flags)])


def _held(artifacts: tuple[ArtifactManifest, ...]) -> list[str]:
    flags = [f"--{precision}" for precision in _NAMES if any(a.precision == precision for a in artifacts)]
    exits = sorted({a.exit for a in artifacts if a.role == "exit" and a.exit is not None})
    if any(artifact.role == "step" for artifact in artifacts):
        flags.append("--exit all")
    elif exits:
        flags.append(f"--exit {','.join(map(str, exits))}")
    if any(artifact.trimmed for artifact in artifacts):
        flags.append("--vocab-trim")
    # What is no graph has a builder; one that is not installed here has no flag.
    builders = [builder_of(artifact.format) for artifact in artifacts if not artifact.is_graph]
    built = [builder.flag for builder in builders if builder is not None]
    # --trt --trt-via … asks for what --trt alone asks for, too.
    return flags + [flag for flag in built if not any(other.startswith(f"{flag} ") for other in built)]


# What is searched for, the Pareto front of the candidates, and the pick with its reason in words.


Minimize = Literal["latency", "size", "memory", "energy"]
Basis = Literal["measured", "estimated", "host"]
"""Whose times the candidates have: the device's own, estimates for it, or for want of both this host's."""

CONFIDENCE = 0.95
"""Of the interval of a score."""
NOISE = 0.025
"""Measurements that differ by less are one: the coefficient of variation above which a row warns."""
CLOSE = 0.15
"""Medians of processes that ran minutes apart may differ by so much and be one; then both are measured in turns."""


@dataclass(frozen=True)
class SearchOptions:
    """What is searched for.

    Attributes:
        bounds: a task's metric → the worst value of it on the validation split that will do, e.g. accuracy → 0.91;
            empty: any.
        minimize: what the pick has least of.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    minimize: Minimize = "latency"


@dataclass(frozen=True)
class Choice:
    """What was asked for, of one task's models. ``bound``: the worst value of the metric that will do; None: any."""

    metric: Metric
    bound: float | None
    minimize: Minimize

    def meets(self, score: float) -> bool:
        """Whether a score is within the bound."""
        if self.bound is None:
            return True
        return score >= self.bound if self.metric.higher_is_better else score <= self.bound

    def interval_fields(self, score: float | None, rows: int | None) -> dict[str, Any]:
        """Return the :class:`Candidate` fields of the 95 % interval of a score over ``rows`` rows.

        Empty if the score or the rows are not known, or the metric is not a share of rows.
        """
        if score is None or not rows or not self.metric.is_share:
            return {}
        low, high = share_interval(round(score * rows), rows, (1 - CONFIDENCE) / 2)
        inside = None if self.bound is None else low <= self.bound <= high
        return {"score_rows": rows, "score_low": low, "score_high": high, "bound_inside": inside}


def check_options(options: SearchOptions, manifest: BundleManifest) -> Choice:
    """What ``options`` mean for the models of a bundle. Call it before anything is measured.

    Args:
        options: what is searched for.
        manifest: of the bundle.

    Raises:
        InputError: a bound that is not the task's or is out of range, or a model whose scores are void.
    """
    task = task_named(manifest.task)
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


@dataclass(frozen=True)
class Option:
    """A candidate, and what is known of the quantity that is minimized."""

    candidate: Candidate
    cost: Quantity

    @property
    def value(self) -> float:
        """Of a feasible candidate, which has one."""
        assert self.cost.value is not None
        return self.cost.value


def front(candidates: Sequence[Candidate], metric: Metric) -> set[int]:
    """Positions of the candidates that no other beats: in score, latency and size, feasible or not.

    One beats another when it is at least as good in all three and better in one. A candidate whose score or latency
    is not known is never on the front.

    Args:
        candidates: all that were looked at.
        metric: what the score is.
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


def choose(
    options: Sequence[Option], choice: Choice, basis: Basis, compared: Comparison | None = None
) -> tuple[int | None, str]:
    """The position of the pick and why it is the pick; None and why nothing is.

    Args:
        options: all candidates.
        choice: what was asked for.
        basis: whose times they have.
        compared: what measuring two of them in turns has found; it goes before their own times.
    """
    pool = pool_of([option.candidate for option in options])
    if not pool:
        return None, _why_nothing(options, choice)
    best = min(pool, key=lambda position: options[position].value)
    if compared is not None and compared.found == "faster" and best == compared.first:
        best = compared.second

    def ties(other: int) -> bool:
        told = compared is not None and {best, other} == {compared.first, compared.second}
        if compared is not None and told and compared.found != "not known":
            return compared.found == "no different"
        return _within_noise(options[best], options[other])

    tied = [position for position in pool if choice.minimize == "size" or position == best or ties(position)]
    pick = min(tied, key=lambda position: _order(options[position], choice))
    reason = _why(options, (pick, best), pool, choice, compared)
    return pick, reason + _reservations(options[pick].candidate, choice, basis)


def pool_of(candidates: Sequence[Candidate]) -> list[int]:
    """Positions of those that may be picked: feasible, and where there are such, known to keep every limit.

    Args:
        candidates: all that were looked at.
    """
    feasible = [position for position, candidate in enumerate(candidates) if candidate.feasible]
    return [position for position in feasible if not candidates[position].unknown] or feasible


def _within_noise(best: Option, other: Option) -> bool:
    """Whether ``other``, which is no smaller than ``best``, might as well be as small.

    Ranges of measured times are what two processes found, not how far off a third one may be: they tie what is close.
    """
    high, low = best.cost.high, other.cost.low
    overlap = high is not None and low is not None and low <= high
    close = other.cost.basis == "estimated" or other.value <= best.value * (1 + CLOSE)
    return other.value <= best.value * (1 + NOISE) or (overlap and close)


def _order(option: Option, choice: Choice) -> tuple[float, ...]:
    """Smaller file; then fewer threads where their times are no different, else the faster one."""
    candidate = option.candidate
    latency = candidate.latency_ms if candidate.latency_ms is not None else float("inf")
    threads = candidate.threads or 0
    return candidate.size_bytes, *((threads, latency) if choice.minimize == "latency" else (latency, threads))


def _why(
    options: Sequence[Option], found: tuple[int, int], pool: Sequence[int], choice: Choice, compared: Comparison | None
) -> str:
    """Why the pick was picked: it has the least, or is no different from it within noise. ``found``: pick and best."""
    pick, best = found
    name, what = _label(options, pick), choice.minimize
    among = f"of {len(pool)} that {_demands(choice)}" if len(pool) > 1 else f"the only one that {_demands(choice)}"
    if pick != best:
        within = _how_close(options, pick, best, compared)
        size = options[pick].candidate.size_bytes
        smaller = size < options[best].candidate.size_bytes
        otherwise = "fewer threads" if choice.minimize == "latency" else "shorter time"
        wins = f"smaller file ({format_bytes(size)})" if smaller else otherwise
        reason = (
            f"{name}: {what} {_cost(options[pick], what)}, no different from the least ({_cost(options[best], what)}, "
            f"{_label(options, best)}) {among}: {within}, and it has the {wins}"
        )
    elif len(pool) > 1:
        reason = f"{name}: smallest {what} ({_cost(options[pick], what)}) {among}"
    else:
        reason = f"{name}: {among} ({what} {_cost(options[pick], what)})"
    others = [position for position in pool if position not in (pick, best)]
    if others:
        following = min(others, key=lambda position: options[position].value)
        reason += f"; next: {_label(options, following)}, {_cost(options[following], what)}"
    reason += _in_turns(options, compared)
    shaky = (
        sum(options[position].candidate.stable is False for position in pool) if what in ("latency", "energy") else 0
    )
    if shaky:
        reason += f". {shaky} of the {len(pool)} measurements are not stable: measure again when the machine is quiet"
    return reason


def _how_close(options: Sequence[Option], pick: int, best: int, compared: Comparison | None) -> str:
    """Why the pick's time is no different from the least."""
    if compared is not None and compared.found == "no different" and {pick, best} == {compared.first, compared.second}:
        return "measured in turns they are the same"
    if options[pick].cost.basis == "estimated" and options[pick].cost.low is not None:
        return "their ranges overlap"
    if options[pick].value <= options[best].value * (1 + NOISE):
        return f"they are within {NOISE:.1%}"
    return "each was measured twice, and the ranges overlap"


def _in_turns(options: Sequence[Option], compared: Comparison | None) -> str:
    """What measuring the two in turns has found, where anything."""
    if compared is None:
        return ""
    told = f"; measured in turns, {_label(options, compared.second)} against {_label(options, compared.first)}: "
    if compared.low is None or compared.high is None:
        return f"{told}not known after {compared.rounds} rounds"
    return f"{told}{compared.found}, {compared.change:+.1%} ({compared.low:+.1%} to {compared.high:+.1%})"


def _demands(choice: Choice) -> str:
    if choice.bound is None:
        return "break no limit"
    sign = "≥" if choice.metric.higher_is_better else "≤"
    return f"have {choice.metric.name} {sign} {choice.bound:g} and break no limit"


def interval_words(candidate: Candidate, metric: Metric, bound: float | None) -> str:
    """``accuracy 0.9313 on 422 rows, 95 % interval 0.9028 to 0.9536``, and whether the bound lies inside; or empty."""
    if candidate.score_low is None or candidate.score_high is None:
        return ""
    low, high = metric.text(candidate.score_low), metric.text(candidate.score_high)
    words = f"{metric.name} {metric.text(candidate.score)} on {candidate.score_rows:,} rows, "
    words += f"{CONFIDENCE * 100:g} % interval {low} to {high}"
    if candidate.bound_inside:
        words += f": the bound {bound:g} lies inside it, so these rows do not decide whether it is met"
    return words


def _reservations(pick: Candidate, choice: Choice, basis: Basis) -> str:
    """What the reader must know before deploying the pick."""
    interval = interval_words(pick, choice.metric, choice.bound) if choice.bound is not None else ""
    words = f". {interval[0].upper()}{interval[1:]}" if interval else ""
    if pick.unknown:
        words += f". Not known: whether it keeps the limit of {' and '.join(pick.unknown)}"
    if basis == "host":
        words += ". Ranked by this host's times: the device was neither measured nor estimated"
    elif pick.latency_status == "estimated":
        words += ". Its time is an estimate"
    return words


def _why_nothing(options: Sequence[Option], choice: Choice) -> str:
    if not options:
        return "nothing was profiled"
    scores = [(o.candidate.score, o.candidate.artifact) for o in options if o.candidate.score is not None]
    reason = f"none of {len(options)} candidates is feasible: none is known to {_demands(choice)}"
    if scores and not any(choice.meets(score) for score, _ in scores):
        score, artifact = max(scores) if choice.metric.higher_is_better else min(scores)
        reason += f"; best {choice.metric.name}: {score:.4f} ({artifact})"
    return reason


def _cost(option: Option, what: str) -> str:
    about = "≈ " if option.cost.basis == "estimated" else ""
    return about + shown(option.cost.value, {"latency": "ms", "energy": "mJ"}.get(what, "bytes"))


def _label(options: Sequence[Option], position: int) -> str:
    """The artifact, with runtime and threads where the candidates differ in them."""
    candidate = options[position].candidate
    same = [option.candidate for option in options if option.candidate.artifact == candidate.artifact]
    label = candidate.artifact
    if len({other.provider for other in same}) > 1:
        label += f" on {candidate.provider}"
    if len({other.threads for other in same}) > 1 and candidate.threads is not None:
        label += f" with {candidate.threads} {'thread' if candidate.threads == 1 else 'threads'}"
    return label


# Which artifact to deploy: every one that was profiled, as a candidate with its score, cost and verdict.
#
# A candidate is an artifact with a runtime and a number of threads, at the shape that the device's budget names. Its
# costs are those of the device: measured there, else estimated for it. Only where there is neither do this host's own
# times stand in; they rank the candidates, but are never held against the device's limits.


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
            :meth:`~edgeformer.artifacts.bundle_files.TargetRecords.completing`.

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
