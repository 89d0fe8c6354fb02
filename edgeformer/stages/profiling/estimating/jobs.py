"""What a listing child is told, and the small messages of one that also takes times."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.device import Speed
from edgeformer.stages.profiling.messages import CheckedArtifact, Item
from edgeformer.stages.profiling.process import Job

ROUNDS = 3
"""Whole calls are timed in that many rounds over all items, each followed by a tick."""


class Round(Frozen):
    """The median of some whole calls, and the machine's speed around them."""

    us: float
    speed: Speed


class Tick(Frozen):
    """A piece of work is done; an item that is timed makes several."""

    kind: Literal["tick"] = "tick"


class ListSpec(Job):
    """One artifact and the items to list; ``timed``: also time them, node by node, and whole calls."""

    name, answers = "listing", "nodes"
    kind: Literal["list"] = "list"
    checked: CheckedArtifact
    items: tuple[Item, ...] = Field((), strict=False)
    timed: bool = False
    budget_s: float = Field(60.0, description="items, given from small to large, that would take longer are left out")
    processor_time: bool = Field(False, description="count this process's own time: trials on a busy machine, 1 thread")
