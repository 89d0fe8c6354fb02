"""The Pareto front of a search, and its pick with the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgeformer.formats.report import Candidate
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.stages.profiling.verdict import Quantity

Metric = Literal["accuracy", "perplexity"]
Minimize = Literal["latency", "size", "memory", "energy"]

NOISE = 0.025
"""Measurements that differ by less are one: the coefficient of variation above which a row warns."""


@dataclass(frozen=True)
class Choice:
    """What was asked for. ``bound``: lowest accuracy or highest perplexity; None: any."""

    metric: Metric
    bound: float | None
    minimize: Minimize

    def meets(self, score: float) -> bool:
        """Whether a score is within the bound."""
        if self.bound is None:
            return True
        return score >= self.bound if self.metric == "accuracy" else score <= self.bound


@dataclass(frozen=True)
class Option:
    """A candidate, what is known of the quantity that is minimized, and whether its time was measured stably."""

    candidate: Candidate
    cost: Quantity
    stable: bool = True


def front(candidates: Sequence[Candidate], metric: Metric) -> set[int]:
    """Positions of the candidates that no other beats: in score, latency and size, feasible or not.

    One beats another when it is at least as good in all three and better in one. A candidate whose score or latency
    is not known is never on the front.
    """
    points: dict[int, tuple[float, float, int]] = {}
    for position, candidate in enumerate(candidates):
        if candidate.score is not None and candidate.latency_ms is not None:
            loss = -candidate.score if metric == "accuracy" else candidate.score
            points[position] = (loss, candidate.latency_ms, candidate.size_bytes)
    return {
        position
        for position, point in points.items()
        if not any(other != point and all(map(_at_most, other, point)) for other in points.values())
    }


def _at_most(left: float, right: float) -> bool:
    return left <= right


def choose(options: Sequence[Option], choice: Choice, basis: str) -> tuple[int | None, str]:
    """The position of the pick and why it is the pick; None and why nothing is."""
    feasible = [position for position, option in enumerate(options) if option.candidate.feasible]
    if not feasible:
        return None, _why_nothing(options, choice)
    certain = [position for position in feasible if not options[position].candidate.unknown]
    pool = certain or feasible
    best = min(pool, key=lambda position: _value(options[position]))
    tied = [p for p in pool if choice.minimize == "size" or _within_noise(options[best].cost, options[p].cost)]
    pick = min(tied, key=lambda position: _order(options[position], choice))
    return pick, _why(options, (pick, best, pool), choice, basis)


def _value(option: Option) -> float:
    assert option.cost.value is not None  # a candidate without it is not feasible
    return option.cost.value


def _within_noise(best: Quantity, other: Quantity) -> bool:
    """Whether ``other``, which is no smaller than ``best``, might as well be as small."""
    assert best.value is not None and other.value is not None
    if other.value <= best.value * (1 + NOISE):
        return True
    return best.high is not None and other.low is not None and other.low <= best.high


def _order(option: Option, choice: Choice) -> tuple[float, ...]:
    """Smaller file; then fewer threads where their times are no different, else the faster one."""
    candidate = option.candidate
    latency = candidate.latency_ms if candidate.latency_ms is not None else float("inf")
    threads = candidate.threads or 0
    return candidate.size_bytes, *((threads, latency) if choice.minimize == "latency" else (latency, threads))


def _why(options: Sequence[Option], positions: tuple[int, int, list[int]], choice: Choice, basis: str) -> str:
    """Of ``pool``, ``best`` has the least and ``pick`` is the pick: the same, or no different within noise."""
    pick, best, pool = positions
    name, what = _label(options, pick), choice.minimize
    among = f"of {len(pool)} that {_demands(choice)}" if len(pool) > 1 else f"the only one that {_demands(choice)}"
    if pick != best:
        within = "their ranges overlap" if options[pick].cost.low is not None else f"they are within {NOISE:.1%}"
        size = options[pick].candidate.size_bytes
        smaller = size < options[best].candidate.size_bytes
        wins = f"smaller file ({format_bytes(size)})" if smaller else _wins(choice)
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
        following = min(others, key=lambda position: _value(options[position]))
        reason += f"; next: {_label(options, following)}, {_cost(options[following], what)}"
    shaky = sum(not options[position].stable for position in pool) if what in ("latency", "energy") else 0
    if shaky:
        reason += f". {shaky} of the {len(pool)} measurements are not stable: measure again when the machine is quiet"
    return reason + _reservations(options[pick].candidate, basis)


def _wins(choice: Choice) -> str:
    return "fewer threads" if choice.minimize == "latency" else "shorter time"


def _demands(choice: Choice) -> str:
    if choice.bound is None:
        return "break no limit"
    sign = "≥" if choice.metric == "accuracy" else "≤"
    return f"have {choice.metric} {sign} {choice.bound:g} and break no limit"


def _reservations(pick: Candidate, basis: str) -> str:
    """What the reader must know before deploying the pick."""
    said = ""
    if pick.unknown:
        said += f". Not known: whether it keeps the limit of {' and '.join(pick.unknown)}"
    if basis == "host":
        said += ". Ranked by this host's times: the device was neither measured nor estimated"
    elif pick.latency_status == "estimated":
        said += ". Its time is an estimate"
    return said


def _why_nothing(options: Sequence[Option], choice: Choice) -> str:
    if not options:
        return "nothing was profiled"
    scores = [(o.candidate.score, o.candidate.artifact) for o in options if o.candidate.score is not None]
    reason = f"none of {len(options)} candidates is feasible: none is known to {_demands(choice)}"
    if scores and not any(choice.meets(score) for score, _ in scores):
        score, artifact = max(scores) if choice.metric == "accuracy" else min(scores)
        reason += f"; best {choice.metric}: {score:.4f} ({artifact})"
    return reason


def _cost(option: Option, what: str) -> str:
    value, about = option.cost.value, "≈ " if option.cost.basis == "estimated" else ""
    if what in ("size", "memory"):
        return about + format_bytes(value)
    return f"{about}{format_milliseconds(value)} {'ms' if what == 'latency' else 'mJ'}"


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
