"""What is searched for, the Pareto front of the candidates, and the pick with its reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import le
from typing import Any, Literal

from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import BundleManifest
from edgeformer.formats.report import Candidate, Comparison
from edgeformer.formats.units import format_bytes
from edgeformer.stages.profiling.verdict import Quantity, shown
from edgeformer.tasks import Metric, all_tasks, task_named
from edgeformer.tasks.risk_control import share_interval

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
