"""Which graphs one call of an artifact runs, how often, and with inputs of which shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeformer.backends.session import Array
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.stages.profiling.inputs import Tokens, make_buffers, read_golden
from edgeformer.stages.profiling.messages import Item

_TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(double)": np.float64,
}  # fmt: skip
Declared = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Input → type, shape with None where it is dynamic."""


@dataclass(frozen=True)
class PlannedGraph:
    """A file and how often one call of the artifact runs it."""

    file: Path
    times: int


def planned_graphs(bundle: Path, artifact: ArtifactManifest, loops: int) -> list[PlannedGraph]:
    """The graphs of an ONNX artifact in the order in which they run.

    Raises:
        ArtifactError: a step bundle lacks a part.
    """
    assert artifact.file is not None
    if artifact.role != "step":
        return [PlannedGraph(bundle / artifact.file, 1)]
    try:
        parts = [(artifact.parts[name], times) for name, times in (("embed", 1), ("loop", loops), ("readout", 1))]
    except KeyError as error:
        raise ArtifactError(f"{bundle}: {artifact.id} has no part {error}; export the run again") from None
    return [PlannedGraph(bundle / name, times) for name, times in parts]


def golden_ids(bundle: Path, artifact: ArtifactManifest, item: Item) -> Tokens:
    """Real token ids int64 [batch, tokens of one call]."""
    phase, batch, seq = item
    ids: Tokens = make_buffers(read_golden(bundle / artifact.companions), batch, seq, count=1)[0]["input_ids"]
    return ids[:, -1:] if phase == "decode" else ids


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
