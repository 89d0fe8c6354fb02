"""What the listing child is told (one JSON document) and what it answers (one JSON document per line)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode
from edgeformer.formats.base import Frozen
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.stages.profiling.messages import Item

ROUNDS = 3
"""Whole calls are timed in that many rounds over all items, each followed by a tick."""


class ListSpec(Frozen):
    """One artifact and the items to list. ``timed`` items are also timed: node by node, and whole calls."""

    bundle: str
    artifact: ArtifactManifest
    loops: int = Field(description="how often a step bundle's loop graph is called")
    items: tuple[Item, ...] = Field((), strict=False)
    threads: int
    timed: bool = False
    budget_s: float = Field(60.0, description="items, given from small to large, that would take longer are left out")


class ProbeSpec(Frozen):
    """Measure what this host can do."""

    threads: int


class ChildTask(Frozen):
    """What the child is started for."""

    task: ListSpec | ProbeSpec


class ListedGraph(Frozen):
    """The executed nodes of one graph of an artifact, and how often one call of the artifact runs it."""

    times: int
    feed_bytes: int = Field(description="inputs of one run: tokens, states, what was kept of earlier tokens")
    nodes: tuple[ExecutedNode, ...] = Field(strict=False)


class Listed(Frozen):
    """One item. ``call_us`` is the median of whole calls, where they were timed; nodes then have durations as in
    production, else those of a run without prepacked weights."""

    kind: Literal["listed"] = "listed"
    item: Item = Field(strict=False)
    graphs: tuple[ListedGraph, ...] = Field(strict=False)
    call_us: float | None = None


class NotListed(Frozen):
    """One item cannot be listed; the others go on."""

    kind: Literal["not listed"] = "not listed"
    item: Item = Field(strict=False)
    reason: str


class Ticked(Frozen):
    """A piece of work is done; an item that is timed makes several."""

    kind: Literal["ticked"] = "ticked"


class ProductTime(Frozen):
    """[rows, width] × [width, width], one of several different weights used in turn."""

    rows: int
    width: int
    weights: int
    duration_us: float


class Probed(Frozen):
    """What the host can do."""

    kind: Literal["probed"] = "probed"
    products: tuple[ProductTime, ...] = Field(strict=False)
    bandwidth: float = Field(description="bytes per second, summing tensors that no cache holds")
    operator_us: float = Field(description="from one operator to the next, doing next to nothing")


class Ended(Frozen):
    """Nothing follows; ``reason`` if it could not be done."""

    kind: Literal["ended"] = "ended"
    reason: str | None = None


Message = Annotated[Listed | NotListed | Ticked | Probed | Ended, Field(discriminator="kind")]
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def parse_answer(line: bytes) -> Message | None:
    """One line of the child's stdout; None when it is not a message."""
    try:
        return _MESSAGE.validate_json(line, strict=False)
    except ValidationError:
        return None
