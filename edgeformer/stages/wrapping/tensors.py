"""Golden inputs and answers of a graph of which nothing is known but what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from edgeformer.formats.errors import InputError
from edgeformer.formats.golden import INPUT, OUTPUT
from edgeformer.formats.units import format_bytes
from edgeformer.stages.wrapping.drawing import Array, Range, draw, plan_ranges, read_inputs, told
from edgeformer.stages.wrapping.foreign import ForeignGraph
from edgeformer.stages.wrapping.job import Wrapping
from edgeformer.stages.wrapping.options import Told, WrapOptions
from edgeformer.stages.wrapping.sizes import find_axes
from edgeformer.tasks.tensors.data import TensorData

GOLDEN_CALLS = 8
_MOST_DRAWN_BYTES, _MOST_BYTES = 48 << 20, 200 << 20
"""Of all golden inputs and outputs together: beyond, fewer are drawn; beyond, even one is too large."""


def plan_tensors(
    graph: ForeignGraph, options: WrapOptions
) -> tuple[TensorData, dict[str, Range], dict[str, Array] | None]:
    """Sizes of the inputs, ranges to draw them from, and given ones, name → [calls, …]; before anything is opened.

    Raises:
        InputError: a size or a range that is not known, or is not the graph's.
        DataError: ``options.inputs`` cannot be used.
    """
    ports = graph.outline.inputs
    if options.inputs is not None:
        given = read_inputs(options.inputs, ports)
        axes = find_axes(ports, options.shapes, {name: array.shape[1:] for name, array in given.items()})
        return TensorData(inputs=axes, drawn=dict.fromkeys(given, f"from {options.inputs.name}")), {}, given
    axes, ranges = find_axes(ports, options.shapes, {}), plan_ranges(graph.outline, options.ranges)
    sizes = {port.name: prod(axis.size for axis in axes[port.name]) * np.dtype(port.dtype).itemsize for port in ports}
    if sum(sizes.values()) > _MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        size = format_bytes(sizes[largest])
        raise InputError(
            f"{graph.path}: input {largest!r} takes {size}; golden inputs may take {_MOST_BYTES >> 20} MiB"
        )
    drawn = {port.name: told(port, ranges.get(port.name), options.seed) for port in ports}
    return TensorData(inputs=axes, drawn=drawn), ranges, None


def answer_tensors(
    job: Wrapping, data: TensorData, ranges: Mapping[str, Range], given: Mapping[str, Array] | None
) -> Told:
    """Run the graph on its golden inputs.

    Raises:
        InputError: it refuses them, or its outputs cannot be compared with another graph's.
    """
    calls = _drawn(job, data, ranges) if given is None else _answered(job, given)
    arrays = _stacked(job, calls)
    reference = {name.removeprefix(OUTPUT): array for name, array in arrays.items() if name.startswith(OUTPUT)}
    how = "; ".join(f"{name}: {words}" for name, words in data.drawn.items())
    facts = {
        "data": data,
        "max_length": data.tokens_at_once,
        "pad_id": 0,
        "notes": (f"golden inputs: {how}", *_doubts(job)),
    }
    return Told(arrays, facts, job.task.golden_score(0, reference, reference))


def _drawn(job: Wrapping, data: TensorData, ranges: Mapping[str, Range]) -> list[dict[str, Array]]:
    """As many calls as fit."""
    random, ports = np.random.default_rng(job.options.seed), job.graph.outline.inputs
    calls: list[dict[str, Array]] = []
    most = GOLDEN_CALLS
    with job.session() as session:
        while len(calls) < most:
            inputs = {port.name: draw(port, data.inputs[port.name], ranges.get(port.name), random) for port in ports}
            calls.append(_named(inputs, job.run(session, inputs)))
            size = sum(array.nbytes for array in calls[0].values())
            most = max(1, min(GOLDEN_CALLS, _MOST_DRAWN_BYTES // max(1, size)))
    return calls


def _answered(job: Wrapping, given: Mapping[str, Array]) -> list[dict[str, Array]]:
    calls = []
    with job.session() as session:
        for number in range(len(next(iter(given.values())))):
            inputs = {name: np.asarray(array[number], order="C") for name, array in given.items()}
            calls.append(_named(inputs, job.run(session, inputs)))
    return calls


def _named(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
    found = {f"{INPUT}{name}": array for name, array in inputs.items()}
    return found | {f"{OUTPUT}{name}": array for name, array in outputs.items()}


def _stacked(job: Wrapping, calls: list[dict[str, Array]]) -> dict[str, Array]:
    """Name → [calls, …]. Raises InputError where an output has another shape in every call, or all is too large."""
    found = {}
    for name in calls[0]:
        shapes = {call[name].shape for call in calls}
        if len(shapes) > 1:
            sizes = " and ".join(sorted(str(list(shape)) for shape in shapes)[:2])
            raise InputError(
                f"{job.graph.path}: output {name.removeprefix(OUTPUT)!r} has a shape that depends on the numbers that "
                f"go in ({sizes}), so other artifacts cannot be compared with it; give one call with --inputs FILE.npz"
            )
        found[name] = np.stack([call[name] for call in calls])
    total = sum(array.nbytes for array in found.values())
    if total > _MOST_BYTES:
        size = format_bytes(total)
        raise InputError(f"{job.graph.path}: golden inputs and outputs take {size}; give smaller sizes: --shape")
    return found


def _doubts(job: Wrapping) -> list[str]:
    if not job.graph.outline.has_subgraphs:
        return []
    return ["If, Loop or Scan: what is computed, and how long it takes, can depend on the inputs"]
