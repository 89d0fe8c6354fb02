"""wrap: somebody's ONNX file becomes a bundle, as it is, with golden inputs and what ONNX Runtime answers in FP32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder, sha256_of
from edgeformer.artifacts.golden import write_golden
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.workspace import BUNDLE_FILE
from edgeformer.bundle import Bundle, seal
from edgeformer.export.foreign_graph import GRAPH, ForeignGraph, Told, WrapOptions, Wrapping, begin, read_foreign
from edgeformer.export.golden_inputs import answer_tensors, answer_texts, plan_tensors, require_classifier
from edgeformer.runtimes import default_provider
from edgeformer.system.host import code_version, now
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import claiming
from edgeformer.tasks import Task, task_named

__all__ = ["WrapOptions", "wrap", "wrap_cached"]

WRAPPED_FOLDER = "wrapped"
"""Where the bundles of files lie that were profiled without being wrapped before, below the folder of the runs."""
_STEADY = 1e-3
"""Two identical calls may differ by this much of an output's spread."""


def wrap(path: Path, folder: Path, options: WrapOptions | None = None, progress: Progress = SILENT) -> BundleManifest:
    """Make a bundle of an .onnx file. The file is copied bit for bit; nothing is written beside it.

    Args:
        path: of the file; weights beside it are copied, too.
        folder: of the bundle; what is there is replaced only when the new one is complete.
        options: what the graph does not say.
        progress: where to say what is going on.

    Raises:
        InputError: a shape or a range that is missing, an operator or type that nothing here handles, or a graph whose
            answers change from call to call; there is something in ``folder``.
        DataError: golden inputs, a tokenizer or labelled data that cannot be used.
        ArtifactError: no ONNX graph, a damaged or hostile one, or one that ONNX Runtime cannot open.
    """
    options = options or WrapOptions()
    _require_free(folder, options)
    graph = read_foreign(path)
    task, answer = _way(graph, options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with claiming(folder):
        remove_leftovers(folder)
        with replacing_folder(folder) as new:
            job = begin(graph, new, task, options, progress)
            with bar(progress, f"Running {path.name} for its golden answers", None, "calls"):
                return _seal(job, answer(job))


def _require_free(folder: Path, options: WrapOptions) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / BUNDLE_FILE).is_file():
        raise InputError(f"{folder}: is there already, and is no bundle; choose another folder")
    if Bundle.open(folder).manifest.wrapped is None:
        raise InputError(f"{folder}: is the bundle of a run; choose another folder")
    if not options.replace:
        raise InputError(f"{folder}: is there already; choose another folder, or make it anew with --replace")


def _way(graph: ForeignGraph, options: WrapOptions) -> tuple[Task, Callable[[Wrapping], Told]]:
    """What the graph is for, and what finds its golden answers, after all that is asked for was checked."""
    if options.tokenizer is not None or options.labels:
        reader = require_classifier(graph, options)
        return task_named("classification"), partial(answer_texts, reader=reader)
    if options.data is not None:
        raise InputError("--data: labelled texts need a tokenizer and labels: --tokenizer FILE --labels A,B")
    data, ranges, given = plan_tensors(graph, options)
    return task_named("tensors"), partial(answer_tensors, data=data, ranges=ranges, given=given)


def _seal(job: Wrapping, told: Told) -> BundleManifest:
    """golden.npz and bundle.json; the answers are asked for once more, by another session."""
    golden = write_golden(job.folder, told.arrays)
    with job.session() as session:
        # What draws random numbers begins with the same ones in every session.
        job.task.golden_outputs(golden.first(1), session.run, None)
        again = job.task.golden_outputs(golden, session.run, None)
    parity = job.task.golden_parity(golden.arrays, again, None, job.entry.precision, default_provider("cpu"))
    if parity.max_abs_error is None or (parity.max_abs_error > 0 and (parity.relative_error or 0) > _STEADY):
        raise InputError(
            f"{job.graph.path}: gives other answers to the same inputs when it is asked again (it draws random "
            "numbers, or computes what is no number), so nothing that is made of it could be verified"
        )
    measured = {"parity": parity, "score": told.score, "validation": told.validation}
    others = sorted(path.relative_to(job.folder).as_posix() for path in job.folder.rglob("*") if path.is_file())
    manifest = BundleManifest(
        run=job.graph.name,
        task=job.task.name,
        created=now(),
        max_positions=None,
        parameters=job.graph.outline.parameters,
        synthetic=False,
        data_fingerprints={},
        made_from={job.graph.path.name: str(job.entry.sha256)},
        wrapped=job.graph.path.name,
        files={name: sha256_of(job.folder / name) for name in others if name != GRAPH},
        artifacts=(job.entry.model_copy(update=measured),),
        code_version=code_version(),
        **told.facts,
    )
    return seal(job.folder, manifest)


def wrap_cached(path: Path, artifacts: Path, options: WrapOptions, progress: Progress = SILENT) -> Path:
    """The bundle of an .onnx file below ``artifacts``, made unless it is there. Raises what :func:`wrap` raises.

    Args:
        path: of the file.
        artifacts: the folder that holds the runs.
    """
    graph = read_foreign(path)
    folder = artifacts / WRAPPED_FOLDER / f"{graph.name}-{options.key(graph)}"
    try:
        if (folder / BUNDLE_FILE).is_file():
            bundle = Bundle.open(folder)
            for artifact in bundle.built():
                bundle.check(artifact)
            return folder
    except EdgeformerError as error:
        progress.message(f"{folder}: made anew ({error})")
    wrap(path, folder, replace(options, replace=True), progress)
    return folder
