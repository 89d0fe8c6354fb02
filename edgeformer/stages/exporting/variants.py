"""The variants of one export in the order in which they are made, and how the graphs of each come to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgeformer.families.norms import half_for_export
from edgeformer.families.tracing import Graphs
from edgeformer.formats.progress import Progress
from edgeformer.stages.exporting.exportable import Exportable
from edgeformer.stages.exporting.graphs import quantized
from edgeformer.stages.exporting.variant import Variant


@dataclass(frozen=True)
class Asked:
    """What is made beside FP32. ``steps``: the step bundle too."""

    int8: bool
    fp16: bool
    steps: bool


@dataclass(frozen=True)
class Made:
    """A variant, and how its graphs are made: that may fail without harm to the others."""

    variant: Variant
    subject: Exportable
    graphs: Callable[[], Graphs]


def make_variants(subject: Exportable, small: Exportable | None, asked: Asked, progress: Progress) -> Iterator[Made]:
    """Every variant in turn. ``small``: the same model with a trimmed vocabulary, if it is wanted.

    FP16 comes last: it is made of the FP32 model in place, so that there is one copy of the weights, not two.
    """
    graphs = _traced(subject, "FP32", asked.steps, progress)
    yield Made(Variant("fp32"), subject, lambda: graphs)
    if asked.int8:
        yield Made(Variant("int8"), subject, lambda: quantized(graphs))
    if small is not None:
        trimmed = _traced(small, "trimmed FP32", False, progress)
        if asked.int8:
            yield Made(Variant("int8", True), small, lambda: quantized(trimmed))
        elif not asked.fp16:
            yield Made(Variant("fp32", True), small, lambda: trimmed)
    if asked.fp16:
        half_for_export(subject.model)
        yield Made(Variant("fp16"), subject, lambda: _traced(subject, "FP16", asked.steps, progress))
        if small is not None:
            half_for_export(small.model)
            yield Made(Variant("fp16", True), small, lambda: _traced(small, "trimmed FP16", False, progress))


def _traced(subject: Exportable, name: str, steps: bool, progress: Progress) -> Graphs:
    progress.start(f"Tracing the {name} graphs", None)
    try:
        return subject.network.trace(subject.model, tuple(subject.inputs), steps=steps)
    finally:
        progress.finish()
