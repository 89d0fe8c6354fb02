"""Predict --file: answer any number of texts in bounded memory.

One thread reads and tokenizes the texts, one runs the model, and the caller's thread writes the answers, in order.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from edgeformer.artifacts.errors import DataError, InputError, did_you_mean
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.row_files import ERROR, RowWriter, TableRow
from edgeformer.data.records import format_of_source
from edgeformer.data.rows import Row, format_names
from edgeformer.data.unlabelled import Unlabelled, windows
from edgeformer.inference.predict import Predictor
from edgeformer.system.signals import switch_threads_often
from edgeformer.tasks.arrays import Arrays
from edgeformer.tasks.embedding import VectorKind, VectorStore, quantize_vectors
from edgeformer.tasks.scoring import EncodedTexts
from edgeformer.tasks.task import Answer, Unanswered

T = TypeVar("T")
_POLL_S = 0.2  # how often a waiting thread checks whether it should stop


def run_ahead(
    items: Iterator[T], *, stopped: threading.Event | None = None, taker: threading.Event | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> Generator[T]:  # fmt: skip
    """Yield the same items, produced by a thread that is up to two items ahead of the consumer.

    An exception of ``items`` is raised in place of its item. Closing this generator waits for the item in work, unless
    ``leave`` says that the thread may be blocked on input that never comes; it sets ``stopped``. The items end if
    ``taker`` is set, because the consumer stops waiting.
    """
    produced: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()  # an item, an error, or the end
    requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # each for another item, until ``closed``
    closed = stopped or threading.Event()

    def produce() -> None:
        while requests.get() is None and not closed.is_set():
            try:
                produced.put((next(items),))
            except StopIteration:
                produced.put(None)
            except BaseException as error:  # the consumer raises it
                produced.put(error)
        if isinstance(items, Generator):
            items.close()

    thread = threading.Thread(target=produce, name="ahead", daemon=True)
    thread.start()
    requests.put(None)
    requests.put(None)
    try:
        while taker is None or not taker.is_set():
            with suppress(queue.Empty):
                # With a timeout, because on Windows Ctrl-C does not interrupt a wait without one.
                entry = produced.get(timeout=_POLL_S)
                if isinstance(entry, BaseException):
                    raise entry
                if entry is None:
                    break
                yield entry[0]
                requests.put(None)
    finally:
        closed.set()
        requests.put(None)
        while thread.is_alive() and not leave():
            thread.join(_POLL_S)


@dataclass(frozen=True)
class FileSummary:
    """Summary of an answered file: texts, those without an answer, and those of which only the beginning was read."""

    artifact: str
    rows: int
    errors: int
    truncated: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0


def example_row(model: Predictor, *, pairs: bool, vectors: VectorKind | None = None) -> TableRow:
    """Return an answer with every column that this model's answers have; the call also warms the model up.

    ``vectors``: how its vector is stored; None: it has none, or float32.
    """
    text = "a text"
    window = model.answering.read([(text, text) if pairs else text])
    outputs = model.answering.run(model.run, window)
    finite = model.answering.example_outputs(outputs)  # an overflow would give no columns
    example = model.answering.answers(window, finite)[0].as_dict()
    if vectors is not None:
        example["vector"] = quantize_vectors(finite["logits"], vectors)[0]
    return example


@dataclass(frozen=True)
class InputColumns:
    """Columns of the input that are copied in front of each answer."""

    names: Mapping[str, str]  # column of the input → its name in the output, in the order of the output
    answers: frozenset[str]  # keys of an answer
    extra_keys: Literal["write", "leave out", "refuse"] = "leave out"  # that the first record lacks (JSON Lines)

    def of(self, row: Row) -> dict[str, object]:
        """Return the values of a row by their output names. Raises DataError for a key that is refused."""
        values = {name: row.values[column] for column, name in self.names.items() if column in row.values}
        if self.extra_keys == "leave out" or len(values) == len(row.values):
            return values
        extra = [column for column in row.values if column not in self.names]
        if self.extra_keys == "refuse":
            raise DataError(
                f"{row.where}: has the key {extra[0]!r}, which the first record lacks; use --format jsonl, or name the "
                "columns with --columns A,B"
            )
        return values | {f"input_{key}" if key in self.answers else key: row.values[key] for key in extra}


NO_COLUMNS = InputColumns({}, frozenset())


def choose_columns(texts: Unlabelled, columns: str | None, example: TableRow, *, as_table: bool) -> InputColumns:
    """Choose the columns of the input that are copied to the output. Raises InputError.

    A column with the name of an answer's column is written as ``input_NAME``, unless it is the column of the texts
    called ``text``, or that of the second texts called ``pair``.

    Args:
        columns: ``all``, ``none``, or names separated by commas; None: all.
        example: an answer, see :func:`example_row`.
        as_table: every row of the output has the same columns.
    """
    if columns == "none":
        return NO_COLUMNS
    answers = frozenset({*(name for name, value in example.items() if value is not None), ERROR})
    available, source, names = texts.columns, texts.source, dict[str, str]()
    copies_all = columns in (None, "all")
    if not copies_all and not available:
        raise InputError(f"--columns {columns}: {texts.name} is plain text without columns; leave it out")
    chosen = [*available] if copies_all else [str(columns)]
    if not copies_all and columns not in available:
        chosen = [name.strip() for name in str(columns).split(",")]
    text_columns = {} if source is None else {source.text: "text", source.text_pair: "pair"}
    for column in chosen:
        if column not in available:
            hint = f"{did_you_mean(column, available)}give {format_names(available)}, all or none"
            raise InputError(f"--columns: {texts.name} has no column {column!r}; {hint}")
        is_renamed = column in answers and text_columns.get(column) != column
        names[column] = f"input_{column}" if is_renamed else column
        if is_renamed and names[column] in chosen:
            raise InputError(
                f"--columns: {texts.name} has the columns {column!r}, which the answers have too, and "
                f"{names[column]!r}, its new name; leave out one of them: --columns A,B"
            )
    if copies_all and available and source is not None and format_of_source(source) == "jsonl":
        return InputColumns(names, answers, "refuse" if as_table else "write")
    return InputColumns(names, answers)


def predict_file(
    model: Predictor, texts: Unlabelled, writer: RowWriter, progress: Progress = SILENT,
    columns: InputColumns = NO_COLUMNS, store: VectorStore | None = None,
) -> FileSummary:  # fmt: skip
    """Write the answers to all texts in their order, behind ``columns`` of the input. See :func:`answer_file`.

    ``store``: makes the vectors that are written; None: the answers have none, or float32.
    """

    def write(copied: Sequence[Mapping[str, object]], answers: Sequence[Answer]) -> None:
        rows = [{**values, **answer.as_dict()} for values, answer in zip(copied, answers, strict=True)]
        places = [place for place, answer in enumerate(answers) if not isinstance(answer, Unanswered)]
        if store is not None and places:
            vectors = quantize_vectors(store.add([answers[place] for place in places]), store.kind)
            for place, vector in zip(places, vectors.tolist(), strict=True):
                rows[place]["vector"] = vector
        writer.write(rows)

    return answer_file(model, texts, write, progress, columns)


def answer_file(
    model: Predictor, texts: Unlabelled, take: Callable[[Sequence[Mapping[str, object]], Sequence[Answer]], None],
    progress: Progress = SILENT, columns: InputColumns = NO_COLUMNS,
) -> FileSummary:  # fmt: skip
    """Answer all texts in their order, a window at a time. Raises DataError if there is none.

    ``take`` gets the values of ``columns`` of each row, and the answers.
    """
    started = time.perf_counter()
    rows = errors = truncated = rows_run = 0
    stopped = threading.Event()

    def run_and_count(inputs: Arrays) -> Arrays:
        nonlocal rows_run
        if stopped.is_set():  # the consumer has ended: do not finish the window
            raise InterruptedError
        outputs = model.run(inputs)
        count = len(inputs["input_ids"])
        rows_run += count
        progress.advance(count, rows_per_s=rows_run / (time.perf_counter() - started))
        return outputs

    def run_windows() -> Generator[tuple[EncodedTexts, Sequence[Mapping[str, object]], Arrays]]:
        read = (
            (model.answering.read([row.text for row in window_rows]), [columns.of(row) for row in window_rows])
            for window_rows in windows(texts.rows())
        )
        with closing(run_ahead(read, taker=stopped, leave=texts.leave)) as encoded:
            for window, copied in encoded:
                yield window, copied, model.answering.run(run_and_count, window)

    outputs_ahead = closing(run_ahead(run_windows(), stopped=stopped))
    with bar(progress, "Predicting", texts.expected, "rows"), switch_threads_often(), outputs_ahead as windows_run:
        for window, copied, outputs in windows_run:
            answers = model.answering.answers(window, outputs)
            take(copied, answers)
            rows += len(answers)
            errors += sum(isinstance(answer, Unanswered) for answer in answers)
            truncated += int(window.cut.sum())
            progress.advance(len(window.errors))
    if not rows:
        raise DataError(f"{texts.name}: has no text; give a file with at least one")
    return FileSummary(model.id, rows, errors, truncated, time.perf_counter() - started)
