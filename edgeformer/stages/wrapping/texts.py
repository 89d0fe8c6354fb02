"""Golden inputs and answers of somebody's classifier of texts: a graph from token ids to logits, with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.backends.session import Session
from edgeformer.data.sources import file_source
from edgeformer.data.tokenization import special_ids, tokenizer_from_file, tokens_of
from edgeformer.formats.data_config import DataConfig
from edgeformer.formats.errors import InputError
from edgeformer.formats.files import write_json
from edgeformer.formats.progress import bar
from edgeformer.formats.workspace import CONFIG_FILE, TOKENIZER_FILE
from edgeformer.stages.wrapping.drawing import Array
from edgeformer.stages.wrapping.foreign import ForeignGraph
from edgeformer.stages.wrapping.job import Wrapping
from edgeformer.stages.wrapping.options import Told, WrapOptions
from edgeformer.stages.wrapping.sizes import shape_text
from edgeformer.tasks import TextReader
from edgeformer.tasks.running import score_batches

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
            arrays = _drawn(reader, options)
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


def _drawn(reader: TextReader, options: WrapOptions) -> dict[str, Array]:
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
