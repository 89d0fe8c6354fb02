"""export: a run becomes a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from edgeformer.artifacts.documents import own_profiles
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Precision
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import BUNDLE_FOLDER, CONFIG_FILE, TOKENIZER_FILE
from edgeformer.bundle import seal
from edgeformer.data.trimming import Keeping
from edgeformer.export.bundle_folder import (
    TrimmedSubject,
    bundle_manifest,
    complete_trimmed,
    remove_rejected,
    trim_subject,
    write_companions,
)
from edgeformer.export.calibration import Calibration, training_rows
from edgeformer.export.exportable import Exportable, largest_activation, open_exportable, read_json
from edgeformer.export.graphs import write_graphs
from edgeformer.export.judging import Baseline, Judge, judged_here
from edgeformer.export.previous import Asked, Previous, made_from
from edgeformer.export.variants import (
    TRIMMED_FOLDER,
    ExportOptions,
    Plans,
    Variant,
    builders_asked,
    plans_of,
    variants_of,
)
from edgeformer.models.tracing import Graphs
from edgeformer.models.weights import MODEL_FOLDER
from edgeformer.run import Run
from edgeformer.runtimes import Builder, BuildJob, Unavailable, all_builders
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Target
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import claiming
from edgeformer.tasks import Origin, TextReader
from edgeformer.tasks.scoring import Validation, open_validation

_FP16_NOTE = (
    "FP16: a CPU computes these graphs in FP32, so their parity, drift and scores here show what rounding the weights "
    "costs; overflow was looked for in the FP32 model's activations; `edgeformer verify` on the target shows the rest"
)


@dataclass(frozen=True)
class _Export:
    """What every variant of one export is made and judged with."""

    folder: Path
    previous: Previous
    options: ExportOptions
    subject: Exportable
    trimmed: TrimmedSubject | None
    validations: dict[bool, Validation | None]  # by whether the vocabulary is trimmed
    plans: Plans
    rows: Calibration
    largest: float
    baseline: Baseline
    notes: list[str]
    progress: Progress


def export(run: Path, options: ExportOptions | None = None, progress: Progress = SILENT) -> BundleManifest:
    """Write ``run``'s bundle: FP32 ONNX always, the rest as ``options`` say, each checked against torch FP32.

    An artifact that fails its bar is listed as ``rejected`` with the reason, without a file, and nothing after it is
    built unless ``keep_going``. What the run's bundle holds already and ``options`` do not ask for stays in it, as long
    as it was made of the same weights. The previous bundle is replaced only when the new one is complete.

    Raises:
        ArtifactError: the run is unfinished or damaged.
        InputError: the model leaks future tokens, or has no such exit; something in the bundle would be lost, and
            ``replace`` is not set; another process exports the same run.
    """
    options = options or ExportOptions()
    for flag, value in (("--vocab-keep", options.vocab_keep), ("--vocab-max", options.vocab_max)):
        if value is not None and not options.vocab_trim:
            raise InputError(f"{flag}: says what --vocab-trim keeps; add that")
    builders = builders_asked(options)
    opened = Run.open(run)
    opened.require_finished()
    with claiming(run / BUNDLE_FOLDER):
        remove_leftovers(run / BUNDLE_FOLDER)
        return _export(opened, options, builders, progress)


def _export(opened: Run, options: ExportOptions, builders: Sequence[Builder], progress: Progress) -> BundleManifest:
    run, manifest = opened.folder, opened.manifest
    subject = open_exportable(opened, allow_leak=options.allow_leak)
    if subject.parameters != manifest.parameters:
        raise EdgeformerError(
            f"{run}: the run has {manifest.parameters:,} parameters, its model {subject.parameters:,}"
        )
    facts = subject.task.bundle_facts(subject.recipe, read_json(run / MODEL_FOLDER / CONFIG_FILE, dict))
    exits, tokenizer = _exits(options, subject), _tokenizer(run / MODEL_FOLDER / TOKENIZER_FILE)
    reader = TextReader(tokenizer, facts["pad_id"], manifest.vocabulary)
    rows = training_rows(opened.settled, subject.task, reader, manifest.data.fingerprints.get("train"))
    builders = (*builders, *_joining(options, builders, rows))
    plans = plans_of(builders, options, subject.recipe.target, options.profiles or own_profiles(run.parent))
    source, previous = made_from(run), Previous(run / BUNDLE_FOLDER)
    if not options.replace:
        asked = Asked(options, exits, [target for _, target in plans if isinstance(target, Target)])
        previous = Previous.read(run, subject, source, asked)
        previous.refuse_to_lose(but=previous.again)
    keeping = Keeping(options.vocab_keep or 0, options.vocab_max)
    trimmed = trim_subject(subject, manifest, tokenizer, keeping) if options.vocab_trim else None
    readers = {False: reader}
    if trimmed is not None:
        readers[True] = trimmed.reader
    origin = Origin(options.cache or run.parent / ".cache" / "tokens", manifest.data.fingerprints)
    task, data = subject.task, opened.settled.data
    found = {which: open_validation(task, data, reader, origin, progress) for which, reader in readers.items()}
    validations = {which: validation for which, (validation, _) in found.items()}
    few = f"so task scores and the bars on them are those of the golden inputs; {task.few}"
    notes = list(dict.fromkeys(f"{why}, {few}" for _, why in found.values() if why is not None))
    largest = 0.0
    if options.fp16:
        largest = largest_activation(subject.adapter.exits(subject.model), *subject.inputs.values())
        notes.append(_FP16_NOTE)
    with replacing_folder(run / BUNDLE_FOLDER) as folder:
        job = _Export(
            folder, previous, options, subject, trimmed, validations, plans, rows, largest, {}, notes, progress
        )
        facts |= {"made_from": source}
        return _write(job, opened, exits, facts)


def _write(job: _Export, run: Run, exits: list[int], facts: dict[str, Any]) -> BundleManifest:
    """Fill the new bundle's folder.

    Args:
        exits: that become graphs.
        facts: for bundle.json.
    """
    write_companions(job.folder, run.folder, run.manifest, job.subject)
    if job.trimmed is not None:
        (job.folder / TRIMMED_FOLDER).mkdir()
    artifacts = remove_rejected(job.folder, job.previous.with_made(_build(job, exits)))
    if job.trimmed is not None:
        complete_trimmed(job.folder / TRIMMED_FOLDER, run.folder, job.trimmed, artifacts)
    job.previous.bring(artifacts, job.folder)
    job.notes.extend(f"{one.id}: {note}" for one in artifacts if one.portability for note in one.portability.notes())
    facts["notes"] = job.previous.with_notes(job.notes)
    bundle = bundle_manifest(job.folder, run.manifest, job.subject, artifacts, facts)
    job.previous.bring_records(bundle, job.folder)
    return seal(job.folder, bundle)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


def _exits(options: ExportOptions, subject: Exportable) -> list[int]:
    """The exits that become graphs, the full graph's always among them and first. Raises InputError."""
    known = subject.exits
    wanted = known if options.exits == "all" else options.exits
    for exit_ in wanted:
        if exit_ not in known:
            names = ", ".join(map(str, known))
            raise InputError(f"--exit {exit_}: {subject.recipe.name} has exits after the loops {names}; or give all")
    return [subject.last, *sorted(set(wanted) - {subject.last})]


def _build(job: _Export, exits: list[int]) -> list[ArtifactManifest]:
    artifacts: list[ArtifactManifest] = []
    small = job.trimmed.subject if job.trimmed is not None else None
    for variant, subject, graphs in variants_of(job.subject, small, job.options, job.folder, job.progress):
        try:
            for artifact in _variant(job, variant, subject, graphs(), exits):
                artifacts.append(artifact)
                if _stops(job, artifact):
                    break
        except EdgeformerError as error:
            if variant == Variant("fp32"):
                raise  # there is no bundle without it
            lost = _nothing(variant.id(), ONNX, variant.precision, "rejected", str(error))
            artifacts.append(lost.model_copy(update={"trimmed": variant.trimmed}))
        if any(_stops(job, artifact) for artifact in artifacts):
            break
    else:
        artifacts += _engines(job, artifacts)
    return artifacts


def _variant(
    job: _Export, variant: Variant, subject: Exportable, graphs: Graphs, exits: list[int]
) -> Iterator[ArtifactManifest]:
    """The artifacts of one variant, each written and judged."""
    wanted = [subject.last] if variant.trimmed else exits
    validation = job.validations[variant.trimmed]
    vocabulary = job.trimmed.vocabulary if job.trimmed is not None and variant.trimmed else None
    with write_graphs(job.folder, variant, graphs, wanted, job.previous.graphs(variant)) as written:
        job.previous.carry(variant, written, job.folder)
        judge = Judge(job.folder, subject, variant, validation, vocabulary, job.largest, job.baseline)
        for artifact in judge.all(written):
            yield judge.rounded(artifact) if job.options.joining else artifact
        if written.steps and len(subject.states) > 1:
            job.notes.append(judge.step_note(written))


def _joining(options: ExportOptions, named: Sequence[Builder], rows: Calibration) -> Iterator[Builder]:
    """Builders that nobody named, of a precision that is wanted: where they work, and have rows to calibrate with."""
    wanted = {"int8": options.int8, "fp16": options.fp16} if options.joining and rows.missing is None else {}
    for builder in all_builders():
        asked = builder.joins is not None and wanted.get(builder.joins) and builder not in named
        if asked and isinstance(builder.plan(None), Target):
            yield builder


def _engines(job: _Export, artifacts: list[ArtifactManifest]) -> Iterator[ArtifactManifest]:
    """What each builder makes of the graphs that passed, or one entry that says why it makes nothing."""
    request = BuildJob(
        bundle=job.folder,
        graphs=tuple(artifact for artifact in artifacts if artifact.status == "built"),
        precision="fp16" if job.options.fp16 else "fp32",
        max_length=job.subject.recipe.data.tokens_at_once,
        max_positions=job.subject.recipe.model.max_positions,
        cache=job.options.cache.parent if job.options.cache is not None else None,
        progress=job.progress,
        note=job.notes.append,
        module=lambda: job.subject.adapter.whole(job.subject.model).eval(),
        calibration=job.rows.read,
        judge=lambda entry, path, session: _judge(job, entry).built(entry, path, session),
    )
    for builder, target in job.plans:
        if isinstance(target, Unavailable):
            precision = target.precision or request.precision
            yield _nothing(f"{target.format}-{precision}", target.format, precision, "unavailable", target.reason)
            continue
        (job.folder / ENGINES_FOLDER).mkdir(exist_ok=True)
        for artifact in builder.build(target, request):
            judge = _judge(job, artifact)
            judged = judged_here(artifact, judge, request.max_positions)
            yield judge.rounded(judged) if job.options.joining else judged
            if _stops(job, judged):
                return


def _judge(job: _Export, entry: ArtifactManifest) -> Judge:
    variant, subject, vocabulary = Variant(entry.precision, entry.trimmed), job.subject, None
    if entry.trimmed and job.trimmed is not None:
        subject, vocabulary = job.trimmed.subject, job.trimmed.vocabulary
    validation = job.validations[entry.trimmed]
    return Judge(job.folder, subject, variant, validation, vocabulary, job.largest, job.baseline)


def _nothing(
    id_: str, format_: str, precision: Precision, status: Literal["rejected", "unavailable"], reason: str
) -> ArtifactManifest:
    return ArtifactManifest(id=id_, file=None, format=format_, precision=precision, status=status, reason=reason)


def _stops(job: _Export, artifact: ArtifactManifest) -> bool:
    return artifact.status == "rejected" and not job.options.keep_going
