"""Tokenized texts: encoded sets, and encoding of language-model text without special tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from typing_extensions import Self, TypeVar

from edgeformer.artifacts.data_config import DataConfig, DataSection, SpanData
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.data.rows import LabelledTexts, Prompted, Text, query_numbers
from edgeformer.data.tokenization import UNLIMITED, TextBounds, cutting

if TYPE_CHECKING:
    from edgeformer.data.storage import StoredRows

_CHUNK = 2048
_FEW_TEXTS = 128
"""Up to so many texts, each is read for token types; for more, one probe takes less time."""


@dataclass(frozen=True)
class Rows:
    """Encoded rows of one set in memory: row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per row, int64 [n]."""
        return np.diff(self.offsets)

    def sizes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the rows ``numbers``, int64 [n]."""
        return np.diff(self.offsets)[numbers]

    def loaded(self, numbers: NDArray[np.int64]) -> tuple[Self, NDArray[np.int64]]:
        """Return these rows and ``numbers``: all rows are in memory."""
        return self, numbers


@dataclass(frozen=True)
class Encoded(Rows):
    """Encoded texts with special tokens and their classes ``labels``, int64 [n]."""

    labels: NDArray[np.int64]
    truncated: int  # rows that were truncated
    empty: int = 0  # rows of a file without a text, which are left out
    types: NDArray[np.int8] | None = None  # token types (segments) as the tokenizer states them; None: all are 0
    unpooled: NDArray[np.int64] | None = None  # [n], tokens at the beginning of each row that are read and not pooled

    def row(self, index: int) -> NDArray[np.int32]:
        """Return the token numbers of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def select(self, is_selected: NDArray[np.bool_]) -> Encoded:
        """Return some rows, none of them truncated; ``is_selected``: bool [n]."""
        tokens, offsets = np.repeat(is_selected, self.lengths), np.cumsum([0, *self.lengths[is_selected]])
        types = None if self.types is None else self.types[tokens]
        unpooled = None if self.unpooled is None else self.unpooled[is_selected]
        return Encoded(self.ids[tokens], offsets, self.labels[is_selected], 0, types=types, unpooled=unpooled)


RowsT = TypeVar("RowsT", bound=Rows, covariant=True, default=Rows)


@dataclass(frozen=True)
class Prepared(Generic[RowsT]):
    """Encoded data of a recipe; the training set in memory or on disk."""

    tokenizer: Tokenizer
    pad: int
    train: RowsT | StoredRows[RowsT]
    validation: RowsT
    tests: Mapping[str, RowsT]
    summary: DataSummary
    train_texts: Callable[[], Iterator[Text]] | None = None  # in the order of the rows; None: a row is not one text
    teacher_logits: NDArray[np.float32] | None = None  # [training rows, C] of ``training.teacher``; training adds them
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # keys of the file that an imported model brings


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], max_length: int, advance: Callable[[int], None] = lambda rows: None
) -> tuple[Encoded, NDArray[np.bool_]]:
    """Encode texts without labels, and return which of them were truncated to ``max_length`` tokens, bool [n].

    A truncated text keeps its special tokens; of a pair the longer text is truncated. ``advance`` is called with the
    number of rows encoded since the last call.
    """
    pieces, types = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int8)]
    lengths: list[int] = []
    truncated: list[bool] = []
    are_few = len(texts) <= _FEW_TEXTS
    has_types = not are_few and states_types(tokenizer, any(not isinstance(text, str) for text in texts))
    with cutting(tokenizer, max_length):
        for start in range(0, len(texts), _CHUNK):
            encodings = tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))
            rows = [encoding.ids for encoding in encodings]
            lengths.extend(map(len, rows))
            pieces.append(np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32))
            has_types = has_types or (are_few and any(any(encoding.type_ids) for encoding in encodings))
            if has_types:
                stated = itertools.chain.from_iterable(encoding.type_ids for encoding in encodings)
                types.append(np.fromiter(stated, dtype=np.int8))
            truncated.extend(bool(encoding.overflowing) for encoding in encodings)
            advance(len(encodings))
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    labels = np.zeros(len(texts), dtype=np.int64)
    joined = np.concatenate(types) if has_types else None
    encoded = Encoded(np.concatenate(pieces), offsets, labels, sum(truncated), types=joined)
    return encoded, np.array(truncated, dtype=bool)


def states_types(tokenizer: Tokenizer, pairs: bool) -> bool:
    """Return whether a tokenizer states a token type other than 0 for single texts, or with ``pairs`` for pairs."""
    probes = [tokenizer.encode("a"), *([tokenizer.encode("a", "a")] if pairs else [])]
    return any(any(probe.type_ids) for probe in probes)


def encode_prompted(
    tokenizer: Tokenizer, texts: Sequence[Text], data: DataSection, prompt: str | None = None
) -> tuple[Encoded, NDArray[np.bool_]]:
    """Encode texts, with a prompt (None: that of ``data``) in front of each that is not yet :class:`Prompted`."""
    if prompt is None:
        prompt = getattr(data, "prompts", {}).get("default", "")
    prompted: list[Any] = [*texts]
    if prompt:
        prompted = [text if isinstance(text, Prompted) else Prompted(prompt, str(text)) for text in texts]
    encoded, cut = encode_texts(tokenizer, prompted, data.tokens_at_once)
    if getattr(data, "pools_prompt", True):
        return encoded, cut
    # As sentence-transformers counts: the tokens of the prompt alone, without a special token at its end.
    prompts, lengths = [getattr(text, "prompt", "") for text in prompted], {"": 0}
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for each in {*prompts} - {""}:
        ids = encode_texts(tokenizer, [each], data.tokens_at_once)[0].ids.tolist()
        lengths[each] = len(ids) - (ids[-1] in special)
    return replace(encoded, unpooled=np.array([lengths[each] for each in prompts], dtype=np.int64)), cut


def encode(texts: LabelledTexts, tokenizer: Tokenizer, max_length: int, progress: Progress = SILENT) -> Encoded:
    """Encode a set, each text truncated to ``max_length`` tokens."""
    encoded, _ = encode_texts(tokenizer, texts.texts, max_length, progress.advance)
    return replace(encoded, labels=texts.labels, empty=texts.empty)


def decode_labels(rows: Encoded, data: DataSection, texts: Sequence[Text] = ()) -> Encoded:
    """Return the rows with labels as scores need them: [n, C] of 0 and 1 if a row can have several of C labels.

    Files and caches store one number per row. Scores of documents become [n, 2] with the number of each row's query, if
    the ``texts`` of the rows are given.
    """
    if not isinstance(data, DataConfig) or isinstance(data, SpanData):
        return rows
    if not data.labels and (queries := query_numbers(texts)) is not None:
        return replace(rows, labels=np.stack([rows.labels, queries], axis=1))
    if data.separator is None:
        return rows
    return replace(rows, labels=rows.labels[:, None] >> np.arange(len(data.labels)) & 1)


class PlainText:
    """Encodes text without truncation and special tokens around it. ``bounds``: None: of a model trained here."""

    def __init__(self, tokenizer: Tokenizer, bounds: TextBounds | None = None) -> None:
        self.bounds = bounds or TextBounds.of(tokenizer, {})
        self.tokenizer, self.boundary = tokenizer, self.bounds.boundary
        document = json.loads(tokenizer.to_str())
        bare = json.dumps({**document, "post_processor": None, "truncation": None, "padding": None})
        self._tokenizer: Tokenizer = Tokenizer.from_str(bare)

    def encode(self, text: str, *, is_chat: bool = False) -> Encoding:
        """Encode one text, with the position of every token in it.

        A ``<|endoftext|>`` inside the text is spelled out: only the end of a paragraph is the boundary token. Imported
        models read it as the token, as their own tokenizer does, and so does a rendered chat template (``is_chat``).
        """
        encoding = self._tokenizer.encode(text)
        if is_chat or self.bounds.reads_names or self.boundary not in encoding.ids:
            return encoding
        self._tokenizer.encode_special_tokens = True
        try:
            return self._tokenizer.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, with those in front of it; at least one."""
        return [*self.bounds.begin, *self.encode(text).ids] or [self.boundary]

    def encode_all(self, texts: Sequence[str], progress: Progress = SILENT) -> Encoded:
        """Encode texts as :func:`encode` does, with label 0."""
        encoded, _ = encode_texts(self._tokenizer, texts, UNLIMITED, progress.advance)
        places = np.flatnonzero(encoded.ids == self.boundary)
        if self.bounds.reads_names or not len(places):
            return encoded
        rows = [encoded.row(index) for index in range(len(encoded))]
        for index in set((np.searchsorted(encoded.offsets, places, side="right") - 1).tolist()):
            rows[index] = np.array(self.encode(texts[index]).ids, dtype=np.int32)
        return Encoded(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64), encoded.labels, 0)


def require_unicode(name: str, text: str) -> None:
    """Raise InputError for half a surrogate pair, which a terminal can pass on and no tokenizer accepts."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{name} is not valid Unicode: {text.encode('utf-8', 'replace').decode()[:60]!r}")
