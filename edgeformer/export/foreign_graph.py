"""How large the inputs of somebody's graph are: by the graph, by what its sizes are called, and by ``--shape``."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer import __version__
from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.golden import read_arrays
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, Precision, Sharing
from edgeformer.artifacts.onnx_outline import Dim, Outline, Port, external_files, read_outline
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes import ArtifactFiles, OpenOptions, default_provider, library_versions, runtime_of
from edgeformer.runtimes.session import Session
from edgeformer.tasks import Task
from edgeformer.tasks.tensors import Axis, Takes

GOLDEN_SEQ = 64
"""Length of golden inputs where nothing says another one; calls of other lengths are cut or repeated from them."""

_LETTERS: Mapping[str, Takes] = {"B": "batch", "S": "seq"}
_ROLES: tuple[tuple[Takes, re.Pattern[str]], ...] = (
    ("batch", re.compile(r"(n|b|bs|batch([_ -]?(size|dim|axis))?)", re.IGNORECASE)),
    ("seq", re.compile(r"(s|length|(num[_ -]?)?tokens|(max[_ -]?)?seq(uence)?s?([_ -]?len(gth)?)?)", re.IGNORECASE)),
)
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Inputs whose axes are rows and tokens, whatever a graph calls them."""

Shape = tuple[int | str, ...]
"""As it is asked for: sizes, ``B`` for what --batch sizes and ``S`` for what --seq sizes."""


def parse_shape(text: str) -> tuple[str, Shape]:
    """``audio=1x512`` → name and sizes. Raises InputError."""
    name, equals, sizes = text.rpartition("=")
    parts = [part.strip() for part in sizes.replace("×", "x").split("x")]
    if equals and name and all(part in _LETTERS or (part.isdecimal() and int(part) > 0) for part in parts):
        return name, tuple(part if part in _LETTERS else int(part) for part in parts)
    if equals and name and not sizes:
        return name, ()
    raise InputError(
        f"--shape {text}: write NAME=SIZExSIZE…, e.g. --shape audio=1x512; B stands for what --batch sizes, S for --seq"
    )


def role_of(dim: Dim) -> Takes | None:
    """What an axis is, by the name that the graph gives its size."""
    if not isinstance(dim, str):
        return None
    return next((role for role, pattern in _ROLES if pattern.fullmatch(dim.strip())), None)


def find_axes(
    ports: Sequence[Port], asked: Mapping[str, Shape], known: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Axis, ...]]:
    """The axes of every input.

    Args:
        ports: inputs of the graph.
        asked: input → what ``--shape`` says; it wins over names.
        known: input → sizes of given golden inputs.

    Raises:
        InputError: a name that is no input, sizes that are not the graph's, or one that stays unknown.
    """
    names = [port.name for port in ports]
    for name in asked:
        if name not in names:
            raise InputError(f"--shape {name}=…: the graph has no such input; it has {', '.join(names)}")
    pinned: dict[str, int] = {}
    for port in ports:
        _pin(port, asked.get(port.name), pinned)
    found: dict[str, tuple[Axis, ...]] = {}
    unknown: list[tuple[Port, list[int]]] = []
    for port in ports:
        axes = _axes(port, asked.get(port.name), known.get(port.name), pinned)
        found[port.name] = tuple(axis for axis in axes if axis is not None)
        if None in axes:
            unknown.append((port, [place for place, axis in enumerate(axes) if axis is None]))
    if unknown:
        raise InputError(_unknown(unknown))
    return found


def _pin(port: Port, asked: Shape | None, pinned: dict[str, int]) -> None:
    """Note the sizes that ``--shape`` gives to names which other inputs may share. Raises InputError."""
    if asked is None:
        return
    written = _written(port.name, asked)
    if port.shape is not None and len(asked) != len(port.shape):
        raise InputError(f"{written}: the input has {len(port.shape)} axes: {shape_text(port)}")
    for place, (dim, size) in enumerate(zip(port.shape or (), asked, strict=False)):
        if isinstance(dim, int) and size != dim:
            raise InputError(f"{written}: axis {place} is {dim} in the graph: {shape_text(port)}")
        if isinstance(dim, str) and dim.strip("?") and isinstance(size, int) and pinned.setdefault(dim, size) != size:
            raise InputError(f"{written}: {dim!r} is {pinned[dim]} in another input")


def _axes(port: Port, asked: Shape | None, known: Sequence[int] | None, pinned: Mapping[str, int]) -> list[Axis | None]:
    """The axes of one input; None where a size is not known. Raises InputError."""
    if port.shape is None and asked is None and known is None:
        raise InputError(f"input {port.name!r}: the graph says nothing of its shape; give it: --shape {port.name}=1x…")
    dims = port.shape if port.shape is not None else (None,) * len(asked if asked is not None else known or ())
    if known is not None and len(known) != len(dims):
        raise InputError(f"input {port.name!r} has {len(dims)} axes ({shape_text(port)}), the given array {len(known)}")
    roles: list[Takes | None] = [role_of(dim) for dim in dims]
    if port.name in TEXT_INPUTS and len(dims) == 2:
        roles = ["batch", "seq"]
    axes: list[Axis | None] = []
    for place, (dim, role) in enumerate(zip(dims, roles, strict=True)):
        size: int | str | None = asked[place] if asked is not None else dim if isinstance(dim, int) else None
        if size is None and isinstance(dim, str):
            size = pinned.get(dim)
        given = known[place] if known is not None else None
        if isinstance(size, int):
            if given not in (None, size):
                raise InputError(f"input {port.name!r}: axis {place} is {size}, but {given} in the given array")
            axes.append(Axis(size=size, role=role))
        elif (takes := _LETTERS[size] if isinstance(size, str) else role) is not None:
            axes.append(Axis(size=given or (GOLDEN_SEQ if takes == "seq" else 1), takes=takes, role=takes))
        else:
            axes.append(Axis(size=given) if given is not None else None)
    return axes


def _unknown(inputs: Sequence[tuple[Port, Sequence[int]]]) -> str:
    """What to say of inputs with axes of unknown size."""
    what, flags = [], []
    for port, places in inputs:
        dims = port.shape or ()
        named = " and ".join(f"axis {place} ({dims[place] or 'without a name'})" for place in places)
        what.append(f"input {port.name!r} {shape_text(port)}: the size of {named} is not known")
        rows = [place for place, dim in enumerate(dims) if role_of(dim) == "batch"] or [0]
        sizes = (str(dim) if isinstance(dim, int) else "B" if place in rows else "…" for place, dim in enumerate(dims))
        flags.append(f"--shape {port.name}={'x'.join(sizes)}")
    return (
        f"{'; '.join(what)}. Give all sizes: {' '.join(flags)} (B: what --batch sizes, S: what --seq sizes, … a number)"
    )


def shape_text(port: Port) -> str:
    """``float32[batch, 3, ?]``."""
    return f"{port.dtype}[{', '.join(str(dim or '?') for dim in port.shape)}]" if port.shape is not None else port.dtype


def _written(name: str, shape: Shape) -> str:
    return f"--shape {name}={'x'.join(map(str, shape))}"


# Golden inputs of a graph that came without data: from an .npz file, or drawn with a seed.


Array = NDArray[Any]
Range = tuple[float, float]
"""Smallest and largest number, both of them taken."""


def parse_range(text: str) -> tuple[str, Range]:
    """``ids=0:30521`` or ``rate=16000`` → name, smallest and largest number. Raises InputError."""
    name, equals, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        found = float(low), float(high if colon else low)
    except ValueError:
        found = (math.nan, math.nan)
    if not equals or not name or not all(map(math.isfinite, found)) or found[0] > found[1]:
        raise InputError(f"--range {text}: write NAME=LOW:HIGH, both included, e.g. --range ids=0:30521; or NAME=VALUE")
    return name, found


def read_inputs(path: Path, ports: Sequence[Port]) -> dict[str, Array]:
    """Golden inputs from a file: name → [calls, …]. An array may be one call, or several with an axis in front.

    Raises:
        DataError: it cannot be read, lacks an input, or holds one of another type.
    """
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--inputs {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = {port.name: _taken(path, port, arrays) for port in ports}
    if len({len(array) for array in found.values()}) > 1:
        counts = ", ".join(f"{name} {len(array)}" for name, array in found.items())
        raise DataError(f"--inputs {path}: its arrays are of different numbers of calls: {counts}")
    return found


def _taken(path: Path, port: Port, arrays: Mapping[str, Array]) -> Array:
    if port.name not in arrays:
        held = ", ".join(arrays) or "nothing"
        raise DataError(f"--inputs {path}: holds no array {port.name!r}, which the graph takes; it holds {held}")
    array = arrays[port.name]
    if array.dtype != port.dtype:
        wanted = np.dtype(port.dtype)
        if array.dtype.kind not in "iufb" or not np.can_cast(array.dtype, wanted, "same_kind"):
            raise DataError(f"--inputs {path}: {port.name!r} must be {port.dtype}, but is {array.dtype}")
        narrow = array.astype(wanted)
        if wanted.kind in "iu" and not np.array_equal(narrow, array):
            raise DataError(f"--inputs {path}: {port.name!r} holds numbers that {port.dtype} cannot hold")
        array = narrow
    if not array.size:
        raise DataError(f"--inputs {path}: {port.name!r} is empty")
    one_call = port.shape is None or array.ndim == len(port.shape)
    return array[None] if one_call else array


def plan_ranges(outline: Outline, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Input → range of what is drawn for it; floats that have none are normal, truth values are drawn evenly.

    A range is assumed only where it is certain: token ids by the rows of the table that they pick from.

    Raises:
        InputError: integers without a range, or a range for something that is no input or cannot hold it.
    """
    names = [port.name for port in outline.inputs]
    for name in ranges:
        if name not in names:
            raise InputError(f"--range {name}=…: the graph has no such input; it has {', '.join(names)}")
    found: dict[str, Range] = {}
    missing: list[Port] = []
    for port in outline.inputs:
        whole = np.dtype(port.dtype).kind in "iu"
        known = ranges.get(port.name) or _certain(port, outline)
        if known is not None:
            _check_range(port, known, whole)
            found[port.name] = known
        elif whole:
            missing.append(port)
    if missing:
        what = " and ".join(f"{port.name!r} ({port.dtype})" for port in missing)
        flags = " ".join(f"--range {port.name}=0:…" for port in missing)
        raise InputError(
            f"input {what}: which whole numbers it takes cannot be read from the graph; say it: {flags} (smallest and "
            "largest), or give real inputs with --inputs FILE.npz"
        )
    return found


def _certain(port: Port, outline: Outline) -> Range | None:
    if port.name == "attention_mask":
        return 1, 1
    if port.name == "token_type_ids":
        return 0, 0
    rows = outline.tables.get(port.name) if port.name == "input_ids" else None
    return (0, rows - 1) if rows is not None else None


def _check_range(port: Port, known: Range, whole: bool) -> None:
    written = f"--range {port.name}={known[0]:g}:{known[1]:g}"
    if np.dtype(port.dtype).kind == "b":
        raise InputError(f"{written}: {port.name!r} holds truth values, which are drawn by themselves")
    if whole:
        limits = np.iinfo(port.dtype)
        if any(number != int(number) for number in known) or known[0] < limits.min or known[1] > limits.max:
            raise InputError(
                f"{written}: {port.name!r} is {port.dtype}: whole numbers from {limits.min} to {limits.max}"
            )


def draw(port: Port, axes: Sequence[Axis], known: Range | None, random: np.random.Generator) -> Array:
    """One call's input."""
    sizes = tuple(axis.size for axis in axes)
    kind = np.dtype(port.dtype).kind
    found: Array
    if kind == "b":
        found = random.integers(0, 2, sizes)
    elif kind in "iu":
        assert known is not None  # plan_ranges has seen to it
        found = random.integers(int(known[0]), int(known[1]), sizes, np.dtype(port.dtype), endpoint=True)
    else:
        found = random.normal(size=sizes) if known is None else random.uniform(*known, size=sizes)
    return np.asarray(found, dtype=port.dtype)


def told(port: Port, known: Range | None, seed: int) -> str:
    """How an input was drawn, in words."""
    if np.dtype(port.dtype).kind == "b":
        return f"random truth values, seed {seed}"
    if known is None:
        return f"standard normal, seed {seed}"
    if known[0] == known[1]:
        return f"always {known[0]:g}"
    return f"evenly from {known[0]:g} to {known[1]:g}, seed {seed}"


# What a graph does not say itself, and what a wrapping tells of it.


@dataclass(frozen=True)
class WrapOptions:
    """What the graph does not say itself.

    Attributes:
        shapes: input → sizes, see :data:`~edgeformer.export.foreign_graph.Shape`.
        ranges: input → smallest and largest number that golden inputs are drawn from.
        inputs: an .npz file with golden inputs, instead of drawn ones.
        seed: of what is drawn.
        tokenizer: a tokenizer.json: with ``labels``, the graph is a classifier of texts.
        labels: names of its classes, in the order of its logits.
        data: a labelled file that golden inputs are taken from, and that it is scored on.
        max_length: tokens that a classifier's texts are cut to.
        replace: a bundle that is there already.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    inputs: Path | None = None
    seed: int = 0
    tokenizer: Path | None = None
    labels: tuple[str, ...] = ()
    data: Path | None = None
    max_length: int = 128
    replace: bool = False

    def key(self, graph: ForeignGraph) -> str:
        """What tells wrappings of one file apart, the file's content included: 8 hexadecimal digits."""
        weights = [sha256_of(graph.path.resolve().parent / name) for name in graph.weights]
        given = sha256_of(self.inputs) if self.inputs is not None and self.inputs.is_file() else None
        told = [sha256_of(graph.path), weights, dict(self.shapes), dict(self.ranges), given, self.seed, __version__]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Told:
    """What a graph's bundle says of its task.

    Attributes:
        arrays: golden inputs and answers.
        facts: fields of bundle.json: data, labels, lengths, notes.
        score: of the graph itself on the golden inputs.
        validation: and on labelled data.
    """

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]
    score: Any
    validation: Any = None


# A file that somebody else made, before anything opens it: what it is, what it needs, and why it cannot be used.


_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc")
"""Whose operators ONNX Runtime brings."""
_NARROW = {"fp16": ("float16", "bfloat16"), "int8": ("int8", "uint8", "int4", "uint4")}
_LONGEST_NAME = 1000
_MANY = 6
"""Operators that a message lists."""


@dataclass(frozen=True)
class ForeignGraph:
    """An .onnx file that may be opened.

    Attributes:
        path: where it lies.
        outline: what it says of itself.
        weights: files beside it that it reads weights from, relative to its folder.
    """

    path: Path
    outline: Outline
    weights: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the model: that of the file, or of its folder where files of all models are called so."""
        stem, folder = self.path.stem, self.path.resolve().parent.name
        return folder if stem.lower() in ("model", "onnx") and folder else stem

    @property
    def precision(self) -> Precision:
        """What most of the stored numbers are."""
        stored = self.outline.stored
        for precision, types in _NARROW.items():
            if 2 * sum(stored[name] for name in types) > stored.total():
                return "fp16" if precision == "fp16" else "int8"
        return "fp32"


def read_foreign(path: Path) -> ForeignGraph:
    """Look at a file, and refuse what can never be profiled here.

    Raises:
        ArtifactError: it is no ONNX graph, damaged, holds compiled code, or reads files outside of its folder.
        InputError: an operator, an input or an output that nothing here can handle; the message names it.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix != ".onnx":
        raise InputError(f"{path}: an ONNX file is expected, whose name ends in .onnx")
    try:
        weights = external_files(path)
    except ArtifactError as error:
        raise ArtifactError(str(error).removesuffix(f"; {REMEDY}")) from None
    outline = read_outline(path)
    for location in sorted(weights):
        _check_location(path, location)
    _check_operators(path, outline)
    for port in outline.inputs:
        _check_port(path, port, "input")
    for port in outline.outputs:
        _check_port(path, port, "output")
    return ForeignGraph(path, outline, tuple(sorted(weights)))


def _check_location(path: Path, location: str) -> None:
    """Raise ArtifactError for weights that lie outside of the file's folder, or are not there."""
    pure, folder = PurePosixPath(location), path.resolve().parent
    foreign = pure.is_absolute() or ".." in pure.parts or pure.as_posix() != location or set("\\:\0") & set(location)
    if foreign or not location or not (folder / location).resolve().is_relative_to(folder):
        raise ArtifactError(
            f"{path}: reads weights from {location!r}, which is not inside of its folder; do not use it"
        )
    if not (folder / location).is_file():
        raise ArtifactError(f"{path}: reads weights from {location!r}, which is not there; copy it beside the file")


def _check_operators(path: Path, outline: Outline) -> None:
    strange = {
        (domain, operator): count
        for (domain, operator), count in outline.operators.items()
        if domain not in _DOMAINS and (domain, operator) not in outline.functions
    }
    if strange:
        named = [f"{domain}.{operator} ({count})" for (domain, operator), count in sorted(strange.items())]
        more = ", …" if len(named) > _MANY else ""
        raise InputError(
            f"{path}: has operators of its own that no runtime here knows: {', '.join(named[:_MANY])}{more}; export "
            "the model with standard ONNX operators"
        )


def _check_port(path: Path, port: Port, what: str) -> None:
    if not port.name.isprintable() or "\\" in port.name or not 0 < len(port.name) <= _LONGEST_NAME:
        raise InputError(f"{path}: {what} {port.name[:40]!r}: such a name cannot be kept in a golden.npz")
    if port.kind != "tensor":
        raise InputError(f"{path}: {what} {port.name!r} is a {port.kind}; only tensors can be given and compared")
    try:
        number = np.dtype(port.dtype).kind in "iufb"
    except TypeError:
        number = False
    if not number:
        remedy = "leave the text to the program around the graph" if port.dtype == "string" else "cast it in the graph"
        raise InputError(f"{path}: {what} {port.name!r} holds {port.dtype or 'no known type'}, no numbers; {remedy}")


def copy_into(graph: ForeignGraph, folder: Path, file: str) -> Mapping[str, Path]:
    """Copy the graph and its weights, bit for bit, into a bundle's folder.

    Args:
        folder: of the bundle.
        file: what the graph is called there; weights keep their names relative to it.

    Returns:
        Weights' names, relative to the bundle → where they lie now.
    """
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(graph.path, target)
    found = {}
    for location in graph.weights:
        copied = target.parent / location
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph.path.resolve().parent / location, copied)
        found[copied.relative_to(folder).as_posix()] = copied
    return found


def described(ports: tuple[Port, ...]) -> dict[str, str]:
    """Name → type[shape]."""
    return {port.name: shape_text(port) for port in ports}


# One wrapping: a foreign graph, copied into a new bundle's folder, and run there for its golden answers.


GRAPH = "onnx/model.onnx"
"""What the file is called in the bundle: there clients of Hugging Face repositories look for a graph."""
_LIBRARIES = ("onnxruntime", "numpy")


@dataclass(frozen=True)
class Wrapping:
    """A graph on its way into a bundle.

    Attributes:
        graph: as it was given.
        folder: of the new bundle.
        entry: its artifact, before anything was run.
    """

    graph: ForeignGraph
    folder: Path
    task: Task
    options: WrapOptions
    progress: Progress
    entry: ArtifactManifest

    def session(self) -> Session:
        """The graph on the CPU. Raises ArtifactError, said of the file that was given."""
        files = ArtifactFiles(self.entry, self.folder / GRAPH)
        try:
            return runtime_of(self.entry).open(files, OpenOptions(default_provider("cpu")))
        except ArtifactError as error:
            text = str(error).replace(str(self.folder / GRAPH), str(self.graph.path))
            raise ArtifactError(text.removesuffix(f"; {REMEDY}")) from None

    def run(self, session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One call. Raises InputError where the graph refuses it."""
        try:
            return {name: np.asarray(array) for name, array in session.run(inputs).items()}
        except InputError as error:
            raise InputError(f"{self.graph.path}: {error}; other sizes or numbers may work: --shape, --range") from None


def begin(graph: ForeignGraph, folder: Path, task: Task, options: WrapOptions, progress: Progress) -> Wrapping:
    """Copy the graph into ``folder``, bit for bit, and describe it."""
    outline, weights, versions = graph.outline, copy_into(graph, folder, GRAPH), library_versions()
    entry = ArtifactManifest(
        id=f"{ONNX}-{graph.precision}",
        file=GRAPH,
        format=ONNX,
        precision=graph.precision,
        status="built",
        weights_file=next(iter(weights)) if len(weights) == 1 else None,
        size_bytes=(folder / GRAPH).stat().st_size + sum(path.stat().st_size for path in weights.values()),
        sha256=sha256_of(folder / GRAPH),
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
    return Wrapping(graph, folder, task, options, progress, entry)
