"""Nodes that one call of an artifact executes, with their shapes, listed by a worker process; the result is discarded.

A graph that crashes the runtime ends the worker only.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.golden import TOKEN_TYPES, Tokens
from edgeformer.measurement.artifact import Item, MeasureJob, Refusal, golden_calls
from edgeformer.runtimes import ArtifactFiles
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, ProfiledGraph
from edgeformer.runtimes.session import Array
from edgeformer.system.worker import Send, run_job


class ItemNodes(Frozen):
    """Executed nodes of one item."""

    item: Item
    nodes: tuple[ExecutedNode, ...] = Field(description="those of a graph that runs n times, n times")
    runs: int = Field(description="graph runs in one call of the artifact")
    feed_bytes: int = Field(description="inputs of all runs: tokens, states, caches of earlier tokens")


class ListJob(MeasureJob):
    """One artifact and the items to list."""

    name = "listing"
    messages: ClassVar[tuple[type[BaseModel], ...]] = (ItemNodes, Refusal)


def run_listing(job: ListJob) -> dict[Item, ItemNodes | str]:
    """List the executed nodes of an ONNX artifact in a worker: of every item, or the reason why there are none."""
    messages: list[ItemNodes | Refusal] = []
    reason = run_job(job, messages.append).reason or "the listing process ended without a result for this shape"
    listed: dict[Item, ItemNodes | str] = dict.fromkeys(job.items, reason)
    for message in messages:
        listed[message.item] = message.reason if isinstance(message, Refusal) else message
    return listed


def work(message: bytes, send: Send) -> None:
    job = ListJob.model_validate_json(message, strict=False)
    for item in job.items:
        try:
            send(list_item(job.files, item, job.threads))
        except EdgeformerError as error:
            send(Refusal(item=item, reason=str(error)))


def list_item(files: ArtifactFiles, item: Item, threads: int, timed_calls: int = 0) -> ItemNodes:
    """Run one item of an ONNX artifact under ONNX Runtime's profiler and return its executed nodes.

    The nodes' durations are means over ``timed_calls`` with prepacked weights, as in production; 0: of one call without
    prepacking, which is slower and shows the weights' shapes. Raises ArtifactError or InputError.
    """
    graphs: list[tuple[Path, int]] = [(files.file, 1)]
    if files.artifact.role == "step":
        calls = {"embed": 1, "loop": files.loops or 1, "readout": 1}
        if missing := [name for name in calls if name not in files.parts]:
            problem = f"{files.artifact.id} lacks its part {missing[0]!r}"
            raise ArtifactError(f"{files.file}: {problem}; export the run again")
        graphs = [(files.parts[name], times) for name, times in calls.items()]
    nodes: list[ExecutedNode] = []
    feed_bytes = 0
    for file, times in graphs:
        graph = ProfiledGraph(file, threads)
        # Golden inputs where the graph takes those, else inputs made for a part of a model.
        (inputs,) = golden_calls(files, item[1:], count=1)
        if item[0] == "steady" and graph.inputs.keys() <= inputs.keys():
            inputs = {name: inputs[name] for name in graph.inputs}
        else:
            ids = inputs["input_ids"]
            inputs = feed_for(graph.inputs, item, ids[:, -1:] if item[0] == "decode" else ids)
        executed = graph.list_nodes(inputs)[0]
        if timed_calls:
            timed = ProfiledGraph(file, threads, prepacked=True).list_nodes(inputs, calls=timed_calls)[0]
            durations = {node.name: node.duration_us for node in timed}
            kept = (node for node in executed if node.name in durations)
            executed = tuple(replace(node, duration_us=durations[node.name]) for node in kept)
        nodes += list(executed) * times
        feed_bytes += sum(array.nbytes for array in inputs.values()) * times
    runs = sum(times for _, times in graphs)
    return ItemNodes(item=item, nodes=tuple(nodes), runs=runs, feed_bytes=feed_bytes)


def feed_for(declared: Mapping[str, tuple[str, tuple[int | None, ...]]], item: Item, ids: Tokens) -> dict[str, Array]:
    """Return inputs of a graph: tokens ``ids`` [batch, n], and random states and caches, whose shapes alone matter.

    ``declared``: input → type, and shape with None for a dynamic axis. Raises InputError: the graph has an input that
    none of edgeformer's graphs has.
    """
    phase, batch, seq = item
    new = ids.shape[1]
    past = seq - new if phase == "decode" else 0
    generator = np.random.default_rng(0)
    feed: dict[str, Array] = {}
    for name, (kind, shape) in declared.items():
        if name == "input_ids":
            feed[name] = ids
        elif name in ("attention_mask", TOKEN_TYPES):
            feed[name] = np.full((batch, seq), name == "attention_mask", np.int64)
        elif name == "position_ids":
            feed[name] = np.repeat(np.arange(past, seq, dtype=np.int64)[None], batch, axis=0)
        elif name == "loop":
            feed[name] = np.zeros(1, np.int64)
        elif name == "state" or name.startswith("past"):
            dynamic = new if name == "state" else past
            sizes = (batch, *(dynamic if size is None else size for size in shape[1:]))
            feed[name] = generator.normal(size=sizes).astype(np.float16 if kind == "tensor(float16)" else np.float32)
        else:
            raise InputError(f"the graph has an input {name!r} that edgeformer cannot fill, so it cannot be estimated")
    return feed
