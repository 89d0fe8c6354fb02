"""Timed calls as they would be at one speed of the machine, and without what ONNX Runtime's profiler adds to nodes.
Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from edgeformer.artifacts.device import Response, Speed
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.benchmark.measurement import Item
from edgeformer.estimate.listing import ItemNodes, Listing, Round
from edgeformer.estimate.operators import NodeWork, count_nodes, stored_weight_bytes
from edgeformer.estimate.speed_probe import UNMOVED, slowness, typical

# The items with the cheapest nodes show what the profiler adds; of the others it is lost in their own noise.
_CHEAPEST, _FEWEST = 3, 3
# A node is never shorter than that, whatever is taken off.
_LEAST_US = 0.1
# How far a call may be from the sum of its nodes, which are then scaled to it.
_LEAST_SCALE, _MOST_SCALE = 0.3, 2.0


class Timed(NamedTuple):
    """An artifact of a run's bundle and its items, timed."""

    run: str
    artifact: ArtifactManifest
    listing: Listing


@dataclass(frozen=True)
class TimedCall:
    """One timed item, counted: what differs among its nodes, how often each is there, and its mean duration.

    Attributes:
        call_us: of the whole call, without the profiler.
        weight_bytes: of the whole graph's products, each shared weight once.
        rounds: timed rounds, unscaled; empty: the speed was not measured.
        believed: whether the nodes' durations can be those of the call.
    """

    run: str
    artifact: ArtifactManifest
    item: Item
    runs: int
    works: tuple[NodeWork, ...]
    counts: tuple[int, ...]
    durations_us: tuple[float, ...]
    call_us: float
    weight_bytes: float
    rounds: tuple[Round, ...] = ()
    believed: bool = True

    @property
    def nodes(self) -> int:
        """Of the call."""
        return sum(self.counts)

    @property
    def nodes_us(self) -> float:
        """All nodes together."""
        return sum(us * count for us, count in zip(self.durations_us, self.counts, strict=True))


def counted(timed: Sequence[Timed]) -> list[TimedCall]:
    """Every item of every artifact; those that were not timed are left out."""
    return [
        count_call(entry.run, entry.artifact, item)
        for entry in timed
        for item in entry.listing.items.values()
        if item.call_us is not None
    ]


def count_call(run: str, artifact: ArtifactManifest, item: ItemNodes) -> TimedCall:
    """One timed item.

    Args:
        run: whose artifact it is.
        artifact: whose call it is.
        item: with its time.
    """
    assert item.call_us is not None
    works = count_nodes(item.nodes)
    alike: dict[NodeWork, list[float]] = defaultdict(list)
    for work, node in zip(works, item.nodes, strict=True):
        alike[work].append(node.duration_us)
    return TimedCall(
        run, artifact, item.item, item.runs, tuple(alike), tuple(map(len, alike.values())),
        tuple(map(fmean, alike.values())), item.call_us, stored_weight_bytes(item.nodes, works, artifact), item.rounds,
    )  # fmt: skip


def speeds_of(calls: Sequence[TimedCall]) -> list[Speed]:
    """Of all moments at which something was timed."""
    return [entry.speed for call in calls for entry in call.rounds]


def at_one_speed(
    calls: Sequence[TimedCall], speed: Speed | None = None, response: Response = UNMOVED
) -> tuple[list[TimedCall], Speed | None]:
    """All times as they would be at one speed, and that speed.

    A process is brought to it as a whole: the median of its probes says more of its speed than the two around a round
    say of that round. A call takes the median of what it takes in the processes.

    Args:
        calls: timed by processes that each had their own speed.
        speed: wanted; None: the median of all moments.
        response: how the calls' times follow it.

    Returns:
        Unscaled times and None if the speed was not measured.
    """
    speeds = speeds_of(calls)
    if not speeds:
        return list(calls), None
    target, processes = speed or typical(speeds), process_speeds(calls)

    def scaled(call: TimedCall) -> TimedCall:
        took = by_process(call)
        if not took:
            return call
        speeds_of_processes = processes[call.run, call.artifact.id]
        call_us = median(us / slowness(speeds_of_processes[process], target, response) for process, us in took.items())
        factor = call_us / call.call_us
        return replace(call, durations_us=tuple(us * factor for us in call.durations_us), call_us=call_us)

    return [scaled(call) for call in calls], target


def by_process(call: TimedCall) -> dict[int, float]:
    """Process → the median of its rounds of a call, in microseconds, unscaled."""
    rounds: dict[int, list[float]] = defaultdict(list)
    for entry in call.rounds:
        rounds[entry.process].append(entry.us)
    return {process: median(times) for process, times in rounds.items()}


def process_speeds(calls: Sequence[TimedCall]) -> dict[tuple[str, str], dict[int, Speed]]:
    """(run, artifact) → process → the median of the probes beside everything that the process timed."""
    probes: dict[tuple[str, str], dict[int, list[Speed]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        for entry in call.rounds:
            probes[call.run, call.artifact.id][entry.process].append(entry.speed)
    return {
        key: {process: typical(speeds) for process, speeds in by_process.items()} for key, by_process in probes.items()
    }


def without_profiler(calls: Sequence[TimedCall], call_us: float = 0.0) -> list[TimedCall]:
    """The same with nodes that together take as long as their call does without the profiler.

    The profiler makes every node longer by about the same time, which the calls that were timed without it show; what
    is then left over or missing is noise of a whole item, and spread over its nodes. Where that is too much, nodes and
    call were timed at different speeds, and the nodes are not believed.

    Args:
        calls: all that was timed with one number of threads.
        call_us: microseconds of a call that are none of its nodes'.
    """
    added_us = profiler_us(calls)

    def corrected(call: TimedCall) -> TimedCall:
        durations_us = [max(_LEAST_US, us - added_us) for us in call.durations_us]
        bare = replace(call, durations_us=tuple(durations_us))
        if not bare.nodes:
            return bare
        wanted_us = max(call.call_us - call.runs * call_us, _LEAST_US)
        scale = wanted_us / bare.nodes_us
        believed = _LEAST_SCALE <= scale <= _MOST_SCALE
        return replace(call, durations_us=tuple(us * scale for us in durations_us), believed=believed)

    return [corrected(call) for call in calls]


def profiler_us(calls: Sequence[TimedCall]) -> float:
    """By how many microseconds the profiler makes a node longer: the median of what calls with cheap nodes show; 0
    where there is none."""
    profiled = sorted((call for call in calls if call.nodes), key=lambda call: call.call_us / call.nodes)
    cheapest = profiled[: max(_FEWEST, len(profiled) // _CHEAPEST)]
    if not cheapest:
        return 0.0
    return max(0.0, median((call.nodes_us - call.call_us) / call.nodes for call in cheapest))
