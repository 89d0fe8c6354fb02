"""Nodes that one call of an artifact executes, with their shapes, listed by a worker process; the result is discarded.

A graph that crashes the runtime ends the worker only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.golden import Tokens
from edgeformer.measurement.artifact import Item, Refusal, golden_calls
from edgeformer.measurement.worker import End, Job, Send, run_job
from edgeformer.runtimes import ArtifactFiles
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, ProfiledGraph
from edgeformer.runtimes.session import Array

# A listing runs every item once. Beyond this the worker hangs.
_LONGEST_S = 600.0
_TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(double)": np.float64,
}  # fmt: skip
Declared = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Input → type, shape with None for a dynamic axis."""


class ListJob(Job):
    """One artifact and the items to list."""

    name = "listing"
    checked: ArtifactFiles
    items: tuple[Item, ...] = Field(strict=False)


class ItemNodes(Frozen):
    """Executed nodes of one item."""

    kind: Literal["nodes"] = "nodes"
    item: Item = Field(strict=False)
    nodes: tuple[ExecutedNode, ...] = Field(strict=False, description="those of a graph that runs n times, n times")
    runs: int = Field(description="graph runs in one call of the artifact")
    feed_bytes: int = Field(description="inputs of all runs: tokens, states, caches of earlier tokens")


@dataclass
class Listing:
    """Nodes per item, and the reason for every item without."""

    items: dict[Item, ItemNodes] = field(default_factory=dict)
    refused: dict[Item, str] = field(default_factory=dict)


_MESSAGES: TypeAdapter[ItemNodes | Refusal | End] = TypeAdapter(
    Annotated[ItemNodes | Refusal | End, Field(discriminator="kind")]
)


def run_listing(job: ListJob) -> Listing:
    """List the executed nodes of an ONNX artifact in a worker; an item that fails has a reason instead."""
    listing = Listing()

    def take(message: ItemNodes | Refusal) -> None:
        if isinstance(message, ItemNodes):
            listing.items[message.item] = message
        else:
            listing.refused[message.item] = message.reason

    end = run_job(job, _MESSAGES, _LONGEST_S, take)
    for item in job.items:
        if item not in listing.items:
            listing.refused.setdefault(item, end.reason or "the listing process did not list it")
    return listing


def work(message: bytes, send: Send) -> None:
    """List the nodes of a ListJob, in a worker."""
    job = ListJob.model_validate_json(message, strict=False)
    for item in job.items:
        try:
            send(list_item(job.checked, item, job.threads))
        except EdgeformerError as error:
            send(Refusal(item=item, reason=str(error)))


def list_item(checked: ArtifactFiles, item: Item, threads: int, timed_calls: int = 0) -> ItemNodes:
    """Run one item under ONNX Runtime's profiler and return its executed nodes.

    Args:
        checked: an ONNX artifact.
        timed_calls: the nodes' durations are means over so many calls with prepacked weights, as in production; 0: of
            one call without prepacking, which is slower and shows the weights' shapes.

    Raises:
        ArtifactError, InputError: a part is missing, or the graph refuses its inputs.
    """
    graphs: list[tuple[Path, int]] = [(checked.file, 1)]
    if checked.artifact.role == "step":
        calls = (("embed", 1), ("loop", checked.loops or 1), ("readout", 1))
        try:
            graphs = [(checked.parts[name], times) for name, times in calls]
        except KeyError as error:
            raise ArtifactError(
                f"{checked.file}: {checked.artifact.id} has no part {error}; export the run again"
            ) from None
    nodes: list[ExecutedNode] = []
    feed_bytes = 0
    for file, times in graphs:
        graph = ProfiledGraph(file, threads)
        # Golden inputs where the graph takes those, else inputs made for a part of a model.
        (inputs,) = golden_calls(checked, item[1:], count=1)
        if item[0] == "steady" and graph.inputs.keys() <= inputs.keys():
            inputs = {name: inputs[name] for name in graph.inputs}
        else:
            ids = inputs["input_ids"]
            inputs = feed_for(graph.inputs, item, ids[:, -1:] if item[0] == "decode" else ids)
        executed = graph.list_nodes(inputs)[0]
        if timed_calls:
            timed = ProfiledGraph(file, threads, prepacked=True).list_nodes(inputs, calls=timed_calls)[0]
            durations = {node.name: node.duration_us for node in timed}
            executed = tuple(
                replace(node, duration_us=durations[node.name]) for node in executed if node.name in durations
            )
        nodes += list(executed) * times
        feed_bytes += sum(array.nbytes for array in inputs.values()) * times
    runs = sum(times for _, times in graphs)
    return ItemNodes(item=item, nodes=tuple(nodes), runs=runs, feed_bytes=feed_bytes)


def feed_for(declared: Declared, item: Item, ids: Tokens) -> dict[str, Array]:
    """Return inputs of a graph: given tokens, and random states and caches, of which only the shapes matter.

    Args:
        declared: the graph's inputs.
        item: (phase, batch, seq); decoding, ``seq`` − 1 tokens were read before.
        ids: int64 [batch, tokens of this call].

    Raises:
        InputError: the graph has an input that none of edgeformer's graphs has.
    """
    phase, batch, seq = item
    new = ids.shape[1]
    past = seq - new if phase == "decode" else 0
    generator = np.random.default_rng(0)
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
            dynamic = new if name == "state" else past
            sizes = (batch, *(dynamic if size is None else size for size in shape[1:]))
            feed[name] = generator.normal(size=sizes).astype(_TYPES[kind])
        else:
            raise InputError(f"input {name!r} is none that edgeformer's graphs have; its nodes cannot be listed")
    return feed
