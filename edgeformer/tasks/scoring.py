"""Inference over rows: outputs of labelled rows, scores, and predictions for texts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import DataError, InputError, MissingDependencyError
from edgeformer.artifacts.manifest import ArtifactManifest, TextCalls
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.data.batching import collate, cut_batches
from edgeformer.data.encoding import Encoded, encode_prompted
from edgeformer.data.rows import Text, Unreadable, text_parts
from edgeformer.tasks.arrays import Arrays, Bools, Int64s
from edgeformer.tasks.metric import Meter
from edgeformer.tasks.task import Answer, Origin, Run, Task, TextReader, Unanswered

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection
    from edgeformer.tasks.texts import TextTask

BATCH_ROWS, BATCH_TOKENS = 32, 4096
"""Limits of one call for texts. On CPUs larger batches are no faster and need more memory."""

EMPTY = "the text is empty"
NOTHING_LEFT = "cleaning removes the whole text"
NO_NUMBER = "the model's answer is not a number (overflow)"

Validation = Callable[[Run, int], Score]
"""Scores a session's ``run`` method, and the loop of its exit, on the validation split."""


def answer_rows(
    run: Run, encoded: Encoded, pad: int, batches: Iterable[Int64s] | int, failures: dict[int, InputError] | None = None
) -> dict[str, NDArray[Any]]:
    """Return all outputs of a model in the order of the rows: [n, …], or of every token [tokens, …].

    ``failures`` receives row → error where the model fails, and these rows have NaN; None: raise the error. The rows of
    a call that fails are run one by one.
    """
    if isinstance(batches, int):
        batches = cut_batches(encoded.lengths, batches)
    answers: dict[str, NDArray[Any]] = {}
    pending = deque(batches)
    while pending:
        numbers = pending.popleft()
        inputs = collate(encoded, numbers, pad)
        try:
            outputs = run(inputs)
        except InputError as error:
            if failures is None:
                raise
            if len(numbers) == 1:
                failures[int(numbers[0])] = error
            else:
                pending.extendleft(reversed(np.split(numbers, len(numbers))))
            continue
        for name, output in outputs.items():
            if output.ndim < 3:
                places, values, count = numbers, output, len(encoded)
            else:  # [B, S, …]
                is_real = inputs["attention_mask"].astype(bool)
                places = (encoded.offsets[numbers][:, None] + np.arange(is_real.shape[1]))[is_real]
                values, count = output[is_real], len(encoded.ids)
            if name not in answers:
                missing = np.nan if np.issubdtype(values.dtype, np.floating) else 0
                answers[name] = np.full((count, *values.shape[1:]), missing, dtype=values.dtype)
            answers[name][places] = values
    return answers


def score_batches(
    run: Run, batches: Iterable[Arrays], meter: Meter, *, warm_up: bool, advance: Callable[[int], None]
) -> float:
    """Add a model's answers to batches from :meth:`RowSource.batch` to ``meter``. Return seconds in the model alone.

    ``warm_up``: run the first batch once more, untimed and not counted. ``advance`` gets numbers of finished rows.
    """
    seconds = 0.0
    for inputs in batches:
        if warm_up:
            run(inputs)
            warm_up = False
        started = time.perf_counter()
        outputs = run(inputs)
        seconds += time.perf_counter() - started
        meter.add(outputs, inputs)
        advance(len(inputs["input_ids"]))
    return seconds


def open_validation(
    task: Task, data: Any, reader: TextReader, origin: Origin, progress: Progress, split: str = "validation"
) -> tuple[Validation | None, str | None]:
    """Read the validation (or another) split and return a function that scores an artifact on it, or why it cannot."""
    try:
        rows = task.rows.read_set(data, reader, split, origin)
    except (DataError, InputError, MissingDependencyError) as error:
        return None, f"the validation split cannot be read: {error}"
    count = task.rows.judged_rows(rows)
    batches = task.rows.call_batches(rows, 32, reader.vocabulary, first=count)

    def validate(run: Run, loop: int) -> Score:
        meter = task.meter((loop,), data=data)
        with bar(progress, "Scoring on the validation split", count, "rows"):
            arrays = (task.rows.batch(rows, numbers, reader.pad) for numbers in batches)
            score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
        return meter.score()

    return validate, None


def max_batch_rows(artifact: ArtifactManifest) -> int | None:
    """Return the largest batch of an artifact; None: any number of rows."""
    shapes = artifact.engine.shapes.values() if artifact.engine is not None else ()
    return min((shape[-1][0] for shape in shapes if len(shape[-1]) > 1), default=None)  # inputs [B, …] only


def split_calls(run: Run, max_rows: int | None) -> Run:
    """Return a ``run`` for any number of rows that calls ``run`` with at most ``max_rows`` rows (None: any number)."""
    if max_rows is None:
        return run

    def run_in_pieces(inputs: Arrays) -> Arrays:
        count = max(len(array) for array in inputs.values())
        pieces = [
            run({name: array[start : start + max_rows] for name, array in inputs.items()})
            for start in range(0, count, max_rows)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    return run_in_pieces


def fit_calls(run: Run, calls: TextCalls) -> Run:
    """Return a ``run`` for texts [B, S] that calls ``run`` with the rows and tokens that a foreign graph takes."""

    def run_fitted(inputs: Arrays) -> Arrays:
        shape = inputs["input_ids"].shape
        texts = {name: array for name, array in inputs.items() if array.shape == shape}  # without labels
        length = shape[1]
        if calls.rows == 1 and "attention_mask" in texts:  # without the padding that other rows needed
            length = max(1, int(texts["attention_mask"].sum()))
        padding = ((0, (calls.rows or shape[0]) - shape[0]), (0, max(0, (calls.tokens or 0) - length)))
        for name, array in texts.items():
            pad = calls.pad_id if name == "input_ids" else 0
            texts[name] = np.pad(array[:, :length], padding, constant_values=pad)
        return {"logits": run(texts)[calls.output][: shape[0]]}

    return split_calls(run_fitted, calls.rows)


@dataclass(frozen=True)
class EncodedTexts:
    """Texts, and the rows of the m texts that are not empty."""

    texts: Sequence[Text]
    encoded: Encoded
    cut: Bools  # whether each row was truncated, [m]
    places: Int64s  # index of each row's text, [m]
    errors: dict[int, str]  # index → reason why a text has no row


def unreadable_texts(texts: Sequence[Text]) -> dict[int, str]:
    """Return index → reason of the texts that are empty or no text."""
    errors: dict[int, str] = {}
    for place, text in enumerate(texts):
        for part in text_parts(text):
            if isinstance(part, Unreadable):
                errors.setdefault(place, part.problem)
            elif not part or part.isspace():
                errors.setdefault(place, EMPTY)
    return errors


@dataclass(frozen=True)
class TextPredictor:
    """Predictions of one model for texts, in three steps that can run in threads."""

    task: TextTask
    reader: TextReader
    data: DataSection
    max_rows: int | None = None  # of a call
    prompt: str | None = None  # in front of every text that has no prompt; None: the default of ``data``
    answered: list[Arrays] = field(default_factory=list, repr=False)
    """Inputs of a row that the model has answered, which tell its failure from that of a text."""

    def read(self, texts: Sequence[Text]) -> EncodedTexts:
        """Encode texts; those without content get an error. Not thread-safe."""
        errors = unreadable_texts(texts)
        places = np.array([place for place in range(len(texts)) if place not in errors], dtype=np.int64)
        tokenizer = self.reader.tokenizer
        readable = [texts[place] for place in places.tolist()] if errors else texts
        encoded, cut = encode_prompted(tokenizer, readable, self.data, self.prompt)
        special_tokens = {pairs: tokenizer.num_special_tokens_to_add(pairs) for pairs in (False, True)}
        shortest = np.array([special_tokens[not isinstance(text, str)] for text in readable], dtype=np.int64)
        has_content = encoded.lengths > shortest
        if not has_content.all():
            errors.update(dict.fromkeys(places[~has_content].tolist(), NOTHING_LEFT))
            encoded, cut, places = encoded.select(has_content), cut[has_content], places[has_content]
        return EncodedTexts(texts, encoded, cut, places, errors)

    def run(self, run: Run, window: EncodedTexts, batches: Sequence[Int64s] | None = None) -> dict[str, NDArray[Any]]:
        """Return all outputs [m, …] in the order of the rows; ``batches``: row numbers of each call.

        A text on which the model fails gets an error, and the others their answers. Raises InputError if the model
        fails on every text.
        """
        rows, failures = window.encoded, dict[int, InputError]()
        if batches is None:  # rows of similar length, longest first
            max_rows = min(BATCH_ROWS, self.max_rows or BATCH_ROWS)
            batches = cut_batches(rows.lengths, max_rows, BATCH_TOKENS) if len(rows) else []
        outputs = answer_rows(run, rows, self.reader.pad, batches, failures)
        if failures and len(failures) == len(rows):
            if not self.answered:
                raise next(iter(failures.values()))
            run(self.answered[0])
            outputs["logits"] = np.full((len(rows), 1), np.nan)
        elif len(rows) and not self.answered:
            number = next(number for number in range(len(rows)) if number not in failures)
            self.answered.append(collate(rows, np.array([number]), self.reader.pad))
        window.errors.update({int(window.places[number]): str(error) for number, error in failures.items()})
        return outputs

    def example_outputs(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Return outputs of the same shapes whose answer has a value in every column."""
        return {name: np.zeros_like(array) for name, array in outputs.items()}

    def answers(self, window: EncodedTexts, outputs: Arrays) -> list[Answer]:
        """Return the prediction or error of each text; outputs that are not finite are errors."""
        logits = outputs["logits"].reshape(len(window.places), -1) if len(window.places) else np.empty((0, 1))
        finite = np.isfinite(logits).all(axis=1)
        if not window.errors and finite.all():
            return [*self.task.predictions(window.texts, outputs, window.cut, self.data)]
        answers: list[Answer] = [
            Unanswered(text, window.errors.get(place, NO_NUMBER)) for place, text in enumerate(window.texts)
        ]
        places = window.places[finite].tolist()
        if places:
            texts = [window.texts[place] for place in places]
            finite_outputs = {name: array[finite] for name, array in outputs.items()}
            predictions = self.task.predictions(texts, finite_outputs, window.cut[finite], self.data)
            for place, prediction in zip(places, predictions, strict=True):
                answers[place] = prediction
        return answers
