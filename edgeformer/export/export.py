"""Export: write the artifacts of a trained run, or of a bundle that ``import onnx`` made.

Trace or read the FP32 graph → convert to each precision → build engines → measure parity and scores → manifest.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from edgeformer.artifacts.bundle_files import TARGETS_FILE, lacks_parity
from edgeformer.artifacts.documents import load_profile, own_profiles
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder, sha256_of, write_json, write_text
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER, RUN_FILE
from edgeformer.bundle import Bundle, seal
from edgeformer.export.graph_source import GraphSource
from edgeformer.export.previous import PreviousBundle
from edgeformer.export.run_source import RunSource
from edgeformer.export.variants import ExportOptions, requested_variants
from edgeformer.measurement.resident import add_resident
from edgeformer.models.card import CARD_FILE, artifact_section
from edgeformer.report.sentences import portability_notes
from edgeformer.run import Run
from edgeformer.runtimes import Builder, Unavailable, all_builders, cannot_run, find_builder
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Target
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import lock_path


def export(folder: Path, options: ExportOptions | None = None, progress: Progress = SILENT) -> BundleManifest:
    """Write the bundle of a run, or add artifacts to a bundle that ``import onnx`` made.

    Each artifact is compared with the FP32 reference; one that misses a tolerance is listed as ``rejected`` with the
    reason, without a file, and nothing after it is built unless ``keep_going``. Older artifacts that are not requested
    stay if they were made of the same weights. The existing bundle is replaced only when the new one is complete.

    Raises:
        ArtifactError: the run is unfinished or damaged, or the bundle is damaged.
        InputError: the model leaks future tokens; an option does not fit; an artifact would be lost, and ``replace``
            is not set; another process exports the same bundle.
    """
    options = options or ExportOptions()
    builders = [find_builder(name) for name in dict.fromkeys(options.build)]
    if options.target is not None and not builders:
        raise InputError("--target: is the device of an engine, and none is requested; add --trt or --build NAME")
    is_imported = (folder / BUNDLE_FILE).is_file() and not (folder / RUN_FILE).is_file()
    run = None if is_imported else Run.open(folder)
    if run is not None:
        run.require_finished()
    bundle_folder = folder if run is None else folder / BUNDLE_FOLDER
    with lock_path(bundle_folder):
        remove_leftovers(bundle_folder)
        source: GraphSource | RunSource
        source = GraphSource.open(folder, options, progress) if run is None else RunSource.open(run, options, progress)

        # 1. Plan the engines.
        if options.joining and source.calibration_problem is None:
            precisions = {"int8": options.int8, "fp16": options.fp16}
            joining = [builder for builder in all_builders() if precisions.get(str(builder.joins))]
            builders += [b for b in joining if b not in builders and isinstance(b.plan(None), Target)]
        needs_device = next((builder for builder in builders if builder.needs_device), None)
        name = options.target or (source.target if needs_device is not None else None)
        if name is None and needs_device is not None:
            raise InputError(
                f"{needs_device.flag}: the device is unknown; name its profile, e.g. --target rtx4050 (edgeformer list "
                "devices)"
            )
        profiles = options.profiles or own_profiles(source.folder.parent)
        device = load_profile(name, profiles) if name is not None else None
        plans = [(builder, builder.plan(device)) for builder in builders]
        targets = [plan for _, plan in plans if isinstance(plan, Target)]
        if options.target is not None and len(targets) == len(plans) and not any(target.device for target in targets):
            names = ", ".join(builder.name for builder in builders)
            raise InputError(
                f"--target: {names} builds the same file for every device; leave out --target, or add --trt"
            )

        # 2. Find out what stays of the previous bundle.
        previous = PreviousBundle(source.folder)
        if not options.replace:
            precision = source.base[0].precision if source.base else "fp32"
            previous = PreviousBundle.of(source.folder, options, targets, source.made_from, source.exits, precision)
            previous.refuse_losses(ignored=previous.rebuilt)

        # 3. Make and judge graphs and engines.
        with replacing_folder(source.folder) as new_folder:
            source.begin(new_folder)
            artifacts: list[ArtifactManifest] = []
            engines = _build_engines(source, plans, new_folder, artifacts)  # starts when all graphs were made
            for artifact in itertools.chain(source.make_graphs(new_folder, previous), engines):
                artifacts.append(artifact)
                if artifact.status != "rejected" or options.keep_going:
                    continue
                # List what is not made because of it.
                reason = f"not made, because {artifact.id} was rejected; make it with --keep-going"
                entry = partial(ArtifactManifest, file=None, status="unavailable", reason=reason)
                entries = [
                    entry(id=variant.id(), format=ONNX, precision=variant.precision, trimmed=variant.trimmed)
                    for variant in requested_variants(options)
                ]
                for _, plan in plans:
                    engine_precision = plan.precision or ("fp16" if options.fp16 else "fp32")
                    id_ = f"{plan.format}-{engine_precision}"
                    entries.append(entry(id=id_, format=plan.format, precision=engine_precision))
                listed = {other.id for other in (*source.base, *artifacts)}
                artifacts += [other for other in entries if other.id not in listed]
                break
            merged = remove_rejected(new_folder, [*source.base, *previous.merge(artifacts)], source.names)

            # 4. Describe and seal the new bundle.
            for artifact in merged:
                if artifact.portability is not None:
                    source.notes.extend(f"{artifact.id}: {note}" for note in portability_notes(artifact.portability))
            manifest = source.manifest(new_folder, merged, previous)
            if (records := previous.records.of(manifest)).records:  # of target devices, on artifacts that stay
                write_json(new_folder / TARGETS_FILE, records)
            with bar(progress, "Measuring memory", None):
                manifest = add_resident(Bundle(new_folder, manifest), manifest)
            if (card := new_folder / CARD_FILE).is_file():
                write_text(card, f"{card.read_text(encoding='utf-8')}\n{artifact_section(manifest)}")
                manifest = manifest.model_copy(update={"files": manifest.files | {CARD_FILE: sha256_of(card)}})
            return seal(new_folder, manifest)


def _build_engines(
    source: GraphSource | RunSource, plans: Sequence[tuple[Builder, Target | Unavailable]], folder: Path,
    graphs: Sequence[ArtifactManifest],
) -> Iterator[ArtifactManifest]:  # fmt: skip
    """Yield what each builder makes of the graphs that passed, or an entry that says why it builds nothing."""
    job = source.build_job(folder, tuple(graph for graph in (*source.base, *graphs) if graph.status == "built"))
    has_other_calls = any(graph.calls is not None or "int32" in str(graph.inputs) for graph in source.base)
    for builder, target in plans:
        if has_other_calls and isinstance(target, Target):
            problem = "the imported graph has inputs or outputs that only ONNX graphs are called with"
            target = Unavailable(target.format, problem, target.precision)
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
            if source.rounds:
                artifact = source.judge(folder, entry).add_rounded(artifact)
            reason = artifact.reason and artifact.reason.replace(str(folder), str(source.folder))
            yield artifact.model_copy(update={"reason": reason})


def remove_rejected(
    folder: Path, artifacts: Sequence[ArtifactManifest], protected: Collection[str] = ()
) -> list[ArtifactManifest]:
    """Delete the files of artifacts that were not built, except ``protected``, and return the entries without them.

    Clients find graphs by name, not in bundle.json: a rejected graph must not lie where they would load it.
    """
    no_files: dict[str, object] = {"file": None, "parts": {}, "sha256": None, "weights_file": None}
    entries = [entry if entry.status == "built" else entry.model_copy(update=no_files) for entry in artifacts]
    listed = {name for entry in entries for name in (entry.file, entry.weights_file, *entry.parts.values())}
    # Builders may write ONNX files into the engines folder; a set has each path once.
    for path in {*folder.rglob("*.onnx"), *folder.rglob("*.onnx_data"), *(folder / ENGINES_FOLDER).glob("*")}:
        if path.is_file() and path.relative_to(folder).as_posix() not in {*listed, *protected}:
            path.unlink()
    return entries
