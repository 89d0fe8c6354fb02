"""Golden inputs and answers of somebody's classifier of texts: a graph from token ids to logits, with its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.golden import INPUT, OUTPUT
from edgeformer.artifacts.progress import bar
from edgeformer.artifacts.units import format_bytes
from edgeformer.artifacts.workspace import CONFIG_FILE, TOKENIZER_FILE
from edgeformer.data.sources import file_source
from edgeformer.data.tokenization import special_ids, tokenizer_from_file, tokens_of
from edgeformer.export.foreign_graph import (
    Array,
    ForeignGraph,
    Range,
    Told,
    WrapOptions,
    Wrapping,
    draw,
    find_axes,
    plan_ranges,
    read_inputs,
    shape_text,
    told,
)
from edgeformer.runtimes.session import Session
from edgeformer.tasks import TextReader
from edgeformer.tasks.scoring import score_batches
from edgeformer.tasks.tensors import TensorData

GOLDEN_ROWS = 64
_DRAWN_TOKENS = 32
"""Of a row without text."""
_BATCH = 32
_TAKEN = ("input_ids", "attention_mask")


def require_classifier(graph: ForeignGraph, options: WrapOptions) -> TextReader:
    """How the graph reads text, after a look at what goes in and what comes out.

    Raises:
        InputError: it is no graph from token ids to one row of logits per text, or has other classes than labels.
        DataError: the tokenizer cannot be used.
    """
    if options.tokenizer is None or len(options.labels) < 2:
        raise InputError("--tokenizer and --labels belong together, and there must be two labels or more")
    given = ",".join(options.labels)
    if not all(label.strip() for label in options.labels):
        raise InputError(f"--labels {given}: has a class without a name; name all {len(options.labels)}")
    if len(set(options.labels)) != len(options.labels):
        raise InputError(f"--labels {given}: gives a name twice; needs {len(options.labels)} different names")
    if options.inputs is not None or options.ranges or options.shapes:
        raise InputError("--inputs, --range and --shape are for graphs without a tokenizer; texts are cut as they are")
    outline, remedy = graph.outline, "without --tokenizer and --labels it can be wrapped all the same"
    for port in outline.inputs:
        fixed = port.shape is None or len(port.shape) != 2 or any(isinstance(size, int) for size in port.shape)
        if port.name not in _TAKEN or port.dtype != "int64" or fixed:
            raise InputError(
                f"{graph.path}: input {port.name!r} {shape_text(port)}: a classifier of texts takes input_ids, and "
                f"perhaps attention_mask, int64 [rows, tokens] of any size; {remedy}"
            )
    logits = next((port for port in outline.outputs if port.name == "logits"), None)
    if logits is None or "input_ids" not in [port.name for port in outline.inputs]:
        names = ", ".join(port.name for port in outline.outputs)
        raise InputError(f"{graph.path}: a classifier has an output `logits`, this one has {names}; {remedy}")
    if logits.shape is not None and isinstance(logits.shape[-1], int) and logits.shape[-1] != len(options.labels):
        raise InputError(f"--labels {given}: the graph has {logits.shape[-1]} classes: {shape_text(logits)}")
    tokenizer = tokenizer_from_file(options.tokenizer)
    vocabulary, rows = tokens_of(tokenizer), outline.tables.get("input_ids")
    if rows is not None and rows < vocabulary:
        raise InputError(f"--tokenizer {options.tokenizer}: has {vocabulary:,} tokens, the graph's table {rows:,} rows")
    return TextReader(tokenizer, special_ids(tokenizer, str(options.tokenizer)).pad, vocabulary)


def answer_texts(job: Wrapping, reader: TextReader) -> Told:
    """Tokenizer and configuration beside the graph; its answers to golden rows, and its score where there is data.

    Raises:
        DataError: the labelled file cannot be read.
        InputError: the graph refuses a row, or does not answer with logits [rows, classes].
    """
    options, task = job.options, job.task
    assert options.tokenizer is not None  # require_classifier
    parts: Any = {"test": (file_source(options.data.resolve()),)} if options.data else {}
    data = DataConfig(
        parts=parts, split="imported", labels=options.labels, cleaning="none", max_length=options.max_length
    )
    _companions(job.folder, options.tokenizer, data, reader)
    reader = task.reader(job.folder / TOKENIZER_FILE, data, reader.vocabulary)
    rows = task.read_file(data, reader, options.data) if options.data is not None else None
    with job.session() as session:
        if rows is not None:
            count = min(GOLDEN_ROWS, len(rows))
            numbers = np.random.default_rng(options.seed).choice(len(rows), count, replace=False)
            arrays: dict[str, Array] = dict(task.batch(rows, numbers, reader.pad))
            told = f"{count} rows of {options.data.name if options.data else ''}, seed {options.seed}"
        else:
            arrays = _draw_texts(reader, options)
            told = f"random tokens, seed {options.seed}; without labels their accuracy is agreement with FP32"
        logits = _logits(job, session, arrays)
        arrays = {"labels": logits.argmax(-1).astype(np.int64), **arrays}
        validation = _score(job, session, rows, reader) if rows is not None else None
    golden = {**arrays, **task.golden_answers({0: logits})}
    golden.pop("logits_exit0")
    facts = {
        "data": data,
        "labels": options.labels,
        "max_length": options.max_length,
        "pad_id": reader.pad,
        "notes": (f"golden inputs: {told}",),
    }
    return Told(golden, facts, task.golden_score(0, logits, arrays), validation)


def _companions(folder: Path, tokenizer: Path, data: DataConfig, reader: TextReader) -> None:
    shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
    config: dict[str, object] = {
        "vocab_size": reader.vocabulary,
        "id2label": {str(number): label for number, label in enumerate(data.labels)},
        "label2id": {label: number for number, label in enumerate(data.labels)},
        "max_length": data.max_length,
        "pad_token_id": reader.pad,
    }
    write_json(folder / CONFIG_FILE, config)


def _draw_texts(reader: TextReader, options: WrapOptions) -> dict[str, Array]:
    """Rows that begin and end as texts do, with random tokens between."""
    frame = reader.tokenizer.encode("").ids
    first, last = frame[:1], frame[1:]
    length = max(1, min(_DRAWN_TOKENS, options.max_length) - len(frame))
    body = np.random.default_rng(options.seed).integers(0, reader.vocabulary, (GOLDEN_ROWS, length))
    ends = [np.tile(np.array(part, dtype=np.int64), (GOLDEN_ROWS, 1)) for part in (first, last)]
    ids = np.concatenate([ends[0], body, ends[1]], axis=1).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _logits(job: Wrapping, session: Session, arrays: dict[str, Array]) -> Array:
    logits = job.run(session, arrays)["logits"]
    wanted = (len(arrays["input_ids"]), len(job.options.labels))
    if logits.shape != wanted or logits.dtype != np.float32:
        raise InputError(
            f"{job.graph.path}: `logits` are {logits.dtype}{list(logits.shape)} of {wanted[0]} rows and {wanted[1]} "
            "labels; without --tokenizer and --labels it can be wrapped all the same"
        )
    return logits


def _score(job: Wrapping, session: Session, rows: Any, reader: TextReader) -> Any:
    """On all of the labelled file."""
    meter = job.task.meter()
    batches = job.task.call_batches(rows, _BATCH, reader.vocabulary)
    with bar(job.progress, "Scoring on the labelled file", len(rows), "rows"):
        arrays = (job.task.batch(rows, numbers, reader.pad) for numbers in batches)
        score_batches(session.run, arrays, meter, warm_up=False, advance=job.progress.advance)
    return meter.score()


# Golden inputs and answers of a graph of which nothing is known but what goes in and what comes out.


GOLDEN_CALLS = 8
_MOST_DRAWN_BYTES, _MOST_BYTES = 48 << 20, 200 << 20
"""Of all golden inputs and outputs together: beyond, fewer are drawn; beyond, even one is too large."""


def plan_tensors(
    graph: ForeignGraph, options: WrapOptions
) -> tuple[TensorData, dict[str, Range], dict[str, Array] | None]:
    """Sizes of the inputs, ranges to draw them from, and given ones, name → [calls, …]; before anything is opened.

    Raises:
        InputError: a size or a range that is not known, or is not the graph's.
        DataError: ``options.inputs`` cannot be used.
    """
    ports = graph.outline.inputs
    if options.inputs is not None:
        given = read_inputs(options.inputs, ports)
        axes = find_axes(ports, options.shapes, {name: array.shape[1:] for name, array in given.items()})
        return TensorData(inputs=axes, drawn=dict.fromkeys(given, f"from {options.inputs.name}")), {}, given
    axes, ranges = find_axes(ports, options.shapes, {}), plan_ranges(graph.outline, options.ranges)
    sizes = {port.name: prod(axis.size for axis in axes[port.name]) * np.dtype(port.dtype).itemsize for port in ports}
    if sum(sizes.values()) > _MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        size = format_bytes(sizes[largest])
        raise InputError(
            f"{graph.path}: input {largest!r} takes {size}; golden inputs may take {_MOST_BYTES >> 20} MiB"
        )
    drawn = {port.name: told(port, ranges.get(port.name), options.seed) for port in ports}
    return TensorData(inputs=axes, drawn=drawn), ranges, None


def answer_tensors(
    job: Wrapping, data: TensorData, ranges: Mapping[str, Range], given: Mapping[str, Array] | None
) -> Told:
    """Run the graph on its golden inputs.

    Raises:
        InputError: it refuses them, or its outputs cannot be compared with another graph's.
    """
    calls = _draw_tensors(job, data, ranges) if given is None else _answered(job, given)
    arrays = _stacked(job, calls)
    reference = {name.removeprefix(OUTPUT): array for name, array in arrays.items() if name.startswith(OUTPUT)}
    how = "; ".join(f"{name}: {words}" for name, words in data.drawn.items())
    facts = {
        "data": data,
        "max_length": data.tokens_at_once,
        "pad_id": 0,
        "notes": (f"golden inputs: {how}", *_doubts(job)),
    }
    return Told(arrays, facts, job.task.golden_score(0, reference, reference))


def _draw_tensors(job: Wrapping, data: TensorData, ranges: Mapping[str, Range]) -> list[dict[str, Array]]:
    """As many calls as fit."""
    random, ports = np.random.default_rng(job.options.seed), job.graph.outline.inputs
    calls: list[dict[str, Array]] = []
    most = GOLDEN_CALLS
    with job.session() as session:
        while len(calls) < most:
            inputs = {port.name: draw(port, data.inputs[port.name], ranges.get(port.name), random) for port in ports}
            calls.append(_named(inputs, job.run(session, inputs)))
            size = sum(array.nbytes for array in calls[0].values())
            most = max(1, min(GOLDEN_CALLS, _MOST_DRAWN_BYTES // max(1, size)))
    return calls


def _answered(job: Wrapping, given: Mapping[str, Array]) -> list[dict[str, Array]]:
    calls = []
    with job.session() as session:
        for number in range(len(next(iter(given.values())))):
            inputs = {name: np.asarray(array[number], order="C") for name, array in given.items()}
            calls.append(_named(inputs, job.run(session, inputs)))
    return calls


def _named(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
    found = {f"{INPUT}{name}": array for name, array in inputs.items()}
    return found | {f"{OUTPUT}{name}": array for name, array in outputs.items()}


def _stacked(job: Wrapping, calls: list[dict[str, Array]]) -> dict[str, Array]:
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
    if total > _MOST_BYTES:
        size = format_bytes(total)
        raise InputError(f"{job.graph.path}: golden inputs and outputs take {size}; give smaller sizes: --shape")
    return found


def _doubts(job: Wrapping) -> list[str]:
    if not job.graph.outline.has_subgraphs:
        return []
    return ["If, Loop or Scan: what is computed, and how long it takes, can depend on the inputs"]
