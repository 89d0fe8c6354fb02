"""Export: write the artifacts of a trained run, or of a bundle that ``import onnx`` made.

One pipeline: trace or read the FP32 graph → convert to each precision → build engines → measure parity and scores →
manifest. The reference is torch FP32 for a run and the FP32 graph for an imported one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.documents import own_profiles
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER, RUN_FILE
from edgeformer.bundle import seal
from edgeformer.export.graph_source import GraphSource
from edgeformer.export.previous import PreviousBundle
from edgeformer.export.run_source import RunSource
from edgeformer.export.variants import ExportOptions, Plans, plan_builders, requested_builders
from edgeformer.run import Run
from edgeformer.runtimes import Builder, Unavailable, all_builders, cannot_run
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Target
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import lock_path

Source = RunSource | GraphSource


def export(folder: Path, options: ExportOptions | None = None, progress: Progress = SILENT) -> BundleManifest:
    """Write the bundle of a run, or add artifacts to a bundle that ``import onnx`` made.

    FP32 ONNX is always in it, other artifacts as ``options`` request. Each is compared with the FP32 reference; one
    that misses a tolerance is listed as ``rejected`` with the reason, without a file, and nothing after it is built
    unless ``keep_going``. Older artifacts that are not requested stay if they were made of the same weights. The
    existing bundle is replaced only when the new one is complete.

    Args:
        folder: of the run, or of the imported bundle.

    Raises:
        ArtifactError: the run is unfinished or damaged, or the bundle is damaged.
        InputError: the model leaks future tokens; an option does not fit; an artifact would be lost, and ``replace``
            is not set; another process exports the same bundle.
    """
    options = options or ExportOptions()
    sizes = {"--vocab-keep": options.vocab_keep is not None, "--vocab-max": options.vocab_max is not None}
    is_imported = (folder / BUNDLE_FILE).is_file() and not (folder / RUN_FILE).is_file()
    if is_imported:
        needs_run = {"--exit": bool(options.exits), "--vocab-trim": options.vocab_trim, **sizes}
        for flag, is_set in {**needs_run, "--allow-leak": options.allow_leak}.items():
            if is_set:
                raise InputError(f"{flag}: {folder} holds an imported graph, whose loops and vocabulary are unknown")
    for flag, is_set in sizes.items():
        if is_set and not options.vocab_trim:
            raise InputError(f"{flag}: says what --vocab-trim keeps; add that")
    builders = requested_builders(options)
    run = None if is_imported else Run.open(folder)
    if run is not None:
        run.require_finished()
    bundle_folder = folder if run is None else folder / BUNDLE_FOLDER
    with lock_path(bundle_folder):
        remove_leftovers(bundle_folder)
        source: Source
        if run is None:
            source, profiles = GraphSource.open(folder, options, progress), own_profiles(folder.parent)
        else:
            source, profiles = RunSource.open(run, options, progress), own_profiles(run.folder.parent)
        builders += _joining_builders(source, builders)
        plans = plan_builders(builders, options, source.usual_target, options.profiles or profiles)
        previous = PreviousBundle(source.folder)
        if not options.replace:
            previous = source.previous([target for _, target in plans if isinstance(target, Target)])
            previous.refuse_losses(ignored=previous.rebuilt)
        return _write_bundle(source, plans, previous)


def _joining_builders(source: Source, requested: Sequence[Builder]) -> tuple[Builder, ...]:
    """Return builders that were not named, but produce a requested precision and work on this machine."""
    options = source.options
    if not options.joining or not isinstance(source, RunSource) or source.calibration_problem is not None:
        return ()
    precisions = {"int8": options.int8, "fp16": options.fp16}
    joining = [builder for builder in all_builders() if builder.joins is not None and precisions.get(builder.joins)]
    return tuple(builder for builder in joining if builder not in requested and isinstance(builder.plan(None), Target))


def _write_bundle(source: Source, plans: Plans, previous: PreviousBundle) -> BundleManifest:
    """Build everything in a temporary folder, which then takes the place of the existing bundle."""
    with replacing_folder(source.folder) as folder:
        protected = source.begin(folder)
        new = list(_until_rejected(source.make_graphs(folder, previous), keep_going=source.options.keep_going))
        if source.options.keep_going or all(artifact.status != "rejected" for artifact in new):
            graphs = tuple(artifact for artifact in (*source.base, *new) if artifact.status == "built")
            engines = _build_engines(source, plans, folder, graphs)
            new += _until_rejected(engines, keep_going=source.options.keep_going)
        artifacts = remove_rejected(folder, [*source.base, *previous.merge(new)], protected)
        for artifact in artifacts:
            if artifact.portability is not None:
                source.notes.extend(f"{artifact.id}: {note}" for note in artifact.portability.notes())
        manifest = source.manifest(folder, artifacts, previous)
        previous.write_records(manifest, folder)
        return seal(folder, manifest)


def _until_rejected(artifacts: Iterator[ArtifactManifest], *, keep_going: bool) -> Iterator[ArtifactManifest]:
    """Yield artifacts up to the first rejected one, which stops the build."""
    for artifact in artifacts:
        yield artifact
        if artifact.status == "rejected" and not keep_going:
            return


def _build_engines(
    source: Source, plans: Plans, folder: Path, graphs: tuple[ArtifactManifest, ...]
) -> Iterator[ArtifactManifest]:
    """Yield what each builder makes of the graphs that passed, or an entry that says why it builds nothing."""
    job = source.build_job(folder, graphs)
    for builder, target in plans:
        if isinstance(target, Unavailable):
            precision = target.precision or job.precision
            yield ArtifactManifest(
                id=f"{target.format}-{precision}", file=None, format=target.format, precision=precision,
                status="unavailable", reason=target.reason,
            )  # fmt: skip
            continue
        (folder / ENGINES_FOLDER).mkdir(exist_ok=True)
        for entry in builder.build(target, job):
            artifact = entry
            if lacks_parity(entry) and cannot_run(entry) is None:  # otherwise no data is read for it
                try:
                    artifact = source.judge(folder, entry).judge_engine(entry)
                except EdgeformerError as error:
                    artifact = entry.model_copy(update={"status": "rejected", "reason": str(error)})
            if source.can_join and source.options.joining:
                artifact = source.judge(folder, entry).add_rounded(artifact)
            reason = artifact.reason and artifact.reason.replace(str(folder), str(source.folder))
            yield artifact.model_copy(update={"reason": reason})


def remove_rejected(
    folder: Path, artifacts: Sequence[ArtifactManifest], protected: set[str] | None = None
) -> list[ArtifactManifest]:
    """Delete the files of artifacts that were not built, weights beside them too, and return the entries without them.

    Clients find graphs by name, not in bundle.json: a rejected graph must not lie where they would load it.

    Args:
        protected: names of files that no artifact lists, but that stay.
    """
    no_files: dict[str, object] = {"file": None, "parts": {}, "sha256": None, "weights_file": None}
    entries = [entry if entry.status == "built" else entry.model_copy(update=no_files) for entry in artifacts]
    listed = {name for entry in entries for name in (entry.file, entry.weights_file, *entry.parts.values())}
    # Builders may write ONNX files into the engines folder; a set has each path once.
    for path in {*folder.rglob("*.onnx"), *folder.rglob("*.onnx_data"), *(folder / ENGINES_FOLDER).glob("*")}:
        if path.is_file() and path.relative_to(folder).as_posix() not in listed | (protected or set()):
            path.unlink()
    return entries
