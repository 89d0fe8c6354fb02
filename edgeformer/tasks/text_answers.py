"""Answering: texts as people give them become rows of tokens, rows go through a model, and every text has its answer.

The three steps stand apart, so that each can have a thread of its own: reading the next texts while a session answers
these, and writing what it answered before.
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
"""Of one call: on processors more rows are no faster, and need more memory."""
EMPTY = "the text is empty"
NOTHING_LEFT = "nothing is left of the text when it is cleaned"
NO_NUMBER = "the model's answer is no number (overflow)"


@dataclass(frozen=True)
class Window:
    """Some texts, read.

    Attributes:
        texts: as they were given.
        encoded: the rows of those that are not empty, m of n.
        cut: which of these rows were longer than the model reads, bool [m].
        places: of these rows among the texts, int64 [m].
        errors: place → why a text has no row.
    """

    texts: Sequence[Text]
    encoded: Encoded
    cut: NDArray[np.bool_]
    places: Int64s
    errors: dict[int, str]

    def batches(self, most: int = BATCH_ROWS) -> list[Int64s]:
        """Row numbers of each call, ``most`` at most: rows of similar length, the longest first."""
        return cut_batches(self.encoded.lengths, most, BATCH_TOKENS) if len(self.encoded) else []


def reads_pairs(task: Task, data: DataSection) -> bool | None:
    """Whether a model reads two texts at a time: where its own data are pairs. None: both, or nothing is known of them.

    Args:
        task: the model's.
        data: the model's.
    """
    if task.predicts == "vectors":
        return False  # it is trained with pairs, and reads each of their texts by itself
    found = {getattr(source, "text_pair", None) is not None for sources in data.parts.values() for source in sources}
    return found.pop() if len(found) == 1 else None


def pairs_problem(task: Task, data: DataSection, *, pairs: bool) -> str | None:
    """Why a model does not answer such texts: ``pairs``, or else single ones. None: it does.

    Arguments are those of :func:`reads_pairs`.
    """
    if reads_pairs(task, data) in (None, pairs):
        return None
    if not pairs:
        return f"this {task.noun} was trained on pairs of texts; give each text its second one"
    if task.predicts == "vectors":
        return f"this {task.noun} reads each text by itself; give both as texts"
    return f"this {task.noun} was trained on single texts; leave out the second ones"


class Answering:
    """How one model answers texts.

    Args:
        task: the model's.
        reader: how it reads.
        data: the model's, for labels and the longest text.
        most_rows: of one call; None: as many as are worth while.
    """

    def __init__(self, task: Task, reader: TextReader, data: DataSection, most_rows: int | None = None) -> None:
        self._task, self._reader, self._data = task, reader, data
        self._most_rows = min(BATCH_ROWS, most_rows or BATCH_ROWS)

    def pairs_problem(self, *, pairs: bool) -> str | None:
        """See :func:`pairs_problem`."""
        return pairs_problem(self._task, self._data, pairs=pairs)

    def read(self, texts: Sequence[Text]) -> Window:
        """Texts as tokens. One with nothing to read in it has an error instead. For one thread at a time."""
        errors = {place: problem for place, text in enumerate(texts) if (problem := _problem(text)) is not None}
        places = np.array([place for place in range(len(texts)) if place not in errors], dtype=np.int64)
        tokenizer = self._reader.tokenizer
        given = [texts[place] for place in places.tolist()] if errors else texts
        encoded, cut = encode_texts(tokenizer, given, self._data.tokens_at_once)
        special = {pairs: tokenizer.num_special_tokens_to_add(pairs) for pairs in (False, True)}
        least = np.array([special[not isinstance(text, str)] for text in given], dtype=np.int64)
        bare = np.flatnonzero(encoded.lengths <= least)
        if len(bare):
            left = np.setdiff1d(np.arange(len(given)), bare)
            errors.update(dict.fromkeys(places[bare].tolist(), NOTHING_LEFT))
            encoded, cut, places = _only(encoded, left), cut[left], places[left]
        return Window(texts, encoded, cut, places, errors)

    def inputs(self, window: Window, numbers: Int64s) -> dict[str, Int64s]:
        """What the graph takes of some rows: input_ids, attention_mask int64 [B, S]."""
        return collate(window.encoded, numbers, self._reader.pad)

    def run(self, run: Run, window: Window, batches: Sequence[Int64s] | None = None) -> dict[str, NDArray[Any]]:
        """All outputs [m, …] of a session's ``run``, in the order of the rows; empty without rows.

        Args:
            run: a session's.
            window: the rows.
            batches: row numbers of each call, every row once; None: as :meth:`Window.batches` has them.
        """
        chosen = window.batches(self._most_rows) if batches is None else batches
        return answer_batches(run, window.encoded, self._reader.pad, chosen)

    def answers(self, window: Window, outputs: Arrays) -> list[Answer]:
        """What each text gets, in their order: an answer with a number in it that is none says nothing."""
        logits = outputs["logits"].reshape(len(window.places), -1) if len(window.places) else np.empty((0, 1))
        finite = np.isfinite(logits).all(axis=1)
        if not window.errors and finite.all():
            return [*self._task.predictions(window.texts, outputs, window.cut, self._data)]
        answers: list[Any] = [Unanswered(text, NO_NUMBER) for text in window.texts]
        for place, error in window.errors.items():
            answers[place] = Unanswered(window.texts[place], error)
        places = window.places[finite].tolist()
        if places:
            given = [window.texts[place] for place in places]
            whole = {name: array[finite] for name, array in outputs.items()}
            found = self._task.predictions(given, whole, window.cut[finite], self._data)
            for place, prediction in zip(places, found, strict=True):
                answers[place] = prediction
        return answers


def _problem(text: Text) -> str | None:
    """Why a text has no answer, before it is read."""
    if not isinstance(text, str):
        return _problem(text[0]) or _problem(text[1])
    if isinstance(text, Unreadable):
        return text.problem
    return EMPTY if not text or text.isspace() else None


def _only(encoded: Encoded, numbers: Int64s) -> Encoded:
    """Some of the rows."""
    rows = [encoded.row(number) for number in numbers.tolist()]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    ids = np.concatenate([np.empty(0, dtype=np.int32), *rows])
    return Encoded(ids, offsets, encoded.labels[numbers], 0)
