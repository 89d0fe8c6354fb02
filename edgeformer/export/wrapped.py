"""Graphs that were made of a wrapped one: what they store, how close their outputs are to its own, and their scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.documents import own_profiles
from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder, sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Precision, Sharing
from edgeformer.artifacts.onnx_outline import external_files, read_outline
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.workspace import BUNDLE_FILE
from edgeformer.bundle import Bundle, seal
from edgeformer.export import int4
from edgeformer.export.audit import audit_portability, audit_sharing, count_quantization_numbers, float32_operators
from edgeformer.export.fp16 import halve, largest_values, lifted
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.export.int8 import quantize, quantized_nodes
from edgeformer.export.previous import Asked, Previous, link, own_files
from edgeformer.export.variants import ExportOptions, Plans, Variant, builders_asked, plans_of
from edgeformer.runtimes import (
    ArtifactFiles,
    Builder,
    BuildJob,
    OpenOptions,
    Unavailable,
    cannot_run,
    library_versions,
    opener_of,
)
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.runtime import ENGINES_FOLDER, InputShapes, Target
from edgeformer.runtimes.session import Array, Session
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import claiming
from edgeformer.tasks import Origin, Run
from edgeformer.tasks.parity import out_of_tolerance
from edgeformer.tasks.scoring import in_pieces, most_rows, score_batches

_LIBRARIES = ("onnx", "onnxruntime")
_MORE_STORED = 1.05
"""A graph may store that many times the numbers of the one that it was made of: small constants twice."""
_BATCH = 32


def describe_graph(path: Path, size_bytes: int, base: ArtifactManifest) -> dict[str, Any]:
    """What a graph's file says of itself, as fields of its entry; with a ``reason`` where it stores too much.

    Args:
        size_bytes: with weights beside it.
        base: the graph that it was made of.
    """
    outline, graph = read_outline(path), onnx.load(str(path), load_external_data=False)
    narrow = outline.stored["float16"] > 0
    unique = base.sharing.unique_parameters if base.sharing is not None else outline.parameters
    quantized, stored = quantized_nodes(graph), outline.parameters - count_quantization_numbers(graph)
    if "MatMulNBits" in quantized or "GatherBlockQuantized" in quantized:  # two numbers lie in a byte, scales beside
        stored = audit_sharing(graph, unique).stored_parameters
    sharing = Sharing(unique_parameters=unique, stored_parameters=stored, weight_bytes=outline.weight_bytes)
    versions = library_versions()
    facts: dict[str, Any] = {
        "sharing": sharing,
        "size_bytes": size_bytes,
        "sha256": sha256_of(path),
        "opset": outline.opsets.get(""),
        "ops_in_fp32": float32_operators(graph) if narrow else {},
        "quantized": quantized,
        "built_with": {name: versions[name] for name in _LIBRARIES if name in versions},
    }
    if stored > _MORE_STORED * unique:
        facts["reason"] = f"stores {stored:,} numbers, the graph that it was made of {unique:,}"
    return facts


def judge_graph(
    path: Path, precision: Precision, bundle: Bundle, notes: list[str], progress: Progress
) -> dict[str, Any]:
    """Parity and scores of a graph's file; see :func:`judge_session`."""
    with OnnxSession(path) as session:
        return judge_session(session, precision, bundle, notes, progress)


def judge_engine(
    made: ArtifactManifest, path: Path, bundle: Bundle, notes: list[str], progress: Progress
) -> ArtifactManifest:
    """What a builder made with parity and scores, rejected where it misses a bar; as it is where it cannot run here."""
    if not lacks_parity(made) or cannot_run(made) is not None:
        return made
    files = ArtifactFiles(made, path, max_positions=bundle.manifest.max_positions)
    try:
        with opener_of(made).open(files, OpenOptions()) as session:
            found = judge_session(session, made.precision, bundle, notes, progress, most_rows(made))
    except EdgeformerError as error:
        found = {"reason": str(error)}
    return made.model_copy(update={**found, "status": "rejected" if found["reason"] else "built"})


def judge_session(
    session: Session,
    precision: Precision,
    bundle: Bundle,
    notes: list[str],
    progress: Progress,
    most: int | None = None,
) -> dict[str, Any]:
    """Parity and scores, as fields of an entry, and the ``reason`` why it is rejected (None: it is not).

    Args:
        session: the opened artifact.
        bundle: holds the golden inputs and the graph that it was made of, which comes first.
        notes: gets what a reader of the scores must know.
        progress: is told of rows.
        most: rows that one call takes; None: any number.
    """
    task, golden, base = bundle.task, bundle.golden(), bundle.artifacts[0]
    outputs = task.golden_outputs(golden, session.run, most)
    parity = task.golden_parity(golden.arrays, outputs, None, precision, session.provider)
    reason = out_of_tolerance(parity)
    if parity.max_abs_error is None:
        return {"parity": parity, "reason": reason}
    run = in_pieces(session.run, most)
    validation = _validation(bundle, run, notes, progress) if reason is None else None
    score = task.golden_score(0, outputs, golden.answers)
    if reason is not None:
        return {"parity": parity, "score": score, "reason": reason + _drawn(bundle)}
    found, wanted = (validation, base.validation) if validation is not None else (score, base.score)
    lost = task.lost(found, wanted, precision, trimmed=False) if wanted is not None else None
    return {"parity": parity, "score": score, "validation": validation, "reason": lost}


def _validation(bundle: Bundle, run: Run, notes: list[str], progress: Progress) -> Score | None:
    """The score on the labelled data that the bundle was wrapped with; None: it had none, or it is not there now."""
    if bundle.artifacts[0].validation is None:
        return None
    task, reader = bundle.task, bundle.reader()
    try:
        rows = task.read_set(bundle.data, reader, "test", Origin())
    except (DataError, InputError) as error:
        notes.append(f"scores: the labelled data cannot be read ({error}), so they are of the golden inputs")
        return None
    meter, batches = task.meter(), task.call_batches(rows, _BATCH, reader.vocabulary)
    with bar(progress, "Scoring on the labelled file", len(rows), "rows"):
        arrays = (task.batch(rows, numbers, reader.pad) for numbers in batches)
        score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
    return meter.score()


def _drawn(bundle: Bundle) -> str:
    """What to do about a rejection on inputs that nobody has ever given to the model."""
    note = next((note for note in bundle.manifest.notes if "seed" in note), None)
    return "" if note is None else "; its golden inputs were drawn: wrap it with real ones (--inputs FILE.npz)"


# export of a bundle that `import onnx` made: further precisions and engines, compared with what its graph computes.


_REACH_CALLS = 2
"""Golden calls of which every number inside of the graph is looked at."""
_FP16_NOTE = (
    "FP16: norms, softmax, powers, sums over an axis and whatever came near FP16's limits on the golden inputs stay "
    "FP32; a CPU computes the rest in FP32, too: `edgeformer verify` on the target shows what it does there"
)
_INT8_NOTE = "INT8: judged by its outputs alone; without labelled data nobody knows what it costs of a task"


@dataclass(frozen=True)
class _Export:
    """What every artifact is made and judged with."""

    folder: Path
    bundle: Bundle
    base: ArtifactManifest
    options: ExportOptions
    plans: Plans
    notes: list[str]
    progress: Progress

    def file(self, artifact: ArtifactManifest) -> Path:
        """Where an artifact lies in the new bundle."""
        return self.folder / str(artifact.file)


def export_wrapped(folder: Path, options: ExportOptions | None = None, progress: Progress = SILENT) -> BundleManifest:
    """Add what ``options`` ask for to a wrapped bundle; what is there and is not asked for again stays.

    Each artifact runs on the golden inputs and is held to the FP32 graph's outputs, by the bars of its task. The bundle
    is replaced only when the new one is complete; the graph that was wrapped stays as it is, bit for bit.

    Args:
        folder: of the bundle.
        options: without exits or a trimmed vocabulary: nobody knows such things of a foreign graph. With ``replace``
            nothing stays but the graph that was wrapped.

    Raises:
        ArtifactError: the bundle is damaged.
        InputError: options that a foreign graph has no use for; something in the bundle would be lost, and ``replace``
            is not set; another process exports the same bundle.
    """
    options = options or ExportOptions()
    sizes = {"--vocab-keep": options.vocab_keep is not None, "--vocab-max": options.vocab_max is not None}
    given = {"--exit": bool(options.exits), "--vocab-trim": options.vocab_trim, **sizes}
    if asked := [flag for flag, value in {**given, "--allow-leak": options.allow_leak}.items() if value]:
        raise InputError(f"{asked[0]}: {folder} holds a wrapped graph, of which nobody knows loops or words")
    builders = builders_asked(options)
    with claiming(folder):
        remove_leftovers(folder)
        return _export(Bundle.open(folder), options, builders, progress)


def _export(bundle: Bundle, options: ExportOptions, builders: Sequence[Builder], progress: Progress) -> BundleManifest:
    base = bundle.artifacts[0]
    if (options.fp16 or options.int8 or options.int4) and base.precision != "fp32":
        raise InputError(f"{bundle.folder}: its graph is {base.precision.upper()} already; give the FP32 one to wrap")
    bundle.check(base)
    profiles = options.profiles or own_profiles(bundle.folder.parent)
    plans, previous = plans_of(builders, options, None, profiles), Previous(bundle.folder)
    if not options.replace:
        targets = [target for _, target in plans if isinstance(target, Target)]
        previous = Previous.beside(bundle, Asked(options, (), targets, base.precision))
        previous.refuse_to_lose(but=previous.again)
    with replacing_folder(bundle.folder) as new:
        _bring(bundle, base, new)
        job = _Export(new, bundle, base, options, plans, [], progress)
        return _sealed(job, [base, *previous.with_made(_make(job))])


def _bring(bundle: Bundle, base: ArtifactManifest, new: Path) -> None:
    """Everything that is there, reports too. What the graph itself needs is copied: onnx_ir reads no linked weights."""
    graph = bundle.folder / str(base.file)
    read = {graph, *(graph.parent / location for location in external_files(graph))}
    for path in bundle.folder.rglob("*"):
        target = new / path.relative_to(bundle.folder)
        if path in read:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        elif path.is_file() and path.name != BUNDLE_FILE:
            link(path, target)


def _make(job: _Export) -> list[ArtifactManifest]:
    ways: list[tuple[Precision, bool, Callable[[_Export], onnx_ir.Model]]]
    ways = [
        ("fp16", job.options.fp16, _halved),
        ("int8", job.options.int8, _quantized),
        ("int4", job.options.int4, _four_bits),
    ]
    made: list[ArtifactManifest] = []
    for precision, wanted, way in ways:
        if not wanted:
            continue
        artifact = _graph(job, precision, way)
        made.append(artifact)
        if artifact.status != "built" and not job.options.keep_going:
            return made
    if job.options.fp16:
        job.notes.append(_FP16_NOTE)
    if job.options.int8 and job.base.validation is None:
        job.notes.append(_INT8_NOTE)
    return made + list(_engines(job, [job.base, *made]))


def _graph(job: _Export, precision: Precision, way: Callable[[_Export], onnx_ir.Model]) -> ArtifactManifest:
    """One precision, written and judged; without a file where it failed."""
    variant = Variant(precision)
    entry = ArtifactManifest(
        id=variant.id(), file=None, format=ONNX, precision=precision, status="rejected",
        inputs=job.base.inputs, outputs=job.base.outputs,
    )  # fmt: skip
    path, weights = job.folder / variant.file("model"), job.folder / variant.weights
    for stale in (path, weights):
        stale.unlink(missing_ok=True)
    try:
        with bar(job.progress, f"Making the {precision.upper()} graph", None):
            model = way(job)
            beside = weights_file(weights) if job.base.weights_file is not None else nullcontext()
            with beside as shared:
                size = write_graph(model, path, shared)
        judged = {
            **describe_graph(path, size, job.base),
            **judge_graph(path, precision, job.bundle, job.notes, job.progress),
            "portability": (audit := audit_portability([path])),
        }
        job.notes.extend(f"{entry.id}: {note}" for note in audit.notes())
        if job.base.weights_file is not None:
            judged["weights_file"] = variant.weights
    except EdgeformerError as error:
        judged = {"reason": str(error)}
    except (OSError, MemoryError):
        raise
    except Exception as error:  # converters raise anything for graphs that nobody has tried
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        judged = {"reason": f"{precision.upper()}: cannot be made: {told}"}
    if judged.get("reason") is None:
        return entry.model_copy(update={**judged, "status": "built", "file": variant.file("model")})
    for rejected in (path, weights):
        rejected.unlink(missing_ok=True)
    gone = {"sha256": None, "weights_file": None}
    return entry.model_copy(update={**judged, **gone})


def _halved(job: _Export) -> onnx_ir.Model:
    model = onnx_ir.load(job.file(job.base))

    def feed(session: Session) -> list[dict[str, Array]]:
        found: list[dict[str, Any]] = []

        def run(inputs: Any) -> Any:
            found.append(session.run(inputs))
            return found[-1]

        job.bundle.task.golden_outputs(job.bundle.golden().first(_REACH_CALLS), run, None)
        return found

    return halve(model, largest_values(model, feed, job.folder))


def _quantized(job: _Export) -> onnx_ir.Model:
    made = quantize(lifted(onnx_ir.load(job.file(job.base))), job.folder)
    RemoveUnusedNodesPass()(made)
    if not quantized_nodes(onnx_ir.to_proto(made)):
        raise EdgeformerError(
            "INT8: nothing in it can be stored in INT8: it has no product with a stored matrix and no table of rows "
            "(convolutions and recurrent operators stay FP32)"
        )
    return made


def _four_bits(job: _Export) -> onnx_ir.Model:
    made = int4.quantize(lifted(onnx_ir.load(job.file(job.base))))
    if not quantized_nodes(onnx_ir.to_proto(made)):
        raise EdgeformerError("INT4: nothing in it can be stored in 4 bits: no product with a matrix, no table of rows")
    return made


def _engines(job: _Export, graphs: Sequence[ArtifactManifest]) -> Iterator[ArtifactManifest]:
    """What each builder makes of the graphs that passed, or one entry that says why it makes nothing."""
    precision: Precision = "fp16" if job.options.fp16 else job.base.precision
    request = BuildJob(
        bundle=job.folder,
        graphs=tuple(graph for graph in graphs if graph.status == "built"),
        precision=precision,
        max_length=job.bundle.manifest.max_length,
        max_positions=job.bundle.manifest.max_positions or job.bundle.manifest.max_length,
        cache=job.options.cache.parent if job.options.cache is not None else None,
        progress=job.progress,
        note=job.notes.append,
        module=_no_module,
        shapes=_engine_shapes(job.bundle),
    )
    for builder, target in job.plans:
        if isinstance(target, Unavailable):
            yield ArtifactManifest(
                id=f"{target.format}-{target.precision or precision}", file=None, format=target.format,
                precision=target.precision or precision, status="unavailable", reason=target.reason,
            )  # fmt: skip
            continue
        (job.folder / ENGINES_FOLDER).mkdir(exist_ok=True)
        for made in builder.build(target, request):
            artifact = judge_engine(made, job.file(made), job.bundle, job.notes, job.progress)
            if artifact.status != "built" and artifact.file is not None:
                (job.folder / artifact.file).unlink(missing_ok=True)
                artifact = artifact.model_copy(update={"file": None, "sha256": None})
            reason = artifact.reason and artifact.reason.replace(str(job.folder), str(job.bundle.folder))
            yield artifact.model_copy(update={"reason": reason})


def _no_module() -> Any:
    raise EdgeformerError("a wrapped graph has no torch module; build its engine from the graph: --trt")


def _engine_shapes(bundle: Bundle) -> InputShapes:
    """Smallest, best and largest shape of every input: 1 to 16 rows, lengths of up to 512, tuned for the golden ones.

    Empty of text: that the builder knows.
    """
    found: InputShapes = {}
    for name, sizes in bundle.task.input_shapes(bundle.data, 1, bundle.data.tokens_at_once).items():
        low = bundle.task.input_shapes(bundle.data, 1, 1)[name]
        high = bundle.task.input_shapes(bundle.data, 16, max(512, bundle.data.tokens_at_once))[name]
        found[name] = (low, sizes, high)
    return found


def _sealed(job: _Export, artifacts: Sequence[ArtifactManifest]) -> BundleManifest:
    """bundle.json of the new folder, without files of what was replaced; reports in it are nobody's artifacts."""
    listed = set[str]().union(*map(own_files, artifacts))
    for name in set[str]().union(*map(own_files, job.bundle.artifacts)) - listed:
        (job.folder / name).unlink(missing_ok=True)
    before = set(job.bundle.manifest.files)
    names = [path.relative_to(job.folder).as_posix() for path in job.folder.rglob("*") if path.is_file()]
    graphs = {artifact.file for artifact in artifacts}
    said = {note.partition(":")[0] for note in job.notes}
    said |= {"FP16", "INT8"} - {one.precision.upper() for one in artifacts}
    said |= {old.id for old in job.bundle.artifacts[1:]} - {one.id for one in artifacts if one.kept}
    manifest = job.bundle.manifest
    notes = (*(note for note in manifest.notes if note.partition(":")[0] not in said), *job.notes)
    files = {name: sha256_of(job.folder / name) for name in sorted(names) if name in before | listed}
    return seal(
        job.folder,
        manifest.model_copy(
            update={
                "artifacts": tuple(artifacts),
                "notes": notes,
                "files": {name: value for name, value in files.items() if name not in graphs},
                "manifest_sha256": None,
            }
        ),
    )
