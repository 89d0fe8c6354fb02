"""export: a run becomes a bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from edgeformer.models.half import half_for_export
from edgeformer.schema.device import DeviceProfile
from edgeformer.schema.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.schema.files import replacing_folder, sha256_of, write_json
from edgeformer.schema.host import code_version, now
from edgeformer.schema.language_recipe import LanguageRecipe
from edgeformer.schema.manifest import ArtifactManifest, BundleManifest, Precision, RunManifest
from edgeformer.schema.progress import Progress, Silent
from edgeformer.schema.shipped import load_recipe
from edgeformer.schema.workspace import BUNDLE_FILE, RECIPE_FILE, read_run
from edgeformer.stages.exporting.classifier import open_classifier
from edgeformer.stages.exporting.engines import build_engines, compile_in_torch, engine_device
from edgeformer.stages.exporting.exportable import Exportable, write_companions
from edgeformer.stages.exporting.graphs import Graphs, quantized, trace, write
from edgeformer.stages.exporting.judging import Baseline, Judge
from edgeformer.stages.exporting.language_model import open_language_model
from edgeformer.stages.exporting.overflow import largest_activation
from edgeformer.stages.exporting.trimmed import TrimmedSubject, trim_subject, write_trimmed_companions
from edgeformer.stages.exporting.validation import Validation, open_validation
from edgeformer.stages.exporting.variant import TRIMMED_FOLDER, Variant


@dataclass(frozen=True)
class ExportOptions:
    """What is written beside the FP32 graph.

    Attributes:
        trt: also build TensorRT engines: of the FP16 graphs where there are some, else of the FP32 ones.
        trt_via: who makes them: TensorRT of the ONNX graph, or torch-tensorrt of the torch module.
        exits: loops whose exits become graphs of their own; ``all``: every exit, and the step bundle.
        target: device profile that engines are built for; None: the recipe's.
        vocab_trim: also write graphs whose table keeps only what the training text uses: of INT8 and FP16 where those
            are asked for, else of FP32.
        keep_going: build what comes after a rejected artifact too.
        allow_leak: also export a language model that looks ahead; its bundle says so.
        cache: where encoded data is kept between runs.
    """

    fp16: bool = False
    int8: bool = False
    trt: bool = False
    trt_via: Literal["onnx", "torch-tensorrt"] = "onnx"
    exits: tuple[int, ...] | Literal["all"] = ()
    target: str | None = None
    vocab_trim: bool = False
    keep_going: bool = False
    allow_leak: bool = False
    cache: Path | None = None


@dataclass(frozen=True)
class _Work:
    """What every variant of one export is made and judged with."""

    folder: Path
    options: ExportOptions
    subject: Exportable
    trimmed: TrimmedSubject | None
    validations: dict[bool, Validation | None]  # by whether the vocabulary is trimmed
    device: DeviceProfile | None
    largest: float
    baseline: Baseline
    notes: list[str]
    progress: Progress


def export(run: Path, options: ExportOptions | None = None, progress: Progress | None = None) -> BundleManifest:
    """Write ``run``'s bundle: FP32 ONNX always, the rest as ``options`` say, each checked against torch FP32.

    An artifact that fails its bar is kept, marked ``rejected`` with the reason, and nothing after it is built unless
    ``keep_going``. The previous bundle is replaced only when the new one is complete.

    Raises:
        ArtifactError: the run is unfinished or damaged.
        InputError: the model leaks future tokens, or has no such exit.
    """
    options, progress = options or ExportOptions(), progress or Silent()
    manifest = _finished(run)
    subject = _open(run, manifest, options.allow_leak)
    exits = _exits(options, subject)
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    device = engine_device(options.target, subject.recipe.target) if options.trt else None
    trimmed = trim_subject(subject, manifest, tokenizer) if options.vocab_trim else None
    validations, notes = _validations(run, manifest, options, (subject, trimmed, tokenizer), progress)
    largest = largest_activation(subject.exits, *subject.inputs.values()) if options.fp16 else 0.0
    with replacing_folder(run / "bundle") as folder:
        write_companions(folder, run, subject.golden)
        if trimmed is not None:
            smallest: Precision = "int8" if options.int8 else "fp16" if options.fp16 else "fp32"
            write_trimmed_companions(folder / TRIMMED_FOLDER, run, trimmed, smallest)
        work = _Work(folder, options, subject, trimmed, validations, device, largest, {}, notes, progress)
        artifacts = _build(work, exits)
        bundle = _manifest(folder, manifest, subject, artifacts, tuple(notes))
        write_json(folder / BUNDLE_FILE, bundle)
    return bundle


def _validations(
    run: Path,
    manifest: RunManifest,
    options: ExportOptions,
    made: tuple[Exportable, TrimmedSubject | None, Tokenizer],
    progress: Progress,
) -> tuple[dict[bool, Validation | None], list[str]]:
    """The validation split as each tokenizer cuts it, and why it cannot be found."""
    subject, trimmed, tokenizer = made
    cache = options.cache or run.parent / ".cache" / "tokens"
    tokenizers = {False: (tokenizer, int(subject.facts["pad_id"]))}
    if trimmed is not None:
        tokenizers[True] = trimmed.tokenizer
    found: dict[bool, Validation | None] = {}
    notes: list[str] = []
    for which, own in tokenizers.items():
        found[which], missing = open_validation(subject.recipe, manifest, cache, own, progress)
        if missing is not None and missing not in notes:
            notes.append(missing)
    return found, notes


def _finished(run: Path) -> RunManifest:
    manifest = read_run(run)
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    return manifest


def _open(run: Path, manifest: RunManifest, allow_leak: bool) -> Exportable:
    recipe = load_recipe(str(run / RECIPE_FILE))
    if isinstance(recipe, LanguageRecipe):
        subject = open_language_model(run, recipe, manifest, allow_leak=allow_leak)
    else:
        subject = open_classifier(run, recipe)
    if subject.parameters != manifest.parameters:
        raise EdgeformerError(
            f"{run}: the run has {manifest.parameters:,} parameters, its model {subject.parameters:,}"
        )
    return subject


def _exits(options: ExportOptions, subject: Exportable) -> list[int]:
    """The exits that become graphs, the full graph's always among them and first. Raises InputError."""
    known = subject.exits.exits
    wanted = known if options.exits == "all" else options.exits
    for exit_ in wanted:
        if exit_ not in known:
            names = ", ".join(map(str, known))
            raise InputError(f"--exit {exit_}: {subject.recipe.name} has exits after the loops {names}; or give all")
    return [subject.last, *sorted(set(wanted) - {subject.last})]


def _build(work: _Work, exits: list[int]) -> list[ArtifactManifest]:
    artifacts: list[ArtifactManifest] = []
    for variant, subject, graphs in _variants(work):
        wanted = [subject.last] if variant.trimmed else exits
        validation = work.validations[variant.trimmed]
        vocabulary = work.trimmed.vocabulary if work.trimmed is not None and variant.trimmed else None
        with write(work.folder, variant, graphs, wanted, subject.last) as written:
            judge = Judge(work.folder, subject, variant, validation, vocabulary, work.largest, work.baseline)
            for artifact in judge.all(written):
                artifacts.append(artifact)
                if _stops(work, artifact):
                    break
            else:
                if written.steps:
                    work.notes.append(judge.step_note(written))
        if _stops(work, artifacts[-1]):
            break
    else:
        artifacts += _engines(work, artifacts)
    _drop_unlisted(work.folder, artifacts)
    return artifacts


def _engines(work: _Work, artifacts: list[ArtifactManifest]) -> list[ArtifactManifest]:
    if work.device is None:
        return []
    precision: Precision = "fp16" if work.options.fp16 else "fp32"
    if work.options.trt_via == "torch-tensorrt":
        return [compile_in_torch(work.folder, work.subject, precision, work.device, work.progress)]
    graphs = [a for a in artifacts if a.precision == precision and a.role in ("full", "exit") and not a.trimmed]
    graphs = [graph for graph in graphs if graph.status == "built"]
    if not graphs:
        return []
    cache = work.options.cache.parent / "tensorrt" if work.options.cache is not None else None
    built: list[ArtifactManifest] = []
    for engine in build_engines(work.folder, work.subject, graphs, work.device, cache, work.progress):
        built.append(engine)
        if _stops(work, engine):
            break
    return built


def _stops(work: _Work, artifact: ArtifactManifest) -> bool:
    return artifact.status == "rejected" and not work.options.keep_going


def _drop_unlisted(folder: Path, artifacts: list[ArtifactManifest]) -> None:
    """Graphs that were written together with one that was rejected, and so never judged."""
    listed = {file for artifact in artifacts for file in (artifact.file, *artifact.parts.values())}
    for path in folder.rglob("*.onnx"):
        if path.relative_to(folder).as_posix() not in listed:
            path.unlink()


def _variants(work: _Work) -> Iterator[tuple[Variant, Exportable, Graphs]]:
    """FP16 comes last: it is made of the FP32 model in place, so that there is one copy of the weights, not two."""
    subject, options, small = work.subject, work.options, work.trimmed
    steps = options.exits == "all"
    graphs = _traced(work, subject, "FP32", steps)
    yield Variant("fp32"), subject, graphs
    if options.int8:
        yield Variant("int8"), subject, quantized(graphs)
    if small is not None:
        trimmed = _traced(work, small.subject, "trimmed FP32", False)
        if options.int8:
            yield Variant("int8", True), small.subject, quantized(trimmed)
        elif not options.fp16:
            yield Variant("fp32", True), small.subject, trimmed
    if options.fp16:
        half_for_export(subject.model)
        yield Variant("fp16"), subject, _traced(work, subject, "FP16", steps)
        if small is not None:
            half_for_export(small.subject.model)
            yield Variant("fp16", True), small.subject, _traced(work, small.subject, "trimmed FP16", False)


def _traced(work: _Work, subject: Exportable, name: str, steps: bool) -> Graphs:
    work.progress.start(f"Tracing the {name} graphs", None)
    try:
        return trace(subject, steps=steps)
    finally:
        work.progress.finish()


def _manifest(
    folder: Path, manifest: RunManifest, subject: Exportable, artifacts: list[ArtifactManifest], notes: tuple[str, ...]
) -> BundleManifest:
    recipe, graphs = subject.recipe, {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        **subject.facts,
        max_positions=recipe.model.max_positions,
        parameters=manifest.parameters,
        synthetic=manifest.data.synthetic,
        target=recipe.target,
        data=recipe.data,
        data_fingerprints=manifest.data.fingerprints,
        files={name: sha256_of(folder / name) for name in others if name not in graphs},
        artifacts=tuple(artifacts),
        notes=notes,
        code_version=code_version(),
    )
