"""predict --file: any number of texts in bounded memory. Three threads: one reads, one runs the model, one writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from typing_extensions import Self

from edgeformer.data.unlabelled import Unlabelled, windows
from edgeformer.formats.errors import DataError
from edgeformer.formats.progress import SILENT, Progress, bar
from edgeformer.formats.row_files import Row, RowWriter
from edgeformer.machine.switching import switching_often
from edgeformer.stages.evaluating.ahead import ahead
from edgeformer.stages.evaluating.predict import Model
from edgeformer.tasks.answering import Answering, Window
from edgeformer.tasks.calls import Run
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.prediction import Unanswered

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


def predict_file(model: Model, given: Unlabelled, writer: RowWriter, progress: Progress = SILENT) -> Answered:
    """Answer all texts, in their order.

    Args:
        model: as :func:`~edgeformer.stages.evaluating.predict.opened` opens it.
        given: the texts.
        writer: of the answers, as JSON has them; it is not closed.
        progress: a bar with rows per second.

    Raises:
        DataError: a text cannot be read, or there is none.
    """
    started = time.perf_counter()
    rows = errors = truncated = 0
    calls = _Calls(model.run, progress)
    threads = closing(_answered(model.answering, given, calls))
    with bar(progress, "predict", given.expected, "rows"), switching_often(), threads as done, calls:
        for window, outputs in done:
            answers = model.answering.answers(window, outputs)
            writer.write([answer.as_dict() for answer in answers])
            rows += len(answers)
            errors += sum(isinstance(answer, Unanswered) for answer in answers)
            truncated += int(window.cut.sum())
            progress.advance(len(window.errors))
    if not rows:
        raise DataError(f"{given.name}: no text in it")
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


Done = tuple[Window, Arrays]
"""Texts, and what the model says of them."""


def _answered(answering: Answering, given: Unlabelled, run: Run) -> Generator[Done]:
    """All texts with their answers; one thread reads, another one runs the model."""
    stopped = threading.Event()
    read = ahead(_read(answering, given), taker=stopped, leave=given.leave)
    return ahead(_run(answering, read, run), stopped=stopped)


def _read(answering: Answering, given: Unlabelled) -> Generator[Window]:
    for texts in windows(given.texts()):
        yield answering.read(texts)


def _run(answering: Answering, encoded: Generator[Window], run: Run) -> Generator[Done]:
    with closing(encoded):
        for window in encoded:
            yield window, answering.run(run, window)
