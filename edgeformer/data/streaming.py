"""Training sets: read in pieces and stored on disk as tokens, which later runs reuse.

The texts are read twice: to check every row, count the labels and train a tokenizer; then to tokenize. Stored folders
are named by a hash of all inputs, including the bytes of the source files: a resumed run hashes the
source files and reads no row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import Source, TokenizerConfig, stated
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.files import replacing_folder, sha256_of, write_text
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.data.batching import IGNORED
from edgeformer.data.encoding import RowsT
from edgeformer.data.records import check_file, format_of_source, hub_rows
from edgeformer.data.rows import LabelledTexts, Text, hash_labels, hash_texts, in_pieces, join_pair, label_counts
from edgeformer.data.splits import OverlapCounter
from edgeformer.data.storage import StoredRows, read_stored, write_facts, write_rows
from edgeformer.data.tokenization import fingerprint
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import LockedError, lock_path, wait_for_lock

_FORMAT_VERSION = 3
"""Format version of stored rows. Version 2 cleans punctuation beyond ASCII; version 3 adds tokenizer and overlap."""
_PIECE_ROWS, _PIECE_CHARACTERS = 2048, 1_000_000  # limits of a piece: tokenizing takes some hundred bytes a token
_WAIT_S = 24 * 3600.0
_TOKENIZER_FILE = "tokenizer.json"

Encode = Callable[[Tokenizer, Iterator[LabelledTexts], dict[str, Any]], Iterator[RowsT]]
"""Yields the rows of pieces of texts, then adds further fields of StoredFacts to the dictionary."""


@dataclass(frozen=True)
class Stream:
    """The texts of a training set.

    ``check`` takes the rows of each class, and raises DataError if they do not suffice for training.
    """

    sources: Sequence[Source]  # that ``pairs`` reads; empty: the texts are in memory
    settings: Mapping[str, object]  # that also determine what ``pairs`` yields
    pairs: Callable[[], Iterator[tuple[Text, int]]]  # all texts with their class index (or labels as bits)
    classes: int
    several: bool = False  # a text can have several labels
    check: Callable[[Sequence[int]], None] = lambda counts: None

    @classmethod
    def of_texts(cls, texts: LabelledTexts, classes: int = 0, *, several: bool = False) -> Stream:
        """Return the stream of texts in memory."""
        labels = texts.labels.tolist()
        settings = {"fingerprint": texts.fingerprint(), "classes": classes, "several": several}
        return cls((), settings, lambda: zip(texts.texts, labels, strict=True), classes, several)

    def pieces(self) -> Iterator[LabelledTexts]:
        """Yield the texts and labels in pieces of bounded size."""
        size_of = lambda pair: len(join_pair(pair[0]))  # noqa: E731
        return map(LabelledTexts.of, in_pieces(self.pairs(), size_of, _PIECE_ROWS, _PIECE_CHARACTERS))


def store_training_set(
    stream: Stream, config: TokenizerConfig, load: Callable[..., Tokenizer], encode: Encode[RowsT], kind: type[RowsT],
    settings: Mapping[str, object], other_texts: Mapping[str, Sequence[str]], cache: Path, progress: Progress,
) -> tuple[Tokenizer, StoredRows[RowsT]]:  # fmt: skip
    """Return the tokenizer and rows of a training set, and reuse those of an earlier run.

    Args:
        load: loads the tokenizer, or trains it on ``training_texts``.
        encode: makes rows of ``kind`` from texts.
        settings: settings besides the texts that determine tokenizer and rows.
        other_texts: other set → its texts, which are compared with the training texts.
        cache: folder of the stored rows; waits for another process that makes the same rows.

    Raises DataError: a source or the tokenizer is unusable, or a source changed during reading.
    """
    # 1. Name the folder by all inputs
    files = [Path(source.path) for source in stream.sources if source.kind == "file"]
    for path in files:
        check_file(path)
    states = [(state.st_size, state.st_mtime_ns) for state in (path.stat() for path in files)]
    identities: list[object] = [_FORMAT_VERSION, dict(stream.settings), dict(settings)]
    with bar(progress, "Identifying the training set", len(stream.sources), "sources"):
        for source in stream.sources:
            identity = stated(source.model_dump(mode="json"))
            if source.kind == "file":
                path = Path(source.path)
                identity |= {"path": sha256_of(path), "format": format_of_source(source), "packed": path.suffix.lower()}
            elif source.kind == "hub":
                identity["rows"] = hub_rows(source)._fingerprint
            identities.append(identity)
            progress.advance()
    tokenizer = None if config.kind == "trained" else load(config, training_texts=None)
    identities.append(config.model_dump() if tokenizer is None else fingerprint(tokenizer))
    identities += [[name, LabelledTexts.unlabelled(texts).fingerprint()] for name, texts in other_texts.items()]
    key = hashlib.sha256(json.dumps(identities, sort_keys=True).encode("utf-8")).hexdigest()
    folder = cache / f"stream-{key[:24]}"
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as lock:
        # 2. Reuse the rows of an earlier run
        try:
            lock.enter_context(lock_path(folder))
        except LockedError as error:
            progress.message(str(error))
            lock.enter_context(wait_for_lock(folder, _WAIT_S))
        remove_leftovers(folder)
        rows = read_stored(folder, key, kind, progress)
        if rows is not None:
            return tokenizer or Tokenizer.from_file(str(folder / _TOKENIZER_FILE)), rows

        # 3. Read all texts: count the labels, train the tokenizer
        digest, counts, text_count = hashlib.sha256(), np.zeros(stream.classes, dtype=np.int64), 0

        def checked_texts() -> Iterator[str]:
            nonlocal text_count
            with bar(progress, "Reading the training set", None, "texts"):
                for piece in stream.pieces():
                    hash_labels(digest, piece.labels)
                    numbers = piece.labels[piece.labels != IGNORED]
                    piece_counts = label_counts(numbers, stream.classes, several=stream.several)
                    counts[:] += np.array(piece_counts[: stream.classes], dtype=np.int64)
                    text_count += len(piece)
                    progress.advance(len(piece))
                    yield from map(join_pair, piece.texts)
            if tokenizer is None:  # starts after the bar of the texts
                progress.start("Training the tokenizer", None)

        texts_once = checked_texts()
        if tokenizer is None:
            try:
                tokenizer = load(config, training_texts=texts_once)
            finally:
                progress.finish()
        for _ in texts_once:  # texts that the tokenizer's training did not read
            pass
        stream.check(counts.tolist())

        # 4. Read them again: write their tokens, compare them with the other sets
        counter, tokenized, facts = OverlapCounter(other_texts), 0, dict[str, Any]()

        def counted_pieces() -> Iterator[LabelledTexts]:
            nonlocal tokenized
            for piece in stream.pieces():
                hash_texts(digest, piece.texts)
                counter.add(map(join_pair, piece.texts))
                yield piece
                tokenized += len(piece)
                progress.advance(len(piece))

        with bar(progress, "Tokenizing the training set", text_count, "texts"), replacing_folder(folder) as temporary:
            facts |= write_rows(temporary, encode(tokenizer, counted_pieces(), facts))
            if tokenized != text_count or [(path.stat().st_size, path.stat().st_mtime_ns) for path in files] != states:
                names = ", ".join(map(str, files)) or "the training set"
                raise DataError(f"{names}: changed while it was read; start again when nothing writes to it")
            write_text(temporary / _TOKENIZER_FILE, tokenizer.to_str())
            facts["sha256"][_TOKENIZER_FILE] = sha256_of(temporary / _TOKENIZER_FILE)
            facts |= {"key": key, "fingerprint": digest.hexdigest(), "texts": text_count, "overlap": counter.counts()}
            write_facts(temporary, {**facts, "label_rows": counts.tolist()})
        rows = read_stored(folder, key, kind, progress)
        if rows is None:
            raise DataError(f"{folder}: damaged while it was written; check the disk")
        return tokenizer, rows
