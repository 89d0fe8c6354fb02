"""Options of an export, the variants that they select, and what every source of an export has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, Precision, client_dtype
from edgeformer.artifacts.progress import Progress

TRIMMED_FOLDER = "trimmed"
"""Repository inside the bundle for a trimmed vocabulary, which has its own tokenizer."""


@dataclass(frozen=True)
class ExportOptions:
    """Artifacts to write beside the FP32 graph.

    Attributes:
        fp16: also write FP16 graphs.
        int8: also write INT8 graphs.
        int4: also write graphs with 4-bit weights.
        build: names of builders to run on the graphs, see :func:`edgeformer.runtimes.all_builders`; engines are built
            from the FP16 graphs if there are any, else from the FP32 ones.
        joining: also run the builders that produce a requested precision for a runtime of their own, and score FP32
            graphs in the precisions that other runtimes round them to.
        exits: loops whose exits become separate graphs; ``all``: every exit, and the step artifact.
        target: device profile that builders build for; None: the recipe's.
        vocab_trim: also write graphs whose table keeps only the tokens that the training text uses: INT8, INT4 and
            FP16 if requested, else FP32.
        vocab_keep: trimmed graphs also keep this many tokens from the start of the vocabulary.
        vocab_max: trimmed graphs keep only this many of the most frequent training tokens; None: all.
        replace: rebuild the bundle from nothing; else artifacts that are not requested again stay.
        keep_going: build what comes after a rejected artifact too.
        allow_leak: also export a language model that sees future tokens; its bundle says so.
        profiles: the user's device profiles; None: those beside the run.
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
    profiles: Path | None = None


@dataclass(frozen=True)
class Variant:
    """A precision of the whole or of the trimmed model, and its file names.

    Files are named and placed as in Hugging Face ONNX repositories.
    """

    precision: Precision
    trimmed: bool = False

    @property
    def weights(self) -> str:
        """File of weights that several graphs share, relative to the bundle."""
        return f"{self.file('model')}_data"

    def file(self, stem: str) -> str:
        """``model`` → ``onnx/model_fp16.onnx``."""
        folder = f"{TRIMMED_FOLDER}/onnx" if self.trimmed else "onnx"
        return f"{folder}/{stem}{'' if self.precision == 'fp32' else f'_{client_dtype(self.precision)}'}.onnx"

    def id(self, graph: str = "") -> str:
        """``exit2`` → ``onnx-fp16-exit2``; an empty string: id of the full graph."""
        return "-".join(part for part in (ONNX, self.precision, graph, "trim" if self.trimmed else "") if part)


def requested_variants(options: ExportOptions) -> list[Variant]:
    """Return the variants that an export of a run writes, in the order in which they are made: FP16 last."""
    enabled: dict[Precision, bool] = {"int8": options.int8, "int4": options.int4, "fp16": options.fp16}
    converted: list[Precision] = [precision for precision, is_enabled in enabled.items() if is_enabled]
    variants = [Variant("fp32"), *map(Variant, converted)]
    if options.vocab_trim:
        variants += [Variant(precision, True) for precision in converted or ["fp32"]]
    return sorted(variants, key=lambda variant: variant.precision == "fp16")


@dataclass(kw_only=True)
class ExportSource:
    """What an export is made from: a trained run, or the foreign graph of a bundle that ``import onnx`` made.

    An export calls the methods of a source in this order, with the folder of the new bundle: ``begin`` writes or links
    everything beside the graphs, ``make_graphs`` yields the judged graphs of every requested precision, ``build_job``
    describes what builders get, ``judge`` returns the judge of an engine, and ``manifest`` completes the folder.

    Attributes:
        folder: the bundle's.
        notes: lines for the bundle's notes, which grow during the export.
        target: device profile that the source names.
        base: entries of graphs that are in the bundle before the export.
        names: files that stay, whatever the artifacts are.
        made_from: file of the run → sha256; None: everything is made of the only ``base``.
        exits: all loops after which the model answers.
        calibration_problem: why there are no training rows, which some builders need; None: there are.
        rounds: artifacts are also scored under providers that compute in fewer bits.
    """

    options: ExportOptions
    progress: Progress
    folder: Path
    notes: list[str] = field(default_factory=list)
    target: str | None = None
    base: tuple[ArtifactManifest, ...] = ()
    names: set[str] = field(default_factory=set)
    made_from: Mapping[str, str] | None = None
    exits: Collection[int] = ()
    calibration_problem: str | None = "an imported graph has no training rows"
    rounds: bool = False
