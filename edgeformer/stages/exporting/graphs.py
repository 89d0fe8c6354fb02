"""All graphs of one variant: quantised, and written to the bundle with shared weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir

from edgeformer.families.tracing import Graphs, cut_out, logits_name, state_name
from edgeformer.stages.exporting.graph_file import WeightsFile, write_graph
from edgeformer.stages.exporting.int8 import quantize
from edgeformer.stages.exporting.variant import Variant

LOOP = "loop"
"""The step graph that is run again and again."""


@dataclass(frozen=True)
class Written:
    """Files relative to the bundle, each with its size, shared weights included."""

    exits: dict[int, str]
    steps: dict[str, str]
    decode: str | None
    size_bytes: dict[str, int]


def quantized(graphs: Graphs) -> Graphs:
    """The same in INT8."""
    return Graphs(
        quantize(graphs.exits),
        {part: quantize(graph) for part, graph in graphs.steps.items()},
        quantize(graphs.decode) if graphs.decode is not None else None,
        graphs.shared_weights,
    )


@contextmanager
def write(bundle: Path, variant: Variant, graphs: Graphs, exits: Sequence[int], last: int) -> Iterator[Written]:
    """Write the graphs of ``exits`` (the last one is the full graph), steps and decode.

    While the context lasts there is also :func:`probe_path`: the states after every loop as outputs.
    """
    stems: dict[str, onnx_ir.Model] = {}
    files = {exit_: variant.exit_file(None if exit_ == last else exit_) for exit_ in exits}
    for exit_, file in files.items():
        stems[file] = cut_out(graphs.exits, {logits_name(exit_): "logits"})
    steps = {part: variant.file(f"step_{part}") for part in graphs.steps}
    stems |= {file: graphs.steps[part] for part, file in steps.items()}
    decode = variant.file("decode") if graphs.decode is not None else None
    if decode is not None and graphs.decode is not None:
        stems[decode] = graphs.decode
    states = [value.name for value in graphs.exits.graph.outputs if value.name and value.name.startswith("state_")]
    probe = cut_out(graphs.exits, {name: name for name in states})
    if not graphs.shared_weights:
        sizes = {file: write_graph(graph, bundle / file) for file, graph in stems.items()}
        write_graph(probe, probe_path(bundle, variant))
    else:
        with WeightsFile(bundle / variant.weights) as weights:
            sizes = {file: write_graph(graph, bundle / file, weights) for file, graph in stems.items()}
            write_graph(probe, probe_path(bundle, variant), weights)
    try:
        yield Written(files, steps, decode, sizes)
    finally:
        probe_path(bundle, variant).unlink(missing_ok=True)


def probe_path(bundle: Path, variant: Variant) -> Path:
    """A graph that is there while the others are checked, and gone afterwards."""
    return bundle / variant.folder / ".states.onnx"


def probe_outputs(loops: int) -> list[str]:
    """Names of the probe's outputs."""
    return [state_name(loop) for loop in range(1, loops + 1)]
