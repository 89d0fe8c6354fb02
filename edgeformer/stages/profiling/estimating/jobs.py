"""What a listing child is told, and the small messages of one that also takes times."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.device import Speed
from edgeformer.stages.profiling.messages import CheckedArtifact, Item
from edgeformer.stages.profiling.process import Job


class Round(Frozen):
    """The median of some whole calls of one item in one process, and the machine's speed around them."""

    us: float
    speed: Speed
    process: int = Field(0, description="which of the processes that timed the artifact, one after another")


class Tick(Frozen):
    """An item was timed; what it consists of may follow."""

    kind: Literal["tick"] = "tick"


class Beside(Frozen):
    """What else the machine did while a process measured; ``disturbed``: so much that it could not be had again."""

    kind: Literal["beside"] = "beside"
    disturbed: bool
    doubts: str = ""


class ListSpec(Job):
    """One artifact and the items to list; ``timed``: also time whole calls, and where ``nodes`` are wanted, those."""

    name, answers = "listing", "nodes"
    kind: Literal["list"] = "list"
    checked: CheckedArtifact
    items: tuple[Item, ...] = Field((), strict=False)
    timed: bool = False
    nodes: bool = Field(True, description="list them; without, only whole calls are timed")
    budget_s: float = Field(60.0, description="items, given from small to large, that would take longer are left out")
