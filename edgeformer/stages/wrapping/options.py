"""What a graph does not say itself, and what a wrapping tells of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer import __version__
from edgeformer.formats.files import sha256_of
from edgeformer.stages.wrapping.drawing import Array, Range
from edgeformer.stages.wrapping.foreign import ForeignGraph
from edgeformer.stages.wrapping.sizes import Shape


@dataclass(frozen=True)
class WrapOptions:
    """What the graph does not say itself.

    Attributes:
        shapes: input → sizes, see :data:`~edgeformer.stages.wrapping.sizes.Shape`.
        ranges: input → smallest and largest number that golden inputs are drawn from.
        inputs: an .npz file with golden inputs, instead of drawn ones.
        seed: of what is drawn.
        tokenizer: a tokenizer.json: with ``labels``, the graph is a classifier of texts.
        labels: names of its classes, in the order of its logits.
        data: a labelled file that golden inputs are taken from, and that it is scored on.
        max_length: tokens that a classifier's texts are cut to.
        replace: a bundle that is there already.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    inputs: Path | None = None
    seed: int = 0
    tokenizer: Path | None = None
    labels: tuple[str, ...] = ()
    data: Path | None = None
    max_length: int = 128
    replace: bool = False

    def key(self, graph: ForeignGraph) -> str:
        """What tells wrappings of one file apart, the file's content included: 8 hexadecimal digits."""
        weights = [sha256_of(graph.path.resolve().parent / name) for name in graph.weights]
        given = sha256_of(self.inputs) if self.inputs is not None and self.inputs.is_file() else None
        told = [sha256_of(graph.path), weights, dict(self.shapes), dict(self.ranges), given, self.seed, __version__]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Told:
    """What a graph's bundle says of its task.

    Attributes:
        arrays: golden inputs and answers.
        facts: fields of bundle.json: data, labels, lengths, notes.
        score: of the graph itself on the golden inputs.
        validation: and on labelled data.
    """

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]
    score: Any
    validation: Any = None
