"""What scripts with bars share: verdicts, a limit of time, and what else the machine did meanwhile."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil

from edgeformer.measurement.conditions import CpuReading, read_cpu, used_between
from edgeformer.system.host import usable_cores

ROUNDS = 3
"""Fewer judge nothing."""
MET, NOT_MET, NOT_JUDGED = "met", "not met", "not judged"
INCOMPLETE = 3
"""Exit code where a bar was not judged, as of edgeformer's own commands: done, but not everything."""

Bar = dict[str, Any]


def judged(label: str, values: Sequence[float], target: float, *, at_least: bool, missing: Iterable[str] = ()) -> Bar:
    """Return a bar with its verdict, which is of the median of one figure per round.

    ``at_least``: the figure must reach the target, else not exceed it; ``missing``: why nothing can be said.
    """
    reasons = [*missing]
    if len(values) < ROUNDS:
        reasons.append(f"{len(values)} of at least {ROUNDS} rounds were measured")
    bar: Bar = {"what": label, "sense": "at least" if at_least else "at most", "wanted": target}
    if values:
        bar |= {"median": statistics.median(values), "low": min(values), "high": max(values)}
    if reasons:
        return {**bar, "verdict": NOT_JUDGED, "reason": "; ".join(reasons)}
    reached = bar["median"] >= target if at_least else bar["median"] <= target
    return {**bar, "verdict": MET if reached else NOT_MET}


def unless(disturbed: str | None, bars: Sequence[Bar]) -> list[Bar]:
    """The bars; none of them judged where the machine was disturbed, which is why."""
    if disturbed is None:
        return [*bars]
    return [
        {**bar, "verdict": NOT_JUDGED, "reason": "; ".join(filter(None, [disturbed, bar.get("reason")]))}
        for bar in bars
    ]


def report_bars(bars: Sequence[Bar]) -> int:
    """Print every bar's verdict; the exit code: 3 where one was not judged, 0 otherwise, also where one is not met."""
    for bar in bars:
        results = f"{bar['median']:.2f} ({bar['low']:.2f} to {bar['high']:.2f})" if "median" in bar else "–"
        why = f": {bar['reason']}" if "reason" in bar else ""
        print(f"{bar['verdict']:10} {bar['what']}: {results}, bar: {bar['sense']} {bar['wanted']:g}{why}", flush=True)
    remaining = [bar for bar in bars if bar["verdict"] == NOT_JUDGED]
    if not remaining:
        return 0
    reasons = "; ".join(dict.fromkeys(bar["reason"] for bar in remaining))
    print(f"{len(remaining)} of {len(bars)} bars were not judged: {reasons}", file=sys.stderr)
    return INCOMPLETE


class Limit:
    """So much time: no round begins that would not end within it, going by the longest so far.

    ``parts`` follow one another, with an equal share of what is left for each.
    """

    def __init__(self, minutes: float, parts: int = 1) -> None:
        self._minutes, self._end, self._parts = minutes, time.monotonic() + 60 * minutes, parts

    def tell(self, minutes: float) -> None:
        """Say how many minutes it will take, on two cores without a limit."""
        print(f"about {max(1, round(min(minutes, self._minutes)))} minutes on two quiet cores", flush=True)

    def rounds(self, count: int) -> Iterable[int]:
        """Numbers of the rounds of the next part, from 0. The first is always done."""
        began = time.monotonic()
        until = began + (self._end - began) / self._parts
        self._parts = max(1, self._parts - 1)
        longest = 0.0
        for number in range(count):
            start = time.monotonic()
            if number and start + longest > until:
                print(f"{number} of {count} rounds: no time is left for more", flush=True)
                return
            yield number
            longest = max(longest, time.monotonic() - start)


class Watch:
    """What the machine does from now on beside this process and its children."""

    def __init__(self) -> None:
        self._before = _reading()

    def conditions(self, threads: int) -> dict[str, Any]:
        """Return what was going on so far, and ``disturbed``: why the figures are in doubt, or None."""
        use = used_between(self._before, _reading())
        doubts = use.warnings() or ["other processes computed while this was measured"]
        disturbed = "; ".join(doubts) if use.disturbed(usable_cores(), None) else None
        results: dict[str, Any] = {
            "foreign_cores": None if use.foreign_cores is None else round(use.foreign_cores, 2),
            "stolen_cores": round(use.stolen_cores, 2),
        }
        if threads > usable_cores():
            disturbed = f"{threads} threads, where this process may use {usable_cores()} cores"
        return {**results, "own_cores": round(use.own_cores, 2), "disturbed": disturbed}


def _reading() -> CpuReading:
    """As of the machine, with this process's own time that of its children, too, whether they live or not."""
    local = psutil.Process()
    seconds = sum(os.times()[:4])
    for child in local.children(recursive=True):
        try:
            seconds += sum(child.cpu_times()[:4])
        except psutil.Error:  # it ended at this moment; whoever waits for it has its time
            continue
    return replace(read_cpu(), own_s=seconds, thread_s={})
