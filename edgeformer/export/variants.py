"""What an export writes: its options, and the variants that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ONNX, Precision, client_dtype
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.export import int4
from edgeformer.export.exportable import Exportable
from edgeformer.export.int8 import quantized_graphs
from edgeformer.models.layers import half_for_export
from edgeformer.models.tracing import Graphs
from edgeformer.runtimes import Builder, Target, Unavailable, builder_named

TRIMMED_FOLDER = "trimmed"
"""A small repository of its own inside the bundle, because a trimmed vocabulary has a tokenizer of its own."""


@dataclass(frozen=True)
class ExportOptions:
    """What is written beside the FP32 graph.

    Attributes:
        build: names of builders to run on the graphs, see :func:`edgeformer.runtimes.all_builders`; engines are built
            of the FP16 graphs where there are some, else of the FP32 ones.
        joining: also run the builders that make one of the precisions for a runtime of their own, and judge FP32 graphs
            in what other runtimes round them to.
        exits: loops whose exits become graphs of their own; ``all``: every exit, and the step bundle.
        target: device profile that builders build for; None: the recipe's.
        vocab_trim: also write graphs whose table keeps only what the training text uses: of INT8, INT4 and FP16 where
            those are asked for, else of FP32.
        vocab_keep: trimmed graphs also keep so many tokens from the beginning of the vocabulary; None: none of them.
        vocab_max: of the tokens of the training text trimmed graphs keep so many that it uses most often; None: all.
        replace: make the bundle from nothing; else what is not asked for again stays in it.
        keep_going: build what comes after a rejected artifact too.
        allow_leak: also export a language model that looks ahead; its bundle says so.
        cache: where encoded data is kept between runs.
        profiles: the user's own device profiles; None: those beside the run.
    """

    fp16: bool = False
    int8: bool = False
    int4: bool = False
    build: tuple[str, ...] = ()
    joining: bool = False
    exits: tuple[int, ...] | Literal["all"] = ()
    target: str | None = None
    vocab_trim: bool = False
    vocab_keep: int | None = None
    vocab_max: int | None = None
    replace: bool = False
    keep_going: bool = False
    allow_leak: bool = False
    cache: Path | None = None
    profiles: Path | None = None


@dataclass(frozen=True)
class Variant:
    """Names of what is written: files where clients of Hugging Face ONNX repositories look for each precision."""

    precision: Precision
    trimmed: bool = False

    @property
    def folder(self) -> str:
        """Where the graphs lie, relative to the bundle."""
        return f"{TRIMMED_FOLDER}/onnx" if self.trimmed else "onnx"

    @property
    def weights(self) -> str:
        """The file of weights that several graphs share, relative to the bundle."""
        return f"{self.file('model')}_data"

    def file(self, stem: str) -> str:
        """``model`` → ``onnx/model_fp16.onnx``."""
        return f"{self.folder}/{stem}{'' if self.precision == 'fp32' else f'_{client_dtype(self.precision)}'}.onnx"

    def id(self, what: str = "") -> str:
        """``exit2`` → ``onnx-fp16-exit2``; nothing: the full graph's."""
        return "-".join(part for part in (ONNX, self.precision, what, "trim" if self.trimmed else "") if part)


def variants_asked(options: ExportOptions) -> set[Variant]:
    """What :func:`variants_of` yields with these options."""
    asked: dict[Precision, bool] = {"fp32": True, "int8": options.int8, "int4": options.int4, "fp16": options.fp16}
    whole = {Variant(precision) for precision, wanted in asked.items() if wanted}
    smaller = {Variant(variant.precision, True) for variant in whole if variant.precision != "fp32"}
    return whole | ((smaller or {Variant("fp32", True)}) if options.vocab_trim else set())


VariantSource = tuple[Variant, Exportable, Callable[[], Graphs]]
"""A variant, of which model it is, and how its graphs come to be: that may fail without harm to the others."""


def variants_of(
    subject: Exportable, small: Exportable | None, options: ExportOptions, workplace: Path, progress: Progress
) -> Iterator[VariantSource]:
    """Every variant in turn.

    FP16 comes last: it is made of the FP32 model in place, so that there is one copy of the weights, not two.

    Args:
        subject: the whole model.
        small: the same model with a trimmed vocabulary, if it is wanted.
        options: of the export.
        workplace: the new bundle's folder, on whose disk INT8 is made: the system's /tmp may be small.
        progress: reports tracing.
    """
    steps = options.exits == "all"
    with bar(progress, "Tracing the FP32 graphs", None):
        graphs = subject.adapter.trace(subject.model, tuple(subject.inputs), steps=steps)
    yield Variant("fp32"), subject, lambda: graphs
    if options.int8:
        yield Variant("int8"), subject, lambda: quantized_graphs(graphs, workplace)
    if options.int4:
        yield Variant("int4"), subject, lambda: int4.quantized_graphs(graphs)
    if small is not None:
        with bar(progress, "Tracing the trimmed FP32 graphs", None):
            trimmed = small.adapter.trace_trimmed(small.model, tuple(small.inputs), graphs)
        if options.int8:
            yield Variant("int8", True), small, lambda: quantized_graphs(trimmed, workplace)
        if options.int4:
            yield Variant("int4", True), small, lambda: int4.quantized_graphs(trimmed)
        if not (options.int8 or options.int4 or options.fp16):
            yield Variant("fp32", True), small, lambda: trimmed
    if options.fp16:
        half_for_export(subject.model)
        yield Variant("fp16"), subject, lambda: _halved(subject, graphs, steps, progress)
        if small is not None:
            half_for_export(small.model)
            yield Variant("fp16", True), small, lambda: _halved(small, trimmed, False, progress)


def _halved(subject: Exportable, whole: Graphs, steps: bool, progress: Progress) -> Graphs:
    with bar(progress, "Making the FP16 graphs", None):
        return subject.adapter.trace_half(subject.model, tuple(subject.inputs), whole, steps=steps)


# Which builders an export runs, and what each of them can build for here: the same for a run and a wrapped graph.


Plans = tuple[tuple[Builder, Target | Unavailable], ...]
"""Each builder, with what it builds for here, or why it builds nothing."""


def builders_asked(options: ExportOptions) -> tuple[Builder, ...]:
    """The builders that were named, each once.

    Raises:
        InputError: no builder is called so; a device is named, and nothing is built for it.
    """
    builders = tuple(builder_named(name) for name in dict.fromkeys(options.build))
    if options.target is not None and not builders:
        raise InputError("--target: says what is built for; add --trt, or --build with a builder's name")
    return builders


def plans_of(builders: Sequence[Builder], options: ExportOptions, usual: str | None, profiles: Path) -> Plans:
    """What each builder can build for here: the device that was named, or else the ``usual`` one.

    Args:
        builders: that run.
        options: of the export.
        usual: profile of the recipe's device; None: there is none.
        profiles: the user's own device profiles.

    Raises:
        InputError: one needs a device, and none is named; one is named, and none of them builds for it.
    """
    needing = next((builder for builder in builders if builder.needs_device), None)
    name = options.target or (usual if needing is not None else None)
    if name is None and needing is not None:
        raise InputError(f"{needing.flag}: which device? Name its profile: --target rtx4050 (edgeformer list devices)")
    device = load_profile(name, profiles) if name is not None else None
    plans = tuple((builder, builder.plan(device)) for builder in builders)
    if options.target is not None and not any(isinstance(to, Unavailable) or to.device for _, to in plans):
        names = ", ".join(builder.name for builder in builders)
        raise InputError(f"--target: {names}: what it builds is the same for every device; leave it out, or add --trt")
    return plans
