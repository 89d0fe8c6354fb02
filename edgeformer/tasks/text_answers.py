"""Predictions for texts: texts are encoded as rows, rows go through a model, and every text gets a prediction or error.

The steps are separate methods, so that each can have its own thread: reading the next texts while a session computes
the current ones, and writing the previous predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import Int64s, collate
from edgeformer.data.encoding import Encoded, encode_texts
from edgeformer.data.rows import Text, Unreadable
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.scoring import answer_batches, cut_batches
from edgeformer.tasks.task import Answer, Run, TextReader, Unanswered

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection
    from edgeformer.tasks.task import Task

BATCH_ROWS, BATCH_TOKENS = 32, 4096
"""Limits of one call. On CPUs larger batches are no faster and need more memory."""
EMPTY = "the text is empty"
NOTHING_LEFT = "nothing is left of the text when it is cleaned"
NO_NUMBER = "the model's answer is no number (overflow)"


@dataclass(frozen=True)
class EncodedTexts:
    """Some texts and their encoded rows.

    Attributes:
        texts: n texts or pairs.
        encoded: rows of the m texts that are not empty.
        cut: whether each row was longer than the model reads, bool [m].
        places: index of each row's text, int64 [m].
        errors: index → why a text has no row.
    """

    texts: Sequence[Text]
    encoded: Encoded
    cut: NDArray[np.bool_]
    places: Int64s
    errors: dict[int, str]

    def batches(self, max_rows: int = BATCH_ROWS) -> list[Int64s]:
        """Return row numbers of each call: at most ``max_rows`` rows of similar length, longest first."""
        return cut_batches(self.encoded.lengths, max_rows, BATCH_TOKENS) if len(self.encoded) else []


def reads_pairs(task: Task, data: DataSection) -> bool | None:
    """Return whether a model reads pairs of texts, as its training data has them; None: mixed or unknown data."""
    if task.predicts == "vectors":
        return False  # its training data is pairs, but it reads each text separately
    has_pair = {getattr(source, "text_pair", None) is not None for part in data.parts.values() for source in part}
    return has_pair.pop() if len(has_pair) == 1 else None


def pairs_problem(task: Task, data: DataSection, *, pairs: bool) -> str | None:
    """Explain why a model cannot read pairs (``pairs``) or single texts; None: it can."""
    if reads_pairs(task, data) in (None, pairs):
        return None
    if not pairs:
        return f"this {task.noun} was trained on pairs of texts; give each text its second one"
    if task.predicts == "vectors":
        return f"this {task.noun} reads each text by itself; give both as texts"
    return f"this {task.noun} was trained on single texts; leave out the second ones"


class TextPredictor:
    """Predictions of one model for texts.

    Args:
        task: task of the model.
        reader: tokenizer of the model.
        data: data section of the model, for labels and the length limit.
        max_rows: rows of one call at most; None: 32.
    """

    def __init__(self, task: Task, reader: TextReader, data: DataSection, max_rows: int | None = None) -> None:
        self._task, self._reader, self._data = task, reader, data
        self._max_rows = min(BATCH_ROWS, max_rows or BATCH_ROWS)

    def pairs_problem(self, *, pairs: bool) -> str | None:
        """Explain why the model cannot read such texts, see :func:`pairs_problem`."""
        return pairs_problem(self._task, self._data, pairs=pairs)

    def read(self, texts: Sequence[Text]) -> EncodedTexts:
        """Encode texts; those without content get an error. Not thread-safe."""
        errors = {place: problem for place, text in enumerate(texts) if (problem := _text_problem(text)) is not None}
        places = np.array([place for place in range(len(texts)) if place not in errors], dtype=np.int64)
        tokenizer = self._reader.tokenizer
        readable = [texts[place] for place in places.tolist()] if errors else texts
        encoded, cut = encode_texts(tokenizer, readable, self._data.tokens_at_once)
        special_tokens = {pairs: tokenizer.num_special_tokens_to_add(pairs) for pairs in (False, True)}
        shortest = np.array([special_tokens[not isinstance(text, str)] for text in readable], dtype=np.int64)
        has_content = encoded.lengths > shortest
        if not has_content.all():
            errors.update(dict.fromkeys(places[~has_content].tolist(), NOTHING_LEFT))
            rows = [encoded.row(number) for number in np.flatnonzero(has_content).tolist()]
            encoded = Encoded(
                np.concatenate([np.empty(0, dtype=np.int32), *rows]),
                np.cumsum([0, *map(len, rows)], dtype=np.int64),
                encoded.labels[has_content],
                0,
            )
            cut, places = cut[has_content], places[has_content]
        return EncodedTexts(texts, encoded, cut, places, errors)

    def inputs(self, window: EncodedTexts, numbers: Int64s) -> dict[str, Int64s]:
        """Return graph inputs of some rows: input_ids, attention_mask int64 [B, S]."""
        return collate(window.encoded, numbers, self._reader.pad)

    def run(self, run: Run, window: EncodedTexts, batches: Sequence[Int64s] | None = None) -> dict[str, NDArray[Any]]:
        """Return all outputs [m, …] in the order of the rows; empty without rows.

        Args:
            run: ``run`` method of a session.
            window: from :meth:`read`.
            batches: row numbers of each call; None: :meth:`EncodedTexts.batches`.
        """
        batches = window.batches(self._max_rows) if batches is None else batches
        return answer_batches(run, window.encoded, self._reader.pad, batches)

    def answers(self, window: EncodedTexts, outputs: Arrays) -> list[Answer]:
        """Return the prediction or error of each text; outputs that are not finite are errors."""
        logits = outputs["logits"].reshape(len(window.places), -1) if len(window.places) else np.empty((0, 1))
        finite = np.isfinite(logits).all(axis=1)
        if not window.errors and finite.all():
            return [*self._task.predictions(window.texts, outputs, window.cut, self._data)]
        answers: list[Answer] = [
            Unanswered(text, window.errors.get(place, NO_NUMBER)) for place, text in enumerate(window.texts)
        ]
        places = window.places[finite].tolist()
        if places:
            texts = [window.texts[place] for place in places]
            finite_outputs = {name: array[finite] for name, array in outputs.items()}
            predictions = self._task.predictions(texts, finite_outputs, window.cut[finite], self._data)
            for place, prediction in zip(places, predictions, strict=True):
                answers[place] = prediction
        return answers


def _text_problem(text: Text) -> str | None:
    """Return why a text or pair cannot be encoded."""
    if not isinstance(text, str):
        return _text_problem(text[0]) or _text_problem(text[1])
    if isinstance(text, Unreadable):
        return text.problem
    return EMPTY if not text or text.isspace() else None
