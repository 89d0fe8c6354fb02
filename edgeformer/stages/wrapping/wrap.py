"""wrap: somebody's ONNX file becomes a bundle, as it is, with golden inputs and what ONNX Runtime answers in FP32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.backends import backend_of, default_provider, library_versions
from edgeformer.backends.backend import ArtifactFiles, OpenOptions
from edgeformer.bundle import Bundle, seal
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.formats.files import replacing_folder, sha256_of
from edgeformer.formats.golden import INPUT, OUTPUT, write_golden
from edgeformer.formats.manifest import ONNX, ArtifactManifest, BundleManifest, Sharing
from edgeformer.formats.progress import SILENT, Progress, bar
from edgeformer.formats.units import format_bytes
from edgeformer.formats.workspace import BUNDLE_FILE, REMEDY
from edgeformer.machine.host import code_version, now
from edgeformer.machine.lock import claiming
from edgeformer.stages.wrapping.drawing import Array, Range, draw, plan_ranges, read_inputs, told
from edgeformer.stages.wrapping.foreign import ForeignGraph, copy_into, described, read_foreign
from edgeformer.stages.wrapping.sizes import Shape, find_axes
from edgeformer.tasks import Task, task_named
from edgeformer.tasks.tensors.data import TensorData

GRAPH = "onnx/model.onnx"
"""What the file is called in the bundle: there and so clients of Hugging Face repositories look for a graph."""

GOLDEN_CALLS = 8
_MOST_GOLDEN_BYTES = 48 << 20
"""Of all golden inputs and outputs together; large ones are fewer."""
_LIBRARIES = ("onnxruntime", "numpy")


@dataclass(frozen=True)
class WrapOptions:
    """What the graph does not say itself.

    Attributes:
        shapes: input → sizes, see :data:`~edgeformer.stages.wrapping.sizes.Shape`.
        ranges: input → smallest and largest number that golden inputs are drawn from.
        inputs: an .npz file with golden inputs, instead of drawn ones.
        seed: of what is drawn.
        replace: a bundle that is there already.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    inputs: Path | None = None
    seed: int = 0
    replace: bool = False

    def key(self, graph: ForeignGraph) -> str:
        """What tells wrappings of one file apart, the file's content included: 8 hexadecimal digits."""
        weights = [sha256_of(graph.path.resolve().parent / name) for name in graph.weights]
        given = sha256_of(self.inputs) if self.inputs is not None and self.inputs.is_file() else None
        told = [sha256_of(graph.path), weights, dict(self.shapes), dict(self.ranges), given, self.seed, code_version()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _Wrapping:
    """A graph, and what its bundle will say of its task."""

    graph: ForeignGraph
    folder: Path
    task: Task
    options: WrapOptions
    progress: Progress


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
        ArtifactError: no ONNX graph, a damaged or hostile one, or one that ONNX Runtime cannot open.
    """
    options = options or WrapOptions()
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        if not (folder / BUNDLE_FILE).is_file():
            raise InputError(f"{folder}: is there already, and is no bundle; choose another folder")
        if not options.replace:
            raise InputError(f"{folder}: is there already; choose another folder, or make it anew with --replace")
    graph = read_foreign(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with claiming(folder), replacing_folder(folder) as new:
        return _wrap_tensors(_Wrapping(graph, new, task_named("tensors"), options, progress))


def _wrap_tensors(job: _Wrapping) -> BundleManifest:
    ports, options = job.graph.outline.inputs, job.options
    if options.inputs is not None:
        given = read_inputs(options.inputs, ports)
        known = {name: array.shape[1:] for name, array in given.items()}
        data = TensorData(
            inputs=find_axes(ports, options.shapes, known),
            drawn=dict.fromkeys(given, f"from {options.inputs.name}"),
        )
    else:
        given = None
        axes, ranges = find_axes(ports, options.shapes, {}), plan_ranges(job.graph.outline, options.ranges)
        drawn = {port.name: told(port, ranges.get(port.name), options.seed) for port in ports}
        data = TensorData(inputs=axes, drawn=drawn)
    weights = copy_into(job.graph, job.folder, GRAPH)
    entry = _entry(job, weights)
    with bar(job.progress, f"Running {job.graph.path.name} for its golden answers", None, "calls"):
        arrays = _drawn(job, entry, data) if given is None else _answered(job, entry, given)
        golden = write_golden(job.folder, arrays)
        with _open(job, entry) as session:
            again = job.task.golden_outputs(golden, session.run, None)
        parity = job.task.golden_parity(golden.arrays, again, None, entry.precision, default_provider("cpu"))
    if parity.max_abs_error is None or (parity.max_abs_error > 0 and (parity.relative_error or 0) > (1e-3)):
        raise InputError(
            f"{job.graph.path}: answers differ from call to call on the same inputs; nothing can be verified"
        )
    reference = {name.removeprefix(OUTPUT): array for name, array in arrays.items() if name.startswith(OUTPUT)}
    score: Any = job.task.golden_score(0, reference, reference)
    return _sealed(job, entry.model_copy(update={"parity": parity, "score": score}), data)


def _entry(job: _Wrapping, weights: Mapping[str, Path]) -> ArtifactManifest:
    outline, graph = job.graph.outline, job.folder / GRAPH
    versions = library_versions()
    return ArtifactManifest(
        id=f"{ONNX}-{job.graph.precision}",
        file=GRAPH,
        format=ONNX,
        precision=job.graph.precision,
        status="built",
        weights_file=next(iter(weights)) if len(weights) == 1 else None,
        size_bytes=graph.stat().st_size + sum(path.stat().st_size for path in weights.values()),
        sha256=sha256_of(graph),
        inputs=described(outline.inputs),
        outputs=described(outline.outputs),
        opset=outline.opsets.get(""),
        sharing=Sharing(
            unique_parameters=outline.parameters,
            stored_parameters=outline.parameters,
            weight_bytes=outline.weight_bytes,
        ),
        built_with={name: versions[name] for name in _LIBRARIES if name in versions},
    )


def _open(job: _Wrapping, entry: ArtifactManifest) -> Any:
    """A session on the CPU. Raises what the backend raises, said of the file that was given."""
    files = ArtifactFiles(entry, job.folder / GRAPH)
    try:
        return backend_of(entry).open(files, OpenOptions(default_provider("cpu")))
    except ArtifactError as error:
        text = str(error).replace(str(job.folder / GRAPH), str(job.graph.path))
        raise ArtifactError(text.removesuffix(f"; {REMEDY}")) from None


def _drawn(job: _Wrapping, entry: ArtifactManifest, data: TensorData) -> dict[str, Array]:
    """Golden inputs and answers: as many calls as fit."""
    random, ports = np.random.default_rng(job.options.seed), job.graph.outline.inputs
    ranges = plan_ranges(job.graph.outline, job.options.ranges)
    calls: list[dict[str, Array]] = []
    most = GOLDEN_CALLS
    with _open(job, entry) as session:
        while len(calls) < most:
            inputs = {port.name: draw(port, data.inputs[port.name], ranges.get(port.name), random) for port in ports}
            outputs = _run(job, session, inputs)
            calls.append(_named(inputs, outputs))
            size = sum(array.nbytes for array in calls[0].values())
            most = max(1, min(GOLDEN_CALLS, _MOST_GOLDEN_BYTES // max(1, size)))
    return _stacked(job, calls)


def _answered(job: _Wrapping, entry: ArtifactManifest, given: Mapping[str, Array]) -> dict[str, Array]:
    calls = []
    with _open(job, entry) as session:
        for number in range(len(next(iter(given.values())))):
            inputs = {name: np.asarray(array[number], order="C") for name, array in given.items()}
            calls.append(_named(inputs, _run(job, session, inputs)))
    return _stacked(job, calls)


def _named(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{INPUT}{name}": array for name, array in inputs.items()} | {
        f"{OUTPUT}{name}": np.asarray(array) for name, array in outputs.items()
    }


def _run(job: _Wrapping, session: Any, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    try:
        outputs: Mapping[str, Array] = session.run(inputs)
    except InputError as error:
        raise InputError(f"{error}; other sizes may work: --shape") from None
    return outputs


def _stacked(job: _Wrapping, calls: list[dict[str, Array]]) -> dict[str, Array]:
    """Name → [calls, …]. Raises InputError where an output has another shape in every call, or all is too large."""
    found = {}
    for name in calls[0]:
        shapes = {call[name].shape for call in calls}
        if len(shapes) > 1:
            sizes = " and ".join(sorted(str(list(shape)) for shape in shapes)[:2])
            raise InputError(
                f"{job.graph.path}: output {name.removeprefix(OUTPUT)!r} has a shape that depends on the numbers that "
                f"go in ({sizes}), so other artifacts cannot be compared with it; give one call with --inputs FILE.npz"
            )
        found[name] = np.stack([call[name] for call in calls])
    total = sum(array.nbytes for array in found.values())
    if total > 200 << 20:
        raise InputError(
            f"{job.graph.path}: one call takes and gives {format_bytes(total)}; give smaller sizes: --shape"
        )
    return found


def _sealed(job: _Wrapping, entry: ArtifactManifest, data: TensorData) -> BundleManifest:
    others = sorted(path.relative_to(job.folder).as_posix() for path in job.folder.rglob("*") if path.is_file())
    drawn = "; ".join(f"{name}: {how}" for name, how in data.drawn.items())
    manifest = BundleManifest(
        run=job.graph.name,
        task=job.task.name,
        created=now(),
        max_length=data.tokens_at_once,
        max_positions=None,
        pad_id=0,
        parameters=job.graph.outline.parameters,
        synthetic=False,
        data=data,
        data_fingerprints={},
        made_from={job.graph.path.name: str(entry.sha256)},
        wrapped=job.graph.path.name,
        files={name: sha256_of(job.folder / name) for name in others if name != GRAPH},
        artifacts=(entry,),
        notes=(f"golden inputs: {drawn}", *_doubts(job)),
        code_version=code_version(),
    )
    return seal(job.folder, manifest)


def _doubts(job: _Wrapping) -> list[str]:
    if not job.graph.outline.has_subgraphs:
        return []
    return ["If, Loop or Scan: what is computed, and how long it takes, can depend on the inputs"]


def wrap_cached(path: Path, artifacts: Path, options: WrapOptions, progress: Progress = SILENT) -> Path:
    """The bundle of an .onnx file below ``artifacts``, made unless it is there. Raises what :func:`wrap` raises.

    Args:
        path: of the file.
        artifacts: the folder that holds the runs.
    """
    graph = read_foreign(path)
    folder = artifacts / "wrapped" / f"{graph.name}-{options.key(graph)}"
    try:
        if (folder / BUNDLE_FILE).is_file():
            bundle = Bundle.open(folder)
            for artifact in bundle.built():
                bundle.check(artifact)
            return folder
    except EdgeformerError as error:
        progress.message(f"{folder}: made anew ({error})")
        options = WrapOptions(options.shapes, options.ranges, options.inputs, options.seed, replace=True)
    wrap(path, folder, options, progress)
    return folder
