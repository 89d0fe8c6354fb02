"""Times of several artifacts in sweeps: in each of them every artifact is timed once, by a fresh process.

A spell in which the machine was slower, or a process that was given slower memory, then falls on one time of many
artifacts rather than on all times of one; the median over the processes is what the artifact takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from edgeformer.stages.profiling.estimating.jobs import Round
from edgeformer.stages.profiling.estimating.listing import ItemNodes, Listing
from edgeformer.stages.profiling.messages import Item

T = TypeVar("T")

SWEEPS = 3
"""The fewest of which one may be off, and the median is not."""


def in_turn(subjects: Sequence[T], sweep: int) -> list[T]:
    """The order of a sweep: every other one goes backwards, so that a steady drift falls on all alike."""
    return list(reversed(subjects)) if sweep % 2 else list(subjects)


class Repeats:
    """Second tries of processes beside which something else used the machine, as long as there is time for them.

    Args:
        spare_s: seconds that all second tries together may take.
    """

    def __init__(self, spare_s: float) -> None:
        self._left_s = spare_s

    def undisturbed(self, run: Callable[[], Listing]) -> Listing:
        """What a process says, or a second one where the first was disturbed; that may be disturbed, too, and says so.

        Args:
            run: starts a process; each does the same.
        """
        began = time.perf_counter()
        found = run()
        took_s = time.perf_counter() - began
        if found.disturbed is None or took_s > self._left_s:
            return found
        self._left_s -= took_s
        return run()


def together(listings: Mapping[int, Listing]) -> Listing:
    """What the processes of all sweeps say of one artifact: the nodes of the first, the rounds of all.

    Args:
        listings: sweep → of one artifact, the first with nodes; an item that the first does not have is refused,
            whatever the others say.
    """
    first = listings[min(listings)]
    items = {item: _together(nodes, item, listings) for item, nodes in first.items.items()}
    return Listing(items, dict(first.refused))


def _together(nodes: ItemNodes, item: Item, listings: Mapping[int, Listing]) -> ItemNodes:
    if nodes.call_us is None:
        return nodes
    rounds: list[Round] = []
    each_us: list[float] = []
    for process, listing in sorted(listings.items()):
        seen = listing.items.get(item)
        if seen is not None and seen.call_us is not None:
            rounds += [one.model_copy(update={"process": process}) for one in seen.rounds]
            each_us.append(seen.call_us)
    call_us = median(each_us)
    # Nodes are as fast as their own process was.
    scale = call_us / nodes.call_us
    scaled = tuple(replace(node, duration_us=node.duration_us * scale) for node in nodes.nodes)
    return nodes.model_copy(update={"call_us": call_us, "rounds": tuple(rounds), "nodes": scaled})
