"""Labelled spans of characters and classes of tokens: encoding of texts in windows, and decoding of answers.

Offsets count the code points of the original text; the tokenizer tracks them through its normalizer.
"""

import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from edgeformer.artifacts.data_config import SpanData, Tag, parse_tag
from edgeformer.data.batching import IGNORED
from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import Int64s, LabelledTexts, Span, SpanText, Text, tag_runs
from edgeformer.data.tokenization import UNLIMITED, cutting

_CHUNK = 1024
_OVERLAP = 4  # windows share one token in this many with the next one
_INSTEAD = {"B": "BI", "I": "IB", "E": "EI", "S": "SBI"}
"""Position → those that a model may have for it, in order of preference: few have E and S, some have no B."""


@dataclass(frozen=True)
class TokenRows(Encoded):
    """Windows of texts with the class of each token; ``labels`` are the numbers of the windows in their texts."""

    targets: NDArray[np.integer] = field(kw_only=True)  # int64 [tokens], IGNORED where no answer counts
    inexact: int = field(default=0, kw_only=True)  # spans that no tokens (words) spell, so that none predicts them


@dataclass(frozen=True)
class Windows:
    """Texts as windows, rows of at most ``max_length`` tokens; the windows of a text follow each other.

    Of tokens that two windows have, the answer of one counts: the one that reads more on both sides of them. So the
    counted tokens of all windows of a text are its tokens, each once.
    """

    rows: Encoded  # the windows; ``labels`` are their numbers in their texts
    texts: Int64s  # [rows], the index of each row's text
    starts: Int64s  # [tokens], first character of each counted token (word), without white space
    ends: Int64s  # [tokens], the character behind it
    counted: NDArray[np.bool_]  # [tokens], False for special tokens, white space, and answers that do not count

    def tokens(self, text: int) -> Int64s:
        """Return the places of the counted tokens of a text, [n]."""
        first, last = np.searchsorted(self.texts, (text, text + 1))
        begin, end = int(self.rows.offsets[first]), int(self.rows.offsets[last])
        return np.asarray(begin + np.flatnonzero(self.counted[begin:end]))


def encode_windows(
    tokenizer: Tokenizer, texts: Sequence[Text], data: SpanData, advance: Callable[[int], None] = lambda rows: None
) -> Windows:
    """Encode texts as windows."""
    columns: list[list[NDArray[np.int64]]] = [[np.empty(0, dtype=np.int64)] for _ in range(4)]
    lengths, numbers, indices = list[int](), list[int](), list[int]()
    for first in range(0, len(texts), _CHUNK):
        with cutting(tokenizer, UNLIMITED):
            encodings = tokenizer.encode_batch(list(texts[first : first + _CHUNK]))
        for index, encoding in enumerate(encodings, start=first):
            special = np.array(encoding.special_tokens_mask, dtype=bool)
            content = np.flatnonzero(~special)
            # Special tokens in front of and behind the text are in each of its windows.
            prefix, content_end = (int(content[0]), int(content[-1]) + 1) if len(content) else (len(special),) * 2
            ids = np.array(encoding.ids, dtype=np.int64)
            starts, ends, is_first = _characters(encoding, str(texts[index]), first_pieces=data.pieces == "first")
            is_real = ~special & (starts < ends)
            count, capacity = content_end - prefix, max(1, data.max_length - len(ids) + content_end - prefix)
            overlap = capacity // _OVERLAP
            begins = range(0, max(1, count - overlap), capacity - overlap)
            counted_from = 0
            for number, begin in enumerate(begins):
                end = min(begin + capacity, count)
                counted_to = count
                if number + 1 < len(begins):  # in the middle of the overlap, and not inside a word
                    middle = begins[number + 1] + overlap // 2
                    words = np.flatnonzero(is_first[prefix + middle : prefix + end])
                    counted_to = middle + int(words[0]) if len(words) else middle
                row = np.r_[0:prefix, prefix + begin : prefix + end, content_end : len(ids)]
                counts = is_real[row] & (row >= prefix + counted_from) & (row < prefix + counted_to)
                for column, values in zip(columns, (ids[row], starts[row], ends[row], counts), strict=True):
                    column.append(values)
                lengths.append(len(row))
                numbers.append(number)
                indices.append(index)
                counted_from = counted_to
        advance(len(encodings))
    ids, starts, ends, counted = map(np.concatenate, columns)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    rows = Encoded(ids.astype(np.int32), offsets, np.array(numbers, dtype=np.int64), 0)
    return Windows(rows, np.array(indices, dtype=np.int64), starts, ends, counted.astype(bool))


def _characters(encoding: Encoding, text: str, *, first_pieces: bool) -> tuple[Int64s, Int64s, NDArray[np.bool_]]:
    """Return first and last character of every token, and whether it begins a word, [n] each.

    Words end at white space, and punctuation marks are words; some tokenizers split at spaces only. With
    ``first_pieces`` the first token of a word has the characters of the word, and the others have none.
    """
    words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
    is_first = np.diff(words, prepend=-2) != 0
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T.copy()
    last_end = 0
    for token, (start, end) in enumerate(encoding.offsets):
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
        starts[token], ends[token] = start, end
        if start < end:
            if last_end == start > 0:
                is_first[token] |= any(
                    character in string.punctuation or unicodedata.category(character).startswith("P")
                    for character in text[start - 1 : start + 1]
                )  # punctuation as BERT's tokenizer understands it
            is_first[token] |= text[last_end:start].isspace()
            last_end = end
    if first_pieces:
        heads = np.flatnonzero(is_first)
        ends[heads] = np.maximum.reduceat(ends, heads)
        ends[~is_first] = starts[~is_first]
    return starts, ends, is_first


def encode_spans(
    tokenizer: Tokenizer, texts: LabelledTexts, data: SpanData, advance: Callable[[int], None] = lambda rows: None
) -> TokenRows:
    """Encode texts as windows, with the classes that their spans give to tokens."""
    windows = encode_windows(tokenizer, texts.texts, data, advance)
    tags = [*map(parse_tag, data.classes)]
    targets = np.full(len(windows.counted), IGNORED, dtype=np.int64)
    inexact = 0
    for index, text in enumerate(texts.texts):
        spans = text.spans if isinstance(text, SpanText) else ()
        places = windows.tokens(index)
        # The first span that ends behind the token's first character, if it begins in front of its last one.
        starts, ends = (np.array([span[side] for span in spans], dtype=np.int64) for side in (0, 1))
        numbers = np.searchsorted(ends, windows.starts[places], side="right")
        is_inside = np.append(starts, np.iinfo(np.int64).max)[numbers] < windows.ends[places]
        numbers = np.where(is_inside, numbers, -1)
        begins, finishes = np.diff(numbers, prepend=-2) != 0, np.diff(numbers, append=-2) != 0
        for place, number, is_begin, is_end in zip(places, numbers.tolist(), begins, finishes, strict=True):
            position = {(True, True): "S", (True, False): "B", (False, True): "E"}.get((is_begin, is_end), "I")
            tag = "O", ""
            if number >= 0:
                label = spans[number].label
                tag = next((instead, label) for instead in _INSTEAD[position] if (instead, label) in tags)
            targets[place] = tags.index(tag)
        if spans:
            decoded = decode(windows, index, str(text), [tags[target] for target in targets[places]])
            inexact += len({*spans} - {span for span, _ in decoded})
    rows = windows.rows
    return TokenRows(rows.ids, rows.offsets, rows.labels, 0, texts.empty, targets=targets, inexact=inexact)


def decode(windows: Windows, index: int, text: str, tags: Sequence[Tag]) -> list[tuple[Span, Int64s]]:
    """Return the spans of a text by the tags [n] of its counted tokens, and the places of each span's tokens.

    Accents and other marks behind the last character belong to it, also if the tokenizer removes them.
    """
    places = windows.tokens(index)
    spans = []
    for label, begin, end in tag_runs(tags):
        tokens = places[begin:end]
        last = int(windows.ends[tokens].max())
        while last < len(text) and unicodedata.category(text[last]).startswith("M"):
            last += 1
        spans.append((Span(int(windows.starts[tokens].min()), last, label), tokens))
    return spans
