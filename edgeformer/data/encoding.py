"""Text as token numbers: a labelled set flat, with the row boundaries beside it, and found again on disk by what went
into it; a language model's text without special tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from typing_extensions import Self, TypeVar

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.tokenization import boundary_id, fingerprint
from edgeformer.system.lock import LockedError, claiming

FORMAT_VERSION = 2
"""Of what is cached. 2: cleaning collapses marks beyond ASCII; word counts are kept."""

_CHUNK = 2048
_NEVER_CUT = 2**40
_UNREADABLE = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Encoded:
    """Row ``i`` is ``ids[offsets[i]:offsets[i + 1]]`` (special tokens included), its class ``labels[i]``.

    ``truncated``: rows that were cut. ``empty``: rows of a file without a text, which are left out.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    truncated: int
    empty: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per row, int64 [n]."""
        return np.diff(self.offsets)

    def sizes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the rows ``numbers``, int64 [n]."""
        return self.lengths[numbers]

    def loaded(self, numbers: NDArray[np.int64]) -> tuple[Self, NDArray[np.int64]]:
        """As of :class:`TrainingRows`: all rows are in memory."""
        return self, numbers

    def row(self, index: int) -> NDArray[np.int32]:
        """Token numbers of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Rows(Protocol):
    """Encoded rows of one set."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every row."""


RowsT = TypeVar("RowsT", bound=Rows, covariant=True, default=Rows)


class TrainingRows(Protocol[RowsT]):
    """Encoded rows of the training set, wherever they are."""

    def __len__(self) -> int: ...

    @property
    def truncated(self) -> int:
        """Texts that were cut."""

    def sizes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the rows ``numbers``, by which batches are sorted."""

    def loaded(self, numbers: NDArray[np.int64]) -> tuple[RowsT, NDArray[np.int64]]:
        """Rows in memory among which those of ``numbers`` are, and their numbers there."""


@dataclass(frozen=True)
class Prepared(Generic[RowsT]):
    """Everything that training needs to know of the data; the texts themselves are gone.

    Attributes:
        pad: the token that fills up rows.
    """

    tokenizer: Tokenizer
    pad: int
    train: TrainingRows[RowsT]
    validation: RowsT
    tests: Mapping[str, RowsT]
    summary: DataSummary


def counted(ids: NDArray[np.integer]) -> Counter[int]:
    """Token → how often it is among ``ids``."""
    tokens, counts = np.unique(ids, return_counts=True)
    return Counter(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], max_length: int, advance: Callable[[int], None] = lambda rows: None
) -> tuple[Encoded, NDArray[np.bool_]]:
    """Encode texts that nobody labelled, and say which of them were cut to ``max_length`` tokens, bool [n].

    The final special token of a text that was cut is kept.

    Args:
        tokenizer: cuts its texts here and nowhere else; it joins the two texts of a pair as its own template says.
        texts: or pairs of texts, of which the longer one is cut.
        max_length: tokens, special ones included.
        advance: called with the number of rows done since the last call.
    """
    pieces: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    cut: list[bool] = []
    tokenizer.enable_truncation(max_length)  # a setting that would be saved with the tokenizer
    try:
        for start in range(0, len(texts), _CHUNK):
            encodings = tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))
            rows = [encoding.ids for encoding in encodings]
            lengths.extend(map(len, rows))
            pieces.append(np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32))
            cut.extend(bool(encoding.overflowing) for encoding in encodings)
            advance(len(encodings))
    finally:
        tokenizer.no_truncation()
    ids = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    labels = np.zeros(len(texts), dtype=np.int64)
    return Encoded(ids, _offsets(lengths), labels, sum(cut)), np.array(cut, dtype=bool)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def cache_key(texts: LabelledTexts, tokenizer_fingerprint: str, max_length: int) -> str:
    """sha256 over everything that decides the encoded set."""
    content = f"{FORMAT_VERSION} {texts.fingerprint()} {tokenizer_fingerprint} {max_length}"
    return hashlib.sha256(content.encode()).hexdigest()


def encode(
    texts: LabelledTexts,
    tokenizer: Tokenizer,
    max_length: int,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Encoded:
    """Encode a set, each text cut to ``max_length`` tokens, or take it from ``cache`` (None: no cache).

    A damaged cache file is made again, with a message.
    """
    if cache is None:
        encoded, _ = encode_texts(tokenizer, texts.texts, max_length, progress.advance)
        return replace(encoded, labels=texts.labels)
    key = cache_key(texts, fingerprint(tokenizer), max_length)
    path = cache / f"tokens-{key[:24]}.npz"
    if path.exists():
        try:
            encoded = _read(path, key, texts)
        except _UNREADABLE as error:
            progress.message(f"{path}: damaged token cache ({error}); made again")
        else:
            progress.advance(len(texts))
            return encoded
    encoded = encode(texts, tokenizer, max_length, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with claiming(path):
            for left in path.parent.glob(f".{path.name}.*.tmp*"):  # of processes that were killed while they wrote it
                left.unlink()
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, key=key, **vars(encoded))
    except LockedError:  # another process writes the same
        pass
    except (OSError, ArtifactError) as error:
        # A cache that cannot be written (full or read-only disk) costs time, not the run.
        progress.message(f"{path}: token cache not written: {getattr(error, 'strerror', None) or error}")
    return encoded


def _read(path: Path, key: str, texts: LabelledTexts) -> Encoded:
    """Read and check a file; the archive's own checksums find flipped bits. Raises one of ``_UNREADABLE``."""
    # Opened here: np.load leaves a file open that it cannot make sense of.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        stored_key = str(file["key"])
        encoded = Encoded(file["ids"], file["offsets"], file["labels"], int(file["truncated"]))
    if stored_key != key:
        raise ValueError("it is for other data")
    kinds = (encoded.ids.dtype, encoded.offsets.dtype, encoded.labels.dtype)
    if kinds != (np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.int64)):
        raise ValueError("wrong number types")
    if encoded.offsets.shape != (len(texts) + 1,) or not np.array_equal(encoded.labels, texts.labels):
        raise ValueError("wrong number of rows, or other labels")
    if encoded.offsets[0] != 0 or encoded.offsets[-1] != len(encoded.ids) or (encoded.lengths < 0).any():
        raise ValueError("broken row boundaries")
    return encoded


class PlainText:
    """Turns text into the tokens of its characters: no special tokens around it, and never cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.boundary = boundary_id(tokenizer)
        document = json.loads(tokenizer.to_str())
        # Without the template that would put special tokens around every text.
        bare = json.dumps({**document, "post_processor": None, "truncation": None, "padding": None})
        self._tokenizer: Tokenizer = Tokenizer.from_str(bare)

    def encode(self, text: str) -> Encoding:
        """One text, with the place of every token in it.

        A text that itself holds ``<|endoftext|>`` has it spelled out: only the end of a paragraph is one.
        """
        found = self._tokenizer.encode(text)
        if self.boundary not in found.ids:
            return found
        self._tokenizer.encode_special_tokens = True
        try:
            return self._tokenizer.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_all(self, texts: Sequence[str], cache: Path | None, progress: Progress = SILENT) -> Encoded:
        """Many texts, or what ``cache`` (None: no cache) holds of them; labels are all 0."""
        encoded = encode(LabelledTexts.unlabelled(texts), self._tokenizer, _NEVER_CUT, cache, progress)
        places = np.flatnonzero(encoded.ids == self.boundary)
        if not len(places):
            return encoded
        rows = [encoded.row(index) for index in range(len(encoded))]
        for index in set((np.searchsorted(encoded.offsets, places, side="right") - 1).tolist()):
            rows[index] = np.array(self.encode(texts[index]).ids, dtype=np.int32)
        return Encoded(np.concatenate(rows), _offsets(list(map(len, rows))), encoded.labels, 0)


def require_unicode(what: str, text: str) -> None:
    """Raises InputError for half a surrogate pair, which a terminal can pass on and no tokenizer takes.

    Args:
        what: the text is, for the message.
        text: as the user gave it.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{what} is not valid Unicode: {text.encode('utf-8', 'replace').decode()[:60]!r}")
