"""export: a run becomes a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from edgeformer.backends import Builder, BuildJob, builder_named
from edgeformer.backends.backend import ENGINES_FOLDER
from edgeformer.families import read_recipe_of
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.formats.files import replacing_folder, sha256_of, write_json
from edgeformer.formats.manifest import ONNX, ArtifactManifest, BundleManifest, Precision, RunManifest
from edgeformer.formats.progress import Progress, Silent
from edgeformer.formats.shipped import own_profiles
from edgeformer.formats.workspace import BUNDLE_FILE
from edgeformer.machine.host import code_version, now
from edgeformer.run import read_run
from edgeformer.stages.exporting.engines import build, device_of
from edgeformer.stages.exporting.exportable import Exportable, from_config, open_exportable, write_companions
from edgeformer.stages.exporting.graphs import write
from edgeformer.stages.exporting.judging import Baseline, Judge
from edgeformer.stages.exporting.overflow import largest_activation
from edgeformer.stages.exporting.trimming import TrimmedSubject, trim_subject, write_trimmed_companions
from edgeformer.stages.exporting.validation import Validation, open_validation
from edgeformer.stages.exporting.variant import TRIMMED_FOLDER, Variant
from edgeformer.stages.exporting.variants import Asked, Made, make_variants
from edgeformer.tasks import Origin, TextReader

_FP16_NOTE = (
    "FP16: a CPU computes these graphs in FP32, so their parity, drift and scores here show what rounding the weights "
    "costs; overflow was looked for in the FP32 model's activations; `edgeformer verify` completes this on the target"
)


@dataclass(frozen=True)
class ExportOptions:
    """What is written beside the FP32 graph.

    Attributes:
        build: names of builders to run on the graphs, see :func:`edgeformer.backends.all_builders`; engines are built
            of the FP16 graphs where there are some, else of the FP32 ones.
        exits: loops whose exits become graphs of their own; ``all``: every exit, and the step bundle.
        target: device profile that builders build for; None: the recipe's.
        vocab_trim: also write graphs whose table keeps only what the training text uses: of INT8 and FP16 where those
            are asked for, else of FP32.
        keep_going: build what comes after a rejected artifact too.
        allow_leak: also export a language model that looks ahead; its bundle says so.
        cache: where encoded data is kept between runs.
        profiles: the user's own device profiles; None: those beside the run.
    """

    fp16: bool = False
    int8: bool = False
    build: tuple[str, ...] = ()
    exits: tuple[int, ...] | Literal["all"] = ()
    target: str | None = None
    vocab_trim: bool = False
    keep_going: bool = False
    allow_leak: bool = False
    cache: Path | None = None
    profiles: Path | None = None


@dataclass(frozen=True)
class _Work:
    """What every variant of one export is made and judged with."""

    folder: Path
    options: ExportOptions
    subject: Exportable
    trimmed: TrimmedSubject | None
    validations: dict[bool, Validation | None]  # by whether the vocabulary is trimmed
    builders: tuple[Builder, ...]
    device: DeviceProfile | None
    largest: float
    baseline: Baseline
    notes: list[str]
    progress: Progress


def export(run: Path, options: ExportOptions | None = None, progress: Progress | None = None) -> BundleManifest:
    """Write ``run``'s bundle: FP32 ONNX always, the rest as ``options`` say, each checked against torch FP32.

    An artifact that fails its bar is listed as ``rejected`` with the reason, without a file, and nothing after it is
    built unless ``keep_going``. The previous bundle is replaced only when the new one is complete.

    Raises:
        ArtifactError: the run is unfinished or damaged.
        InputError: the model leaks future tokens, or has no such exit.
    """
    options, progress = options or ExportOptions(), progress or Silent()
    builders = tuple(builder_named(name) for name in dict.fromkeys(options.build))
    if options.target is not None and not builders:
        raise InputError("--target: says what is built for; add --trt, or --build with a builder's name")
    manifest = _finished(run)
    subject = _open(run, manifest, options.allow_leak)
    exits = _exits(options, subject)
    tokenizer = _tokenizer(run / "model" / "tokenizer.json")
    name = options.target or subject.recipe.target
    device = device_of(builders, name, options.profiles or own_profiles(run.parent))
    trimmed = trim_subject(subject, manifest, tokenizer) if options.vocab_trim else None
    facts = subject.task.bundle_facts(subject.recipe, from_config(run, dict))
    readers = {False: TextReader(tokenizer, facts["pad_id"], manifest.vocabulary)}
    if trimmed is not None:
        readers[True] = trimmed.reader
    validations, notes = _validations(run, manifest, options, readers, progress)
    largest = (
        largest_activation(subject.network.exits(subject.model), *subject.inputs.values()) if options.fp16 else 0.0
    )
    with replacing_folder(run / "bundle") as folder:
        write_companions(folder, run, manifest, subject)
        if trimmed is not None:
            (folder / TRIMMED_FOLDER).mkdir()
        if options.fp16:
            notes.append(_FP16_NOTE)
        work = _Work(folder, options, subject, trimmed, validations, builders, device, largest, {}, notes, progress)
        artifacts = _build(work, exits)
        if trimmed is not None:
            _complete_trimmed(folder / TRIMMED_FOLDER, run, trimmed, artifacts)
        bundle = _manifest(folder, manifest, subject, artifacts, {**facts, "notes": tuple(notes)})
        write_json(folder / BUNDLE_FILE, bundle)
    return bundle


def _complete_trimmed(folder: Path, run: Path, trimmed: TrimmedSubject, artifacts: Sequence[ArtifactManifest]) -> None:
    """What stands beside the trimmed graphs, naming one that was built; without any there is no such repository."""
    built = [artifact.precision for artifact in artifacts if artifact.trimmed and artifact.status == "built"]
    if built:
        order: tuple[Precision, ...] = ("int8", "fp16", "fp32")
        write_trimmed_companions(folder, run, trimmed, min(built, key=order.index))
    else:
        shutil.rmtree(folder)


def _validations(
    run: Path, manifest: RunManifest, options: ExportOptions, readers: dict[bool, TextReader], progress: Progress
) -> tuple[dict[bool, Validation | None], list[str]]:
    """The validation split as each tokenizer cuts it, by whether it is trimmed, and why it cannot be found."""
    recipe = read_recipe_of(run)
    origin = Origin(options.cache or run.parent / ".cache" / "tokens", manifest.data.fingerprints)
    found: dict[bool, Validation | None] = {}
    notes: list[str] = []
    for which, reader in readers.items():
        found[which], missing = open_validation(recipe, reader, origin, progress)
        if missing is not None and missing not in notes:
            notes.append(missing)
    return found, notes


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


def _finished(run: Path) -> RunManifest:
    manifest = read_run(run)
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    return manifest


def _open(run: Path, manifest: RunManifest, allow_leak: bool) -> Exportable:
    subject = open_exportable(run, manifest, allow_leak=allow_leak)
    if subject.parameters != manifest.parameters:
        raise EdgeformerError(
            f"{run}: the run has {manifest.parameters:,} parameters, its model {subject.parameters:,}"
        )
    return subject


def _exits(options: ExportOptions, subject: Exportable) -> list[int]:
    """The exits that become graphs, the full graph's always among them and first. Raises InputError."""
    known = subject.exits
    wanted = known if options.exits == "all" else options.exits
    for exit_ in wanted:
        if exit_ not in known:
            names = ", ".join(map(str, known))
            raise InputError(f"--exit {exit_}: {subject.recipe.name} has exits after the loops {names}; or give all")
    return [subject.last, *sorted(set(wanted) - {subject.last})]


def _build(work: _Work, exits: list[int]) -> list[ArtifactManifest]:
    artifacts: list[ArtifactManifest] = []
    for made in _made(work):
        try:
            for artifact in _variant(work, made, exits):
                artifacts.append(artifact)
                if _stops(work, artifact):
                    break
        except EdgeformerError as error:
            if made.variant == Variant("fp32"):
                raise  # there is no bundle without it
            artifacts.append(_not_made(made.variant, str(error)))
        if any(_stops(work, artifact) for artifact in artifacts):
            break
    else:
        artifacts += _engines(work, artifacts)
    return _without_rejected(work.folder, artifacts)


def _made(work: _Work) -> Iterator[Made]:
    options = work.options
    asked = Asked(options.int8, options.fp16, steps=options.exits == "all")
    return make_variants(work.subject, work.trimmed.subject if work.trimmed is not None else None, asked, work.progress)


def _variant(work: _Work, made: Made, exits: list[int]) -> Iterator[ArtifactManifest]:
    """The artifacts of one variant, each written and judged."""
    variant, subject = made.variant, made.subject
    wanted = [subject.last] if variant.trimmed else exits
    validation = work.validations[variant.trimmed]
    vocabulary = work.trimmed.vocabulary if work.trimmed is not None and variant.trimmed else None
    with write(work.folder, variant, made.graphs(), wanted, subject.last) as written:
        judge = Judge(work.folder, subject, variant, validation, vocabulary, work.largest, work.baseline)
        yield from judge.all(written)
        if written.steps and len(subject.states) > 1:
            work.notes.append(judge.step_note(written))


def _not_made(variant: Variant, reason: str) -> ArtifactManifest:
    return ArtifactManifest(
        id=variant.id(),
        file=None,
        format=ONNX,
        precision=variant.precision,
        trimmed=variant.trimmed,
        status="rejected",
        reason=reason,
    )


def _engines(work: _Work, artifacts: list[ArtifactManifest]) -> list[ArtifactManifest]:
    """What the builders make of the graphs that passed."""
    job = BuildJob(
        bundle=work.folder,
        graphs=tuple(artifact for artifact in artifacts if artifact.status == "built"),
        precision="fp16" if work.options.fp16 else "fp32",
        max_length=work.subject.recipe.data.tokens_at_once,
        max_positions=work.subject.recipe.model.max_positions,
        cache=work.options.cache.parent if work.options.cache is not None else None,
        progress=work.progress,
        note=work.notes.append,
        module=lambda: work.subject.network.whole(work.subject.model).eval(),
    )
    built: list[ArtifactManifest] = []
    for artifact in build(work.builders, work.device, job):
        built.append(artifact)
        if _stops(work, artifact):
            break
    return built


def _stops(work: _Work, artifact: ArtifactManifest) -> bool:
    return artifact.status == "rejected" and not work.options.keep_going


def _without_rejected(folder: Path, artifacts: list[ArtifactManifest]) -> list[ArtifactManifest]:
    """The entries, without the files that were rejected or never judged.

    Clients look for graphs by name, not in bundle.json: what failed its bar must not lie where they would take it.
    """
    gone: dict[str, object] = {"file": None, "parts": {}, "sha256": None, "weights_file": None}
    kept = [entry if entry.status == "built" else entry.model_copy(update=gone) for entry in artifacts]
    listed = {file for artifact in kept for file in (artifact.file, artifact.weights_file, *artifact.parts.values())}
    for path in [*folder.rglob("*.onnx"), *(folder / ENGINES_FOLDER).glob("*")]:
        if path.relative_to(folder).as_posix() not in listed:
            path.unlink()
    return kept


def _manifest(
    folder: Path,
    manifest: RunManifest,
    subject: Exportable,
    artifacts: list[ArtifactManifest],
    facts: dict[str, Any],
) -> BundleManifest:
    recipe, graphs = subject.recipe, {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        **facts,
        exits=subject.family.trained_exits(recipe.model),
        leaks=subject.leaks,
        max_positions=recipe.model.max_positions,
        parameters=manifest.parameters,
        synthetic=manifest.data.synthetic,
        target=recipe.target,
        data=recipe.data,
        data_fingerprints=manifest.data.fingerprints,
        files={name: sha256_of(folder / name) for name in others if name not in graphs},
        artifacts=tuple(artifacts),
        code_version=code_version(),
    )
