"""``import onnx``: make a bundle of a foreign ONNX file, with golden inputs and its answers in ONNX Runtime.

The file is copied bit for bit. With a tokenizer and labels it becomes a text classifier, whose answers to the probe
texts must be those of the tokenizer and ONNX Runtime alone; otherwise a graph of task ``tensors``, of which only inputs
and outputs are known. Such a graph needs no proof: its golden outputs are ONNX Runtime's own, and there is no text.
Neither torch nor the package onnx is needed.
"""

import hashlib
import json
import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer._version import __version__
from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder, sha256_of, write_json
from edgeformer.artifacts.golden import INPUT, OUTPUT, write_golden
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Sharing, TextCalls
from edgeformer.artifacts.onnx_outline import CONTROL
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.units import format_bytes
from edgeformer.artifacts.workspace import (
    BUNDLE_FILE,
    CONFIG_FILE,
    REMEDY,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    read_tokenizer_config,
)
from edgeformer.bundle import Bundle, checksum_files, seal
from edgeformer.data.probes import PROBE_PAIRS, PROBE_TEXTS
from edgeformer.data.rows import Text, join_pair, text_parts
from edgeformer.data.sources import file_source
from edgeformer.data.tokenization import embedding_rows, special_ids, tokenizer_from_file
from edgeformer.imports.foreign_graph import (
    TEXT_INPUTS,
    ForeignGraph,
    Range,
    Shape,
    draw,
    find_axes,
    plan_ranges,
    read_foreign,
    read_inputs,
    shape_text,
)
from edgeformer.imports.proof import Compared, prove
from edgeformer.runtimes import ArtifactFiles, OpenOptions, default_provider, library_versions, runtime_of
from edgeformer.runtimes.session import Array, Session
from edgeformer.system.host import code_version, now
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import lock_path
from edgeformer.tasks import Run, Task, TextReader, get_task
from edgeformer.tasks.classification import LabelPrediction, softmax
from edgeformer.tasks.scoring import EMPTY, NOTHING_LEFT, fit_calls, score_batches
from edgeformer.tasks.tensors import TensorData, measure_error

GRAPH = "onnx/model.onnx"
"""File name in the bundle, where clients of Hugging Face repositories look for a graph."""
WRAPPED_FOLDER = "wrapped"
"""Folder below the runs for bundles of files that are profiled without being imported first."""

GOLDEN_ROWS, GOLDEN_CALLS = 64, 8
"""Golden inputs of a text classifier, and of other graphs."""
_RANDOM_TOKENS = 32
_BATCH = 32
_MAX_RANDOM_BYTES, _MAX_BYTES = 48 << 20, 200 << 20
"""Of all golden inputs and outputs: above the first fewer calls are drawn, above the second the import fails."""
_MAX_LISTED = 6
"""Operators that a message names."""
_REPEAT_TOLERANCE = 1e-3
"""Largest difference of two identical calls, relative to the output's standard deviation."""
_STILL_IMPORTABLE = (
    "export it again: optimum-cli export onnx --model MODEL --task text-classification FOLDER; or leave out "
    "--tokenizer and --labels to import it as a graph of tensors"
)
_LENGTH = 512
"""Tokens that texts are cut to if neither the tokenizer nor the graph states a length."""
_LEAST_LENGTH, _MOST_LENGTH = 4, 1 << 20
"""Limits of a stated length; transformers writes 10³⁰ for unlimited."""
_SUM_TOLERANCE = 1e-3
"""Largest difference from 1 of the sum of a row of probabilities."""


@dataclass(frozen=True)
class OnnxImportOptions:
    """Facts that the graph does not contain.

    Attributes:
        shapes: input → sizes: numbers, ``"B"`` (batch) and ``"S"`` (sequence), e.g. ``{"input": (1, 512)}``.
        ranges: input → smallest and largest number of random golden inputs.
        inputs: an .npz file with golden inputs, instead of random ones.
        seed: of random golden inputs.
        tokenizer: a tokenizer.json: with ``labels``, the graph is a text classifier.
        labels: names of its classes, in the order of its logits.
        data: a labelled file for golden inputs and scores.
        max_length: tokens that a classifier's texts are cut to; None: as the graph and the tokenizer state.
        unproven: import a classifier although its answers differ from those of ONNX Runtime alone.
        replace: replace an existing bundle.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    inputs: Path | None = None
    seed: int = 0
    tokenizer: Path | None = None
    labels: tuple[str, ...] = ()
    data: Path | None = None
    max_length: int | None = None
    unproven: bool = False
    replace: bool = False


@dataclass(frozen=True)
class _Import:
    """A graph that was copied into the folder of a new bundle; ``entry``: its artifact, before it ran."""

    graph: ForeignGraph
    folder: Path
    options: OnnxImportOptions
    progress: Progress
    entry: ArtifactManifest

    def open(self) -> Session:
        """Open the graph on the CPU. Raises ArtifactError, with the path of the imported file."""
        files = ArtifactFiles(self.entry, self.folder / GRAPH)
        try:
            return runtime_of(self.entry).open(files, OpenOptions(default_provider("cpu")))
        except ArtifactError as error:
            text = str(error).replace(str(self.folder / GRAPH), str(self.graph.path)).removesuffix(f"; {REMEDY}")
            operators = sorted({operator for _, operator in self.graph.outline.operators})
            # ONNX Runtime names some operators only by the class of their kernel.
            if not any(re.search(rf"\b{operator}\b", text) for operator in operators):
                text = f"{text}; it has the operators {', '.join(operators[:_MAX_LISTED])}"
            raise ArtifactError(text) from None

    def run(self, run: Run, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one call. Raises InputError where the graph refuses it."""
        try:
            return {name: np.asarray(array) for name, array in run(inputs).items()}
        except InputError as error:
            raise InputError(f"{self.graph.path}: {error}; try other sizes (--shape) or values (--range)") from None


def _check_classifier(graph: ForeignGraph, options: OnnxImportOptions) -> tuple[TextReader, TextCalls]:
    """Check inputs and outputs of a classifier of texts, and return its tokenizer and how its graph is called.

    Raises InputError, DataError.
    """
    if options.tokenizer is None or len(options.labels) < 2:
        raise InputError("--tokenizer and --labels: a text classifier needs both, with two labels or more; give both")
    flag, count = f"--labels {','.join(options.labels)}", len(options.labels)
    if len({label for label in options.labels if label.strip()}) != count:
        raise InputError(f"{flag}: two labels are equal, or one is empty; give {count} different names")
    if options.inputs is not None or options.ranges or options.shapes:
        raise InputError("--inputs, --range, --shape: are for graphs without a tokenizer; leave them out")
    outline = graph.outline
    fixed_sizes: tuple[set[int], set[int]] = (set(), set())  # of rows, of tokens
    for port in outline.inputs:
        for size, sizes in zip(port.shape or (), fixed_sizes, strict=False):
            sizes.update([size] if isinstance(size, int) else [])
        is_text = port.name in TEXT_INPUTS[:3] and port.dtype in ("int64", "int32")
        if not is_text or len(port.shape or ()) != 2 or any(len(sizes) > 1 for sizes in fixed_sizes):
            raise InputError(
                f"{graph.path}: input {port.name!r} {shape_text(port)}: a text classifier takes only "
                f"{', '.join(TEXT_INPUTS[:3])}, int64 or int32 [rows, tokens]; {_STILL_IMPORTABLE}"
            )
    floats = [port for port in outline.outputs if port.dtype == "float32" and len(port.shape or "BC") == 2]
    if len(floats) > 1:
        floats = [port for port in floats if port.shape is not None and port.shape[1] == count]
    matches = [port for port in outline.outputs if port.name == "logits"] or floats
    if len(matches) != 1 or "input_ids" not in [port.name for port in outline.inputs]:
        ports = ", ".join(f"{port.name} {shape_text(port)}" for port in (*outline.inputs, *outline.outputs))
        raise InputError(
            f"{graph.path}: a text classifier has the input input_ids, and the output logits or a single one of "
            f"float32[rows, {count}], but this graph has {ports}; {_STILL_IMPORTABLE}"
        )
    (logits,) = matches
    if logits.shape is not None and isinstance(logits.shape[-1], int) and logits.shape[-1] != count:
        raise InputError(f"{flag}: the graph has {logits.shape[-1]} classes; give {logits.shape[-1]} names")
    tokenizer = tokenizer_from_file(options.tokenizer)
    vocabulary, rows = embedding_rows(tokenizer), outline.tables.get("input_ids")
    if rows is not None and rows < vocabulary:
        raise InputError(
            f"--tokenizer {options.tokenizer}: has {vocabulary:,} tokens, but the embedding table of the graph has "
            f"{rows:,} rows; give the tokenizer of this model"
        )
    reader = TextReader(tokenizer, special_ids(tokenizer, str(options.tokenizer)).pad, vocabulary)
    rows, tokens = (next(iter(sizes), None) for sizes in fixed_sizes)
    if rows is None and tokens is None and "attention_mask" not in [port.name for port in outline.inputs]:
        rows = 1  # it cannot tell padding from text
    return reader, TextCalls(output=logits.name, rows=rows, tokens=tokens, pad_id=reader.pad)


def _choose_length(job: _Import, run: Run, tokens: TextReader, calls: TextCalls) -> tuple[int, list[str]]:
    """Return the number of tokens that texts are cut to, on which the graph runs, and notes.

    It is ``--max-length``, or the smallest one that the graph's shape, tokenizer.json and the tokenizer_config.json
    beside it state. A graph that fails on a text of that length gets the longest one that it runs.

    Raises InputError: the graph runs no text, or none as long as ``--max-length``.
    """
    options = job.options
    assert options.tokenizer is not None
    config = options.tokenizer.with_name(TOKENIZER_CONFIG)
    stated = [calls.tokens, (tokens.tokenizer.truncation or {}).get("max_length")]
    stated.append(read_tokenizer_config(config).get("model_max_length") if config.is_file() else None)
    lengths = [int(n) for n in stated if isinstance(n, (int, float)) and _LEAST_LENGTH <= n <= _MOST_LENGTH]
    length = options.max_length or min(lengths, default=_LENGTH)

    def problem(length: int) -> str | None:
        ids = np.full((1, length), tokens.tokenizer.encode("").ids[0], dtype=np.int64)
        try:
            run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
        except InputError as error:
            return str(error)
        return None

    if problem(length) is None:
        return length, []
    if (reason := problem(_LEAST_LENGTH)) is not None:
        raise InputError(f"{job.graph.path}: runs no text of {_LEAST_LENGTH} tokens ({reason}); {_STILL_IMPORTABLE}")
    longer = range(_LEAST_LENGTH + 1, length)
    longest = _LEAST_LENGTH + bisect_left(longer, True, key=lambda tokens: problem(tokens) is not None)
    if options.max_length is not None:
        raise InputError(
            f"--max-length {length}: the graph runs texts of at most {longest} tokens; give --max-length {longest}"
        )
    return longest, [f"max_length: texts are cut to {longest} tokens, because the graph fails on longer ones"]


def _write_manifest(
    job: _Import, task: Task, arrays: Mapping[str, Array], score: Any, validation: Any = None, **facts: Any
) -> BundleManifest:
    """Write golden.npz and bundle.json, after the answers of a second session were compared with the first's.

    ``facts`` are fields of bundle.json; ``score`` is of the golden inputs, ``validation`` of the labelled data.
    """
    golden, graph = write_golden(job.folder, arrays), job.graph
    with job.open() as session:
        # Operators that draw random numbers start with the same ones in every session.
        task.golden_outputs(golden.first(1), session.run, None)
        repeated = task.golden_outputs(golden, session.run, None)
    parity = task.golden_parity(golden.arrays, repeated, None, job.entry.precision, default_provider("cpu"))
    if parity.max_abs_error is None or (parity.max_abs_error > 0 and (parity.relative_error or 0) > _REPEAT_TOLERANCE):
        raise InputError(
            f"{graph.path}: gives different outputs for the same inputs (it draws random numbers or computes NaN), so "
            "no artifact of it can be verified; export the model in evaluation mode"
        )
    entry = job.entry.model_copy(update={"parity": parity, "score": score, "validation": validation})
    manifest = BundleManifest(
        run=graph.name, task=task.name, created=now(), max_positions=None, parameters=graph.outline.parameters,
        synthetic=False, data_fingerprints={}, made_from={graph.path.name: str(job.entry.sha256)},
        wrapped=graph.path.name, artifacts=(entry,), code_version=code_version(),
        files=checksum_files(job.folder, (entry,)), **facts,
    )  # fmt: skip
    return seal(job.folder, manifest)


def _answer_texts(job: _Import, tokens: TextReader, calls: TextCalls) -> BundleManifest:
    """Choose the length of texts, prove the answers, run the golden rows, and score the labelled file if any.

    Raises InputError: the graph fails on texts, or answers otherwise than ONNX Runtime alone.
    """
    import onnxruntime as ort
    from tokenizers import Tokenizer

    options, task = job.options, get_task("classification")
    with job.open() as session:
        # 1. Write tokenizer and configuration.
        max_length, notes = _choose_length(job, fit_calls(session.run, calls), tokens, calls)
        parts: Any = {"test": (file_source(options.data.resolve()),)} if options.data else {}
        data = DataConfig(parts=parts, split="imported", labels=options.labels, cleaning="none", max_length=max_length)
        shutil.copyfile(str(options.tokenizer), job.folder / TOKENIZER_FILE)
        id2label = {str(number): name for number, name in enumerate(data.labels)}
        label2id = {name: number for number, name in enumerate(data.labels)}
        config = {"vocab_size": tokens.vocabulary, "id2label": id2label, "label2id": label2id}
        write_json(job.folder / CONFIG_FILE, {**config, "max_length": max_length, "pad_token_id": tokens.pad})
        reader = task.rows.reader(job.folder / TOKENIZER_FILE, data, tokens.vocabulary)

        # 2. Answer the probe texts by the library tokenizers and ONNX Runtime alone, text by text.
        encoder: Any = Tokenizer.from_file(str(job.options.tokenizer))
        encoder.enable_truncation(**{**(encoder.truncation or {}), "max_length": max_length})
        encoder.no_padding()
        if calls.tokens is not None:
            encoder.enable_padding(length=calls.tokens, pad_id=calls.pad_id)
        plain_session = ort.InferenceSession(job.folder / GRAPH, providers=[default_provider("cpu")])
        path, ports, plain_logits = job.graph.path, job.graph.outline.inputs, dict[Text, Array]()
        for text in (*PROBE_TEXTS, *(PROBE_PAIRS if "token_type_ids" in [port.name for port in ports] else ())):
            encoding = encoder.encode(*text_parts(text))
            row = dict(zip(TEXT_INPUTS, (encoding.ids, encoding.attention_mask, encoding.type_ids), strict=False))
            call = {port.name: np.array([row[port.name]] * (calls.rows or 1), dtype=port.dtype) for port in ports}
            try:
                output = np.asarray(plain_session.run([calls.output], call)[0])
            except Exception as error:  # onnxruntime's exceptions share no base class
                raise InputError(
                    f"{path}: fails on the text {join_pair(text)[:80]!r} ({str(error).splitlines()[0][:200]}); give "
                    "the tokenizer of this model, or a smaller --max-length"
                ) from None
            shape = (calls.rows or 1, len(job.options.labels))
            if output.shape != shape or output.dtype != np.float32:
                raise InputError(
                    f"{path}: `{calls.output}` are {output.dtype}{list(output.shape)}, and a text classifier gives "
                    f"float32{list(shape)}; {_STILL_IMPORTABLE}"
                )
            plain_logits[text] = output[0]
        values = np.stack([*plain_logits.values()])
        if (values >= 0).all() and np.abs(values.sum(axis=1) - 1).max() < _SUM_TOLERANCE:
            raise InputError(
                f"{path}: `{calls.output}` holds probabilities instead of logits; export the model without the Softmax "
                "at its end"
            )
        expected = dict(zip(plain_logits, softmax(values), strict=True))

        # 3. Prove the answers. Where the texts or the padding of a call affect each other, every text gets its own.
        predictor = task.answerer.predictor(reader, data)
        window, library = predictor.read([*expected]), f"onnxruntime {library_versions()['onnxruntime']}"
        for rows in dict.fromkeys((calls.rows, calls.rows or 1)):
            calls = calls.model_copy(update={"rows": rows})
            answers = predictor.answers(window, predictor.run(fit_calls(session.run, calls), window))
            compared = []
            for (text, probabilities), answer in zip(expected.items(), answers, strict=True):
                if isinstance(answer, LabelPrediction):
                    compared.append(Compared(text, probabilities, np.array([*answer.probabilities.values()])))
                elif getattr(answer, "error", None) not in (EMPTY, NOTHING_LEFT):  # an empty text has no answer
                    compared.append(Compared(text, probabilities, np.empty(0)))
            proof = prove(library, compared, allow=options.unproven or rows is None)
            if proof.reason is None:
                break
        if calls.rows == 1:
            notes.append("calls: one text per call, because the graph takes one, or padding changes its answers")

        # 4. Run golden rows, and score the labelled file.
        random = np.random.default_rng(options.seed)
        labelled: Any = None
        if options.data is not None:
            labelled = task.rows.encode_rows(data, reader, task.rows.file_texts(data, options.data))
        run, validation = fit_calls(session.run, calls), None
        if labelled is not None:
            count = min(GOLDEN_ROWS, len(labelled))
            drawn = random.choice(len(labelled), count, replace=False)
            arrays: dict[str, Array] = dict(task.rows.batch(labelled, drawn, reader.pad))
            origin = f"{count} rows of {Path(str(options.data)).name}, seed {options.seed}"
        else:  # random tokens between the special tokens that texts begin and end with
            special = tokens.tokenizer.encode("").ids
            length = max(1, min(_RANDOM_TOKENS, max_length) - len(special))
            body = random.integers(0, tokens.vocabulary, (GOLDEN_ROWS, length))
            first, last = (np.tile(np.array(part, np.int64), (GOLDEN_ROWS, 1)) for part in (special[:1], special[1:]))
            ids = np.concatenate([first, body, last], axis=1).astype(np.int64)
            arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            origin = f"random tokens, seed {options.seed}; their accuracy is the agreement with FP32"
        logits = job.run(run, arrays)["logits"]
        arrays = {"labels": logits.argmax(-1).astype(np.int64), **arrays}
        if labelled is not None:
            meter, batches = task.meter(), task.rows.call_batches(labelled, _BATCH, reader.vocabulary)
            with bar(job.progress, "Scoring on the labelled file", len(labelled), "rows"):
                batch = (task.rows.batch(labelled, numbers, reader.pad) for numbers in batches)
                score_batches(run, batch, meter, warm_up=False, advance=job.progress.advance)
            validation = meter.score()
    entry = job.entry.model_copy(update={"calls": calls if calls != TextCalls(pad_id=reader.pad) else None})
    return _write_manifest(
        replace(job, entry=entry), task, {**arrays, "logits": logits}, task.golden_score(0, logits, arrays), validation,
        data=data, labels=options.labels, max_length=max_length, pad_id=reader.pad, proof=proof,
        notes=(f"golden inputs: {origin}", *notes),
    )  # fmt: skip


def _plan_tensors(graph: ForeignGraph, options: OnnxImportOptions) -> tuple[TensorData, Iterator[dict[str, Array]]]:
    """Return the axes of a graph's inputs and its golden calls, before it is opened. Raises InputError, DataError."""
    ports = graph.outline.inputs
    if not ports:
        names = " and ".join(repr(port.name) for port in graph.outline.outputs)
        raise InputError(f"{graph.path}: has no inputs, so {names} is always the same; export a graph with an input")
    if options.inputs is not None:
        inputs = read_inputs(options.inputs, ports)
        axes = find_axes(ports, options.shapes, {name: array.shape[1:] for name, array in inputs.items()})
        count = len(next(iter(inputs.values())))
        calls = ({name: np.asarray(array[i], order="C") for name, array in inputs.items()} for i in range(count))
        return TensorData(inputs=axes, drawn=dict.fromkeys(inputs, f"from {options.inputs.name}")), calls
    axes, ranges = find_axes(ports, options.shapes, {}), plan_ranges(graph.outline, options.ranges)
    sizes = {port.name: prod(axis.size for axis in axes[port.name]) * np.dtype(port.dtype).itemsize for port in ports}
    if sum(sizes.values()) > _MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"{graph.path}: input {largest!r} takes {format_bytes(sizes[largest])}, and golden inputs are limited to "
            f"{_MAX_BYTES >> 20} MiB; give smaller sizes: --shape"
        )
    drawn: dict[str, str] = {}  # the distributions that :func:`draw` uses
    for port in ports:
        limits, kind = ranges.get(port.name), np.dtype(port.dtype).kind
        drawn[port.name] = f"{'random booleans' if kind == 'b' else 'standard normal'}, seed {options.seed}"
        if limits is not None:
            low, high = limits
            drawn[port.name] = f"uniform from {low:g} to {high:g}, seed {options.seed}"
            if low == high:
                drawn[port.name] = f"always {low:g}"
    random = np.random.default_rng(options.seed)
    calls = (
        {port.name: draw(port, axes[port.name], ranges.get(port.name), random) for port in ports}
        for _ in range(GOLDEN_CALLS)
    )
    return TensorData(inputs=axes, drawn=drawn), calls


def _answer_tensors(job: _Import, data: TensorData, golden_calls: Iterator[dict[str, Array]]) -> BundleManifest:
    """Run a graph, of which only inputs and outputs are known, on its golden calls. Raises InputError."""
    task, calls = get_task("tensors"), list[dict[str, Array]]()
    with job.open() as session:
        for inputs in golden_calls:
            outputs = job.run(session.run, inputs)
            call = {f"{INPUT}{name}": array for name, array in inputs.items()}
            calls.append(call | {f"{OUTPUT}{name}": array for name, array in outputs.items()})
            size = sum(array.nbytes for array in calls[0].values())
            if job.options.inputs is None and (len(calls) + 1) * size > _MAX_RANDOM_BYTES:
                break
        # Outputs whose first rows change when the rows of the last golden call follow in the same call.
        affected = []
        if data.takes("batch"):
            joined = {}
            for name, axes in data.inputs.items():
                place = next((number for number, axis in enumerate(axes) if axis.takes == "batch"), None)
                first, last = (call[f"{INPUT}{name}"] for call in (calls[0], calls[-1]))
                joined[name] = first if place is None else np.concatenate([first, last], place)
            together: Mapping[str, Array] = {}
            with suppress(InputError):  # a measurement with more rows (--batch) reports it
                together = session.run(joined)
            for name, output in together.items():
                alone, rows = calls[0][f"{OUTPUT}{name}"], np.asarray(output)
                longer = [n for n, (a, b) in enumerate(zip(alone.shape, rows.shape, strict=True)) if a < b]
                if len(longer) == 1:
                    error = measure_error(name, rows.take(range(alone.shape[longer[0]]), longer[0]), alone)
                    if error.relative_largest is None or error.relative_largest > _REPEAT_TOLERANCE:
                        affected.append(repr(name))
    arrays = {}
    for name in calls[0]:
        shapes = {call[name].shape for call in calls}
        if len(shapes) > 1:
            sizes = " and ".join(sorted(str(list(shape)) for shape in shapes)[:2])
            raise InputError(
                f"{job.graph.path}: the shape of output {name.removeprefix(OUTPUT)!r} depends on the input values "
                f"({sizes}), so artifacts cannot be compared over several calls; give one call with --inputs FILE.npz"
            )
        arrays[name] = np.stack([call[name] for call in calls])
    total = sum(array.nbytes for array in arrays.values())
    if total > _MAX_BYTES:
        raise InputError(
            f"{job.graph.path}: golden inputs and outputs take {format_bytes(total)}, more than {_MAX_BYTES >> 20} "
            "MiB; give smaller sizes: --shape"
        )
    reference = {name.removeprefix(OUTPUT): array for name, array in arrays.items() if name.startswith(OUTPUT)}
    notes = [f"golden inputs: {'; '.join(f'{name}: {origin}' for name, origin in data.drawn.items())}"]
    if {operator for _, operator in job.graph.outline.operators} & {*CONTROL}:
        notes.append("If, Loop or Scan: the result and its time can depend on the input values")
    if affected:
        notes.append(
            f"batch: the other rows of a call change {', '.join(affected)}, as in a BatchNormalization in training "
            "mode or in dynamic quantization; compare calls of the same rows only"
        )
    score = task.golden_score(0, reference, reference)
    return _write_manifest(
        job, task, arrays, score, data=data, max_length=data.tokens_at_once, pad_id=0, notes=tuple(notes)
    )


def import_onnx(
    path: Path, folder: Path, options: OnnxImportOptions | None = None, progress: Progress = SILENT
) -> BundleManifest:
    """Make a bundle of an .onnx file; an existing one is replaced only when the new one is complete.

    Raises:
        InputError: a shape or range is missing, an operator or type is not supported, or identical calls give
            different answers; ``folder`` exists.
        DataError: golden inputs, a tokenizer or labelled data cannot be used.
        ArtifactError: the file is no ONNX graph, is damaged or hostile, or ONNX Runtime cannot open it.
    """
    # 1. Check folder and graph
    options = options or OnnxImportOptions()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        if not (folder / BUNDLE_FILE).is_file():
            raise InputError(f"{folder}: already exists and is no bundle; choose another folder")
        if Bundle.open(folder).manifest.wrapped is None:
            raise InputError(f"{folder}: is the bundle of a run; choose another folder")
        if not options.replace:
            raise InputError(f"{folder}: already exists; choose another folder, or replace it with --replace")
    graph = read_foreign(path)
    answer: Callable[[_Import], BundleManifest]
    if options.tokenizer is not None or options.labels:
        tokens, text_calls = _check_classifier(graph, options)
        answer = partial(_answer_texts, tokens=tokens, calls=text_calls)
    elif options.data is not None:
        raise InputError("--data: labelled texts need a tokenizer and labels; add --tokenizer FILE --labels A,B")
    else:
        data, calls = _plan_tensors(graph, options)
        answer = partial(_answer_tensors, data=data, golden_calls=calls)

    # 2. Copy the graph
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_path(folder):
        remove_leftovers(folder)
        with replacing_folder(folder) as new:
            target, outline, versions = new / GRAPH, graph.outline, library_versions()
            weights = [target.parent / location for location in graph.weights]  # they keep their names relative to it
            if target in weights:
                raise InputError(
                    f"{path}: its weights file has the name {target.name}, which a bundle uses for the graph; save the "
                    "graph with another name for its weights file"
                )
            for source, copy in ((path, target), *zip(graph.weights.values(), weights, strict=True)):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)

            # 3. Run it
            count = outline.parameters
            entry = ArtifactManifest(
                id=f"{ONNX}-{graph.precision}", file=GRAPH, format=ONNX, precision=graph.precision, status="built",
                weights_file=weights[0].relative_to(new).as_posix() if len(weights) == 1 else None,
                size_bytes=sum(file.stat().st_size for file in (target, *weights)), sha256=sha256_of(target),
                inputs={port.name: shape_text(port) for port in outline.inputs},
                outputs={port.name: shape_text(port) for port in outline.outputs}, opset=outline.opsets.get(""),
                sharing=Sharing(unique_parameters=count, stored_parameters=count, weight_bytes=outline.weight_bytes),
                built_with={name: versions[name] for name in ("onnxruntime", "numpy") if name in versions},
            )  # fmt: skip
            job = _Import(graph, new, options, progress, entry)
            with bar(progress, f"Running {path.name} on the golden inputs", None):
                return answer(job)


def import_onnx_cached(path: Path, artifacts: Path, options: OnnxImportOptions, progress: Progress = SILENT) -> Path:
    """Return the bundle of an .onnx file below ``artifacts``, made if missing. Raises like :func:`import_onnx`."""
    graph = read_foreign(path)
    inputs = sha256_of(options.inputs) if options.inputs is not None and options.inputs.is_file() else None
    weights, shapes, ranges = [*map(sha256_of, graph.weights.values())], dict(options.shapes), dict(options.ranges)
    parts = [sha256_of(graph.path), weights, shapes, ranges, inputs, options.seed, __version__]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    folder = artifacts / WRAPPED_FOLDER / f"{graph.name}-{key}"
    try:
        if (folder / BUNDLE_FILE).is_file():
            bundle = Bundle.open(folder)
            for artifact in bundle.built():
                bundle.check(artifact)
            return folder
    except EdgeformerError as error:
        progress.message(f"{folder}: is damaged and is written again ({error})")
    import_onnx(path, folder, replace(options, replace=True), progress)
    return folder
