"""The listing process: ``python -m edgeformer.stages.profiling.estimating.child``, ChildTask in, messages out.

A process of its own, so that a graph that crashes the runtime takes nothing with it, and so that what is timed has the
machine's threads for itself.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode, Feed, ProfiledGraph
from edgeformer.backends.onnxruntime.providers import CPU
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Array
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.profiling.answering import claim_stdout
from edgeformer.stages.profiling.estimating.graphs import PlannedGraph, feed_for, golden_ids, planned_graphs
from edgeformer.stages.profiling.estimating.messages import (
    ROUNDS,
    ChildTask,
    Ended,
    Listed,
    ListedGraph,
    ListSpec,
    Message,
    NotListed,
    Ticked,
)
from edgeformer.stages.profiling.estimating.probe import probe
from edgeformer.stages.profiling.messages import Item
from edgeformer.tasks import all_tasks

Send = Callable[[Message], None]

# Calls of one item under the profiler: its whole microseconds average out, without minutes for large items.
_NODE_CALLS, _LEAST_NODE_CALLS, _NODE_TOKENS = 30, 5, 4000
# Whole calls are timed in rounds over all items; the best round's median counts, so that a spell in which something
# else ran does not.
_ROUND_S, _LEAST_CALLS, _WARM_UP_S = 0.3, 5, 0.15


def main() -> int:
    """Read the task, do it, answer. An unexpected error ends in a traceback on stderr and exit code 1."""
    send = claim_stdout()
    all_tasks()  # an artifact's scores are recognised by the tasks that are loaded
    task = ChildTask.model_validate_json(sys.stdin.buffer.read(), strict=False).task
    reason = None
    try:
        if isinstance(task, ListSpec):
            _list(task, send)
        else:
            send(probe(task.threads))
    except EdgeformerError as error:
        reason = str(error)
    send(Ended(reason=reason))
    return 0


def _list(spec: ListSpec, send: Send) -> None:
    graphs = planned_graphs(Path(spec.bundle), spec.artifact, spec.loops)
    calls_us = _time_calls(spec, graphs[0], send) if spec.timed else {}
    for item in spec.items:
        if spec.timed and item not in calls_us:
            send(NotListed(item=item, reason=f"beyond the {spec.budget_s:.0f} s for this artifact"))
            continue
        try:
            listed = tuple(_nodes(spec, graph, item) for graph in graphs)
        except EdgeformerError as error:
            send(NotListed(item=item, reason=str(error)))
        else:
            send(Listed(item=item, graphs=listed, call_us=calls_us.get(item)))


def _nodes(spec: ListSpec, graph: PlannedGraph, item: Item) -> ListedGraph:
    opened = ProfiledGraph(graph.file, spec.threads)
    inputs = _inputs(spec, opened, item)
    nodes = opened.list_nodes([Feed(inputs)])[0]
    if spec.timed:
        nodes = _with_durations(nodes, graph.file, spec.threads, Feed(inputs, _node_calls(item)))
    feed_bytes = sum(array.nbytes for array in inputs.values())
    return ListedGraph(times=graph.times, feed_bytes=feed_bytes, nodes=nodes)


def _with_durations(nodes: Sequence[ExecutedNode], file: Path, threads: int, feed: Feed) -> tuple[ExecutedNode, ...]:
    """The same nodes with the durations that they have in production, where weights are packed beforehand."""
    packed = ProfiledGraph(file, threads, prepacked=True).list_nodes([feed])[0]
    durations = {node.name: node.duration_us for node in packed}
    return tuple(
        ExecutedNode(node.op, node.name, node.inputs, node.outputs, node.parameter_bytes, durations[node.name])
        for node in nodes
        if node.name in durations
    )


def _inputs(spec: ListSpec, opened: ProfiledGraph, item: Item) -> dict[str, Array]:
    return feed_for(opened.inputs, item, golden_ids(Path(spec.bundle), spec.artifact, item))


def _node_calls(item: Item) -> int:
    _, batch, seq = item
    return max(_LEAST_NODE_CALLS, min(_NODE_CALLS, _NODE_TOKENS // (batch * seq)))


def _time_calls(spec: ListSpec, graph: PlannedGraph, send: Send) -> dict[Item, float]:
    """Median microseconds of whole calls, as they are made in production: the best of some rounds over all items."""
    best: dict[Item, float] = {}
    ending = time.perf_counter() + spec.budget_s
    # The first round decides how many items there is time for.
    first = time.perf_counter() + spec.budget_s / ROUNDS
    with contextlib.closing(OnnxSession(graph.file, CPU, spec.threads)) as session:
        for number in range(ROUNDS):
            for item in spec.items:
                if time.perf_counter() > (ending if number else first) or (number and item not in best):
                    break
                inputs = _session_inputs(spec, session, item)
                best[item] = min(best.get(item, float("inf")), _median_us(session, inputs))
                send(Ticked())
    return best


def _session_inputs(spec: ListSpec, session: OnnxSession, item: Item) -> dict[str, Array]:
    ids = golden_ids(Path(spec.bundle), spec.artifact, item)
    declared = dict.fromkeys(session.inputs, ("tensor(int64)", (None, None)))
    return feed_for(declared, item, ids)


def _median_us(session: OnnxSession, inputs: dict[str, Array]) -> float:
    _call_for(session, inputs, _WARM_UP_S, 2)
    return statistics.median(_call_for(session, inputs, _ROUND_S, _LEAST_CALLS))


def _call_for(session: OnnxSession, inputs: dict[str, Array], seconds: float, least: int) -> list[float]:
    times_us: list[float] = []
    ending = time.perf_counter() + seconds
    while time.perf_counter() < ending or len(times_us) < least:
        began = time.perf_counter_ns()
        session.run(inputs)
        times_us.append((time.perf_counter_ns() - began) / 1000)
    return times_us


if __name__ == "__main__":
    sys.exit(main())
