"""Work that runs ahead in a thread of its own: while one step takes an item, the step before it makes the next."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from typing_extensions import Self

from edgeformer.artifacts.errors import DataError, InputError, did_you_mean
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.row_files import ERROR, Row, RowWriter
from edgeformer.data.records import format_of_source
from edgeformer.data.rows import listed
from edgeformer.data.unlabelled import InputRow, Unlabelled, windows
from edgeformer.inference.predict import Model
from edgeformer.system.signals import switching_often
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.task import Run, Unanswered
from edgeformer.tasks.text_answers import Answering, Window

T = TypeVar("T")
_WAIT_S = 0.2
"""How soon a thread whose items nobody takes any more sees that."""


class _End(Generic[T]):
    """Behind the last item: what ended them, None for the end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(
    items: Iterable[T],
    most: int = 1,
    *,
    stopped: threading.Event | None = None,
    taker: threading.Event | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> Generator[T]:
    """The same items, made by a thread that is up to ``most`` of them ahead. An error comes where its item would be.

    When it is closed, the thread ends with the item that it works on, and is waited for.

    Args:
        items: to make; a generator is closed by the thread.
        most: items that may wait to be taken.
        stopped: is set when it is closed; None: nobody needs to know.
        taker: is set when the thread that takes these items shall wait for them no longer; they then end.
        leave: asked when it is closed: the thread waits for something outside that may never come, and is left to
            itself.
    """
    made: queue.Queue[T | _End[T]] = queue.Queue(most)
    closed = stopped or threading.Event()
    thread = threading.Thread(target=_make, args=(items, made, closed), name="ahead", daemon=True)
    thread.start()
    try:
        item = _next(made, taker)
        while not isinstance(item, _End):
            yield item
            item = _next(made, taker)
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        while thread.is_alive() and not leave():
            thread.join(_WAIT_S)


def _make(items: Iterable[T], made: queue.Queue[T | _End[T]], closed: threading.Event) -> None:
    def put(item: T | _End[T]) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=_WAIT_S)
                break

    error: BaseException | None = None
    try:
        for item in items:
            put(item)
            if closed.is_set():
                break
    except BaseException as raised:  # whatever it is, the thread that takes the items must hear of it
        error = raised
    finally:
        if isinstance(items, Generator):
            items.close()
    put(_End(error))


def _next(made: queue.Queue[T | _End[T]], taker: threading.Event | None) -> T | _End[T]:
    """The next item. It wakes up now and then: Windows tells a thread that waits for ever of no Ctrl-C."""
    while taker is None or not taker.is_set():
        with suppress(queue.Empty):
            return made.get(timeout=_WAIT_S)
    return _End(None)


# predict --file: any number of texts in bounded memory. Three threads: one reads, one runs the model, one writes.


_EXAMPLE = "a text"


@dataclass(frozen=True)
class Answered:
    """What became of a file.

    Attributes:
        artifact: that answered.
        rows: all of them.
        errors: rows without an answer.
        truncated: texts whose beginning only was read.
        seconds: from the first row to the last.
    """

    artifact: str
    rows: int
    errors: int
    truncated: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Rows in a second."""
        return self.rows / self.seconds if self.seconds else 0.0


def example_row(model: Model, *, pairs: bool) -> Row:
    """What an answer of this model looks like: the columns of a table, and a call that pays for every allocation."""
    window = model.answering.read([(_EXAMPLE, _EXAMPLE) if pairs else _EXAMPLE])
    outputs = model.answering.run(model.run, window)
    shaped = {name: np.zeros_like(array) for name, array in outputs.items()}  # columns, whatever it answers
    return model.answering.answers(window, shaped)[0].as_dict()


@dataclass(frozen=True)
class InputColumns:
    """Columns of the input that are written in front of each answer.

    A column that has the name of one of the answer's is written as ``input_NAME``, unless it is the same: the column of
    the texts, where it is called ``text``, and that of the second texts, where it is called ``pair``.

    Attributes:
        names: column of the input → its name in the output, in the order of the output.
        answers: keys of an answer.
        extra_keys: what becomes of a key that the first record lacks (JSON Lines): written too, left out, or refused.
    """

    names: Mapping[str, str]
    answers: frozenset[str]
    extra_keys: Literal["write", "leave out", "refuse"] = "leave out"

    def of(self, row: InputRow) -> dict[str, object]:
        """Return the values of a row by their names in the output. Raises DataError for a key that is refused."""
        values = {name: row.values[column] for column, name in self.names.items() if column in row.values}
        if self.extra_keys == "leave out" or len(values) == len(row.values):
            return values
        for column in (column for column in row.values if column not in self.names):
            if self.extra_keys == "refuse":
                raise DataError(
                    f"{row.where}: has the key {column!r}, which the first record lacks, so it has no column; write "
                    "JSON Lines, or name the columns with --columns A,B"
                )
            values[f"{_RENAMED}{column}" if column in self.answers else column] = row.values[column]
        return values


NO_COLUMNS = InputColumns({}, frozenset())
_RENAMED = "input_"


def choose_columns(texts: Unlabelled, columns: str | None, example: Row, *, as_table: bool) -> InputColumns:
    """Choose the columns of the input that are written.

    Args:
        texts: the input.
        columns: ``all``, ``none``, or names with commas between them; None: all.
        example: an answer.
        as_table: the output has the same columns in every row.

    Raises:
        InputError: no such column, or two would have the same name in the output.
    """
    answers = frozenset({*(name for name, value in example.items() if value is not None), ERROR})
    have = texts.columns
    if columns is None or columns == "all":
        chosen = [*have]
    elif columns == "none":
        return NO_COLUMNS
    else:
        chosen = [columns] if columns in have else [name.strip() for name in columns.split(",")]
        for name in chosen:
            if not have:
                raise InputError(f"--columns {columns}: {texts.name} is plain text, which has no columns")
            if name not in have:
                hint = f"{did_you_mean(name, have)}columns: {listed(have)}"
                raise InputError(f"--columns: {texts.name} has no column {name!r}; {hint}, or all or none")
    own = {texts.source.text: "text", texts.source.text_pair: "pair"} if texts.source is not None else {}
    names: dict[str, str] = {}
    for column in chosen:
        name = f"{_RENAMED}{column}" if column in answers and own.get(column) != column else column
        if name != column and name in chosen:
            raise InputError(
                f"--columns: {texts.name}: {column!r} is the name of a column of the answers, and {name!r} is in the "
                "input, too; leave out one of them: --columns A,B"
            )
        names[column] = name
    whole = columns in (None, "all") and texts.source is not None and texts.columns
    extra_keys: Literal["write", "leave out", "refuse"] = "leave out"
    if whole and texts.source is not None and format_of_source(texts.source) == "jsonl":
        extra_keys = "refuse" if as_table else "write"
    return InputColumns(names, answers, extra_keys)


def predict_file(
    model: Model, texts: Unlabelled, writer: RowWriter, progress: Progress = SILENT, columns: InputColumns = NO_COLUMNS
) -> Answered:
    """Answer all texts, in their order.

    Args:
        model: as :func:`~edgeformer.inference.predict.opened` opens it.
        texts: the texts.
        writer: of the answers, as JSON has them; it is not closed.
        progress: a bar with rows per second.
        columns: of the input, which are written in front of the answers.

    Raises:
        DataError: a text cannot be read, or there is none.
    """
    started = time.perf_counter()
    rows = errors = truncated = 0
    calls = _Calls(model.run, progress)
    threads = closing(_answered(model.answering, texts, calls, columns))
    with bar(progress, "predict", texts.expected, "rows"), switching_often(), threads as done, calls:
        for window, kept, outputs in done:
            answers = model.answering.answers(window, outputs)
            writer.write([{**values, **answer.as_dict()} for values, answer in zip(kept, answers, strict=True)])
            rows += len(answers)
            errors += sum(isinstance(answer, Unanswered) for answer in answers)
            truncated += int(window.cut.sum())
            progress.advance(len(window.errors))
    if not rows:
        raise DataError(f"{texts.name}: no text in it")
    return Answered(model.id, rows, errors, truncated, time.perf_counter() - started)


class _Calls:
    """A session's ``run`` that tells how many rows are done, and stops between two calls when the block has ended."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self._stopped = threading.Event()
        self._rows, self._started = 0, time.perf_counter()

    def __call__(self, inputs: Arrays) -> Arrays:
        if self._stopped.is_set():
            raise InterruptedError
        outputs = self._run(inputs)
        rows = len(inputs["input_ids"])
        self._rows += rows
        self._progress.advance(rows, rows_per_s=self._rows / (time.perf_counter() - self._started))
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()


Kept = Sequence[Mapping[str, object]]
"""Of each text the values of the input's columns that are written."""
Read = tuple[Window, Kept]
Done = tuple[Window, Kept, Arrays]
"""Texts, and what the model says of them."""


def _answered(answering: Answering, texts: Unlabelled, run: Run, columns: InputColumns) -> Generator[Done]:
    """All texts with their answers; one thread reads, another one runs the model."""
    stopped = threading.Event()
    read = ahead(_read(answering, texts, columns), taker=stopped, leave=texts.leave)
    return ahead(_run(answering, read, run), stopped=stopped)


def _read(answering: Answering, texts: Unlabelled, columns: InputColumns) -> Generator[Read]:
    for rows in windows(texts.rows()):
        yield answering.read([row.text for row in rows]), [columns.of(row) for row in rows]


def _run(answering: Answering, encoded: Generator[Read], run: Run) -> Generator[Done]:
    with closing(encoded):
        for window, kept in encoded:
            yield window, kept, answering.run(run, window)
