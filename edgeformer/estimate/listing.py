"""Which nodes one call of an artifact executes, with their shapes and, where asked, their times; never the result.

A process of its own does it: a graph that crashes the runtime takes nothing with it, and what is timed has the
machine's threads for itself. Both sides are here: what the parent asks, and what the child does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.golden import Tokens
from edgeformer.benchmark.measurement import Item, Refusal
from edgeformer.benchmark.process import End, Send, run_job
from edgeformer.estimate.timing import Beside, ListSpec, Round, Tick, Timer
from edgeformer.runtimes import ArtifactFiles
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, ProfiledGraph
from edgeformer.runtimes.session import Array

__all__ = ["ItemNodes", "ListSpec", "Listing", "Round", "feed_for", "run_listing"]

# A listing runs every item once; what is timed takes a minute per artifact. Beyond this the child hangs.
_LONGEST_S = 600.0
# Calls of one item under the profiler: its whole microseconds average out, without minutes for large items.
_NODE_CALLS, _LEAST_NODE_CALLS, _NODE_S = 30, 5, 0.5
_TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(double)": np.float64,
}  # fmt: skip
Declared = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Input → type, shape with None where it is dynamic."""


class ItemNodes(Frozen):
    """One item. ``call_us`` is the median of whole calls, where they were timed; nodes then have durations as in
    production, else those of a run without prepacked weights. Where several processes timed it, ``call_us`` is the
    median over them; ``rounds`` are what each of them saw, and nodes are those of the first."""

    kind: Literal["nodes"] = "nodes"
    item: Item = Field(strict=False)
    nodes: tuple[ExecutedNode, ...] = Field(strict=False, description="a graph that runs several times: repeated")
    runs: int = Field(description="of graphs, in one call of the artifact")
    feed_bytes: int = Field(description="inputs of all runs: tokens, states, what was kept of earlier tokens")
    call_us: float | None = None
    rounds: tuple[Round, ...] = Field((), strict=False, description="timed rounds, unscaled")


_MESSAGES: TypeAdapter[ItemNodes | Refusal | Tick | Beside | End] = TypeAdapter(
    Annotated[ItemNodes | Refusal | Tick | Beside | End, Field(discriminator="kind")]
)


@dataclass
class Listing:
    """What a child has answered about one artifact.

    ``disturbed``: what else used the machine while calls were timed, where that was too much.
    """

    items: dict[Item, ItemNodes] = field(default_factory=dict)
    refused: dict[Item, str] = field(default_factory=dict)
    disturbed: str | None = None


def run_listing(spec: ListSpec, heard: Callable[[], None] = lambda: None) -> Listing:
    """The executed nodes of an ONNX artifact; an item that fails has a reason instead.

    Args:
        spec: what to list, and whether to time it.
        heard: called after every piece of work.
    """
    listing = Listing()

    def take(message: ItemNodes | Refusal | Tick | Beside) -> None:
        if isinstance(message, ItemNodes):
            listing.items[message.item] = message
        elif isinstance(message, Refusal):
            listing.refused[message.item] = message.reason
        elif isinstance(message, Beside) and message.disturbed:
            listing.disturbed = message.doubts
        if not isinstance(message, Beside):
            heard()

    ending = run_job(spec, _MESSAGES, _LONGEST_S, take)
    for item in spec.items:
        if item not in listing.items:
            listing.refused.setdefault(item, ending.reason or "the listing process did not list it")
    return listing


def work(message: bytes, send: Send) -> None:
    """List the nodes that a ListSpec names, in a worker (:mod:`edgeformer.benchmark.process`)."""
    spec = ListSpec.model_validate_json(message, strict=False)
    graphs = _graphs(spec.checked.files)
    timer = Timer(spec, send) if spec.timed else None
    for item in spec.items:
        if timer is not None and item not in timer.rounds:
            send(Refusal(item=item, reason=f"beyond the {spec.budget_s:.0f} s for this artifact"))
            continue
        if timer is not None and not spec.nodes:
            send(ItemNodes(item=item, nodes=(), runs=0, feed_bytes=0, **timer.of(item)))
            continue
        try:
            runs = [run for file, times in graphs for run in [_nodes(spec, file, item, timer)] * times]
        except EdgeformerError as error:
            send(Refusal(item=item, reason=str(error)))
            continue
        nodes, fed_bytes = tuple(chain(*(nodes for nodes, _ in runs))), sum(size for _, size in runs)
        timed = timer.of(item) if timer is not None else {}
        send(ItemNodes(item=item, nodes=nodes, runs=len(runs), feed_bytes=fed_bytes, **timed))


def _graphs(files: ArtifactFiles) -> list[tuple[Path, int]]:
    """The files in the order in which they run, and how often one call of the artifact runs each."""
    if files.artifact.role != "step":
        return [(files.file, 1)]
    calls = (("embed", 1), ("loop", files.loops or 1), ("readout", 1))
    try:
        return [(files.parts[name], times) for name, times in calls]
    except KeyError as error:
        raise ArtifactError(f"{files.file}: {files.artifact.id} has no part {error}; export the run again") from None


def _nodes(spec: ListSpec, file: Path, item: Item, timer: Timer | None = None) -> tuple[tuple[ExecutedNode, ...], int]:
    """The nodes that one run of a graph executes, and the bytes that it is fed with."""
    opened = ProfiledGraph(file, spec.threads)
    inputs = _feed(spec, opened.inputs, item)
    nodes = opened.list_nodes(inputs)[0]
    if timer is not None:
        # The durations that they have in production, where weights are packed beforehand.
        calls = timer.calls_in(item, _NODE_S, _LEAST_NODE_CALLS, _NODE_CALLS)
        packed = ProfiledGraph(file, spec.threads, prepacked=True)
        took = {node.name: node.duration_us for node in packed.list_nodes(inputs, calls=calls)[0]}
        nodes = tuple(replace(node, duration_us=took[node.name]) for node in nodes if node.name in took)
    return tuple(nodes), sum(array.nbytes for array in inputs.values())


def _feed(spec: ListSpec, declared: Declared, item: Item) -> dict[str, Array]:
    """Inputs of one call of a graph: golden ones where it takes those, else made for a part of a model."""
    phase, *shape = item
    (call,) = spec.checked.calls((shape[0], shape[1]), count=1)
    if phase == "steady" and declared.keys() <= call.keys():
        return {name: call[name] for name in declared}
    ids = call["input_ids"]
    return feed_for(declared, item, ids[:, -1:] if phase == "decode" else ids)


def feed_for(declared: Declared, item: Item, ids: Tokens) -> dict[str, Array]:
    """Inputs of a graph: tokens, mask and places as they are, states and caches random; only shapes matter for them.

    Args:
        declared: the graph's inputs.
        item: decoding, ``seq`` − 1 tokens were read before.
        ids: int64 [batch, tokens of this call].

    Raises:
        InputError: the graph has an input that none of edgeformer's graphs has.
    """
    phase, batch, seq = item
    new = ids.shape[1]
    past = seq - new if phase == "decode" else 0
    draw = np.random.default_rng(0)
    feed: dict[str, Array] = {}
    for name, (kind, shape) in declared.items():
        if name == "input_ids":
            feed[name] = ids
        elif name == "attention_mask":
            feed[name] = np.ones((batch, seq), np.int64)
        elif name == "position_ids":
            feed[name] = np.repeat(np.arange(past, seq, dtype=np.int64)[None], batch, axis=0)
        elif name == "loop":
            feed[name] = np.zeros(1, np.int64)
        elif name == "state" or name.startswith("past"):
            rest = new if name == "state" else past
            sizes = (batch, *(rest if size is None else size for size in shape[1:]))
            feed[name] = draw.normal(size=sizes).astype(_TYPES[kind])
        else:
            raise InputError(f"input {name!r} is none that edgeformer's graphs have; its nodes cannot be listed")
    return feed


# Times of several artifacts in sweeps: in each of them every artifact is timed once, by a fresh process.
#
# A spell in which the machine was slower, or a process that was given slower memory, then falls on one time of many
# artifacts rather than on all times of one; the median over the processes is what the artifact takes.


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
        listing = run()
        took_s = time.perf_counter() - began
        if listing.disturbed is None or took_s > self._left_s:
            return listing
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
        timed_item = listing.items.get(item)
        if timed_item is not None and timed_item.call_us is not None:
            rounds += [entry.model_copy(update={"process": process}) for entry in timed_item.rounds]
            each_us.append(timed_item.call_us)
    call_us = median(each_us)
    # Nodes are as fast as their own process was.
    scale = call_us / nodes.call_us
    scaled = tuple(replace(node, duration_us=node.duration_us * scale) for node in nodes.nodes)
    return nodes.model_copy(update={"call_us": call_us, "rounds": tuple(rounds), "nodes": scaled})
