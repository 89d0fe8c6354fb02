"""Rows of a claim, measured again in turn: every round is a fresh process for each of them, until a sequential test is
sure of each. What the machine does to one row in those minutes it does to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from statistics import median
from typing import Literal

from pydantic import ValidationError

from edgeformer.formats.device import Response, Speed
from edgeformer.formats.report import Row
from edgeformer.stages.profiling.estimating.reference import slowness
from edgeformer.stages.profiling.gating.pacing import PaceSpec, typical_ms
from edgeformer.stages.profiling.gating.player import PlayerError, calls_of_block, player
from edgeformer.stages.profiling.gating.sequential import (
    ERROR,
    EVERY,
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    Interval,
    fewest_rounds,
    interval,
)
from edgeformer.stages.profiling.verdict import latency_of

Holds = Literal["yes", "no", "not known", "another speed"]
"""The last: it does not hold, but at equal speed of the processor it would. That confirms nothing, for the claim's
speed is what the claim says, and contradicts nothing either."""
_RESPONSE = Response(of_product=0.75, of_copy=0.25)
"""Taken for granted, since a claim holds no fit of its own: it only spares an honest claim a contradiction."""
_BLOCK_S, _BLOCK_CALLS = 0.25, 25
TOGETHER, _LONGEST_S = 5, 600.0
"""Rows that are measured in turn, and for how long they are."""


@dataclass(frozen=True)
class AgainRules:
    """When to stop.

    Attributes:
        tolerance: a time holds that is off by less, as a share of the smaller of the two.
        longest_s: no new round begins later than this after the first one of all; None: ten minutes for each group of
            rows that are measured together.
        error: the chance that any interval misses, for all rows together.
    """

    tolerance: float = 0.15
    longest_s: float | None = None
    error: float = ERROR


@dataclass
class Again:
    """A row, and what its rounds have given.

    Attributes:
        row: of the claim.
        spec: how it is measured here.
        log_ratios: of the time here to the claimed one, one per round.
        known: of the change, as far as the rounds tell.
        log_speeds: how many times slower this processor was than the claimed one, one per round as a logarithm; empty
            where one of the two did not say.
        at_equal_speed: of the change beyond that.
        fewest: rounds that say anything.
        refusal: why it cannot be measured here.
    """

    row: Row
    spec: PaceSpec
    log_ratios: list[float] = field(default_factory=list)
    known: Interval = field(default_factory=lambda: interval([]))
    log_speeds: list[float] = field(default_factory=list)
    at_equal_speed: Interval = field(default_factory=lambda: interval([]))
    fewest: int = FEWEST_ROUNDS
    refusal: str | None = None

    @property
    def claimed_ms(self) -> float:
        """The median call of the claim."""
        assert self.row.latency_ms.p50 is not None
        return self.row.latency_ms.p50

    @property
    def here_ms(self) -> float | None:
        """The median of the rounds; None: none was measured."""
        return self.claimed_ms * exp(median(self.log_ratios)) if self.log_ratios else None

    @property
    def claimed_range(self) -> tuple[float, float]:
        """Between which times the claim says that the median call lies, as shares of it, at most a factor of two off.

        Wider than nothing where the claim calls the row not stable and a warning says why: then the medians of its two
        processes, and its quartiles.
        """
        latency, known = self.row.latency_ms, latency_of(self.row)
        if latency.stable is not False or not latency.warnings or known.low is None or known.high is None:
            return 1.0, 1.0
        return max(known.low / self.claimed_ms, 1 / MOST_FACTOR), min(known.high / self.claimed_ms, MOST_FACTOR)

    @property
    def claimed_speed(self) -> Speed | None:
        """Of the processor while the claim was measured; None: it does not say, or not in a way that can be read."""
        try:
            return Speed.model_validate(self.row.conditions.get("speed"))
        except ValidationError:
            return None

    @property
    def slowness(self) -> float | None:
        """How many times slower this processor was; None: not known."""
        return exp(median(self.log_speeds)) if self.log_speeds else None

    def add(self, found_ms: float, speed: Speed | None) -> None:
        """Keep a round: its typical call, and the processor's speed meanwhile."""
        self.log_ratios.append(log(found_ms / self.claimed_ms))
        claimed = self.claimed_speed
        if speed is not None and claimed is not None and 0 < (factor := slowness(speed, claimed, _RESPONSE)) < inf:
            self.log_speeds.append(log(factor))

    def look(self, error: float) -> None:
        """See what the rounds tell; ``error``: the chance that an interval misses."""
        self.known = interval(self.log_ratios, error)
        self.at_equal_speed = self.known
        if self.log_speeds:
            pairs = zip(self.log_ratios, self.log_speeds, strict=True)
            self.at_equal_speed = interval([ratio - speed for ratio, speed in pairs], error)

    def holds(self, tolerance: float) -> Holds:
        """Whether the claimed time holds here: the whole interval is within the tolerance, or beyond it.

        A time that does not hold may be that of a processor at another speed, up to a factor of two.
        """
        found = _within(self.known, self.claimed_range, tolerance)
        if found != "no" or self.slowness is None or abs(log(self.slowness)) > log(MOST_FACTOR):
            return found
        equal = _within(self.at_equal_speed, self.claimed_range, tolerance)
        return "another speed" if equal == "yes" else equal


def _within(known: Interval, claimed: tuple[float, float], tolerance: float) -> Literal["yes", "no", "not known"]:
    least, most = claimed[0] / (1 + tolerance) - 1, claimed[1] * (1 + tolerance) - 1
    if known.low > most or known.high < least:
        return "no"
    return "yes" if known.low >= least and known.high <= most else "not known"


def measure_again(rows: Sequence[Again], rules: AgainRules, advance: Callable[[], None] = lambda: None) -> None:
    """Measure rounds until every row is known well enough, or time or rounds are used up.

    A few rows are measured together, in turn, before the next few: of many rows at once, none would get the rounds that
    say anything before the time is over. Of a limit for all, each group gets its part of what the others left.

    Args:
        rows: are given their rounds.
        rules: when to stop.
        advance: is told after every process.
    """
    began, error = time.perf_counter(), rules.error / max(1, len(rows))
    for start in range(0, len(rows), TOGETHER):
        group, longest_s = rows[start : start + TOGETHER], _LONGEST_S
        if rules.longest_s is not None:
            left_s = rules.longest_s - (time.perf_counter() - began)
            longest_s = left_s * len(group) / (len(rows) - start)
        _measure_group(group, (rules.tolerance, error, longest_s), advance)


def _measure_group(rows: Sequence[Again], until: tuple[float, float, float], advance: Callable[[], None]) -> None:
    """``until``: tolerance, the error of each row, and seconds after which no new round begins."""
    tolerance, error, longest_s = until
    began, number, left = time.perf_counter(), 0, list(rows)
    for again in rows:
        again.fewest = fewest_rounds(error)
    while left and number < MOST_ROUNDS and time.perf_counter() - began < longest_s:
        for again in left if number % 2 == 0 else left[::-1]:
            _one(again)
            advance()
        number += 1
        if number % EVERY:
            continue
        for again in left:
            again.look(error)
        left = [one for one in left if one.refusal is None and one.holds(tolerance) == "not known"]


def _one(again: Again) -> None:
    """A fresh process, and its typical call."""
    if again.refusal is not None:
        return
    try:
        with player(again.spec) as process:
            warm = process.ready()
            block = process.block(calls_of_block(warm.call_ms, _BLOCK_S, _BLOCK_CALLS))
    except PlayerError as error:
        again.refusal = str(error)
        return
    again.add(typical_ms(block), block.speed)


def common_factor(rows: Sequence[Again], tolerance: float) -> float | None:
    """Time here over claimed time where it is one factor for all rows, within the tolerance, and not 1; else None.

    A processor that is capped, or has several speeds, changes all times alike; what a file costs does not.

    Args:
        rows: at least :data:`FEWEST_ALIKE` that were measured.
        tolerance: by which share a row may differ from the others.
    """
    middles = [median(one.log_ratios) for one in rows if one.log_ratios]
    if len(middles) < FEWEST_ALIKE:
        return None
    shift, most = median(middles), log(1 + tolerance)
    if max(abs(one - shift) for one in middles) > most or not most < abs(shift) <= log(MOST_FACTOR):
        return None
    return exp(shift)


def unknown_speed(again: Again, rows: int) -> list[str]:
    """Why another speed cannot be told from another time: as many rows as would show it are not there.

    Args:
        again: a row that was measured.
        rows: how many were.
    """
    alone = rows < FEWEST_ALIKE and again.slowness is None and bool(again.log_ratios)
    if not alone or abs(median(again.log_ratios)) > log(MOST_FACTOR):
        return []
    return [
        f"neither the claim's row nor {FEWEST_ALIKE} rows tell whether the processor is at another speed; make the "
        "claim again with this version"
    ]


FEWEST_ALIKE = 3
MOST_FACTOR = 2.0
"""Between two speeds of one processor; beyond it the claim is of another machine, whatever it says."""
