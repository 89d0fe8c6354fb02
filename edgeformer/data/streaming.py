"""Training sets that do not fit into memory: read piece by piece, stored on disk as tokens, found again by later runs.

The sources are read twice: to check every row, count the labels and train a tokenizer; then to tokenize. Stored files
are named by a hash of everything that decides them, the bytes of the source files included: a resumed run hashes the
source files and reads no row. Reads copy out of the files and leave nothing mapped: mapped pages count as memory of
the process, and an epoch would map the whole file.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import FileTokenizer, Source, TokenizerConfig, stated
from edgeformer.artifacts.errors import ArtifactError, DataError
from edgeformer.artifacts.files import read_at_most, replacing_folder, sha256_of, write_json, write_text
from edgeformer.artifacts.manifest import DataFinding, OverlapCount
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.data.data_warnings import empty_texts
from edgeformer.data.encoding import FORMAT_VERSION, RowsT, TrainingRows, count_values, encode_texts
from edgeformer.data.records import check_file, format_of_source, hub_fingerprint
from edgeformer.data.rows import Fingerprint, LabelledTexts
from edgeformer.data.splits import Int64s, OverlapCounter
from edgeformer.data.tokenization import fingerprint
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import LockedError, lock_path

Pieces = Mapping[str, NDArray[np.integer]]
"""Arrays of some rows by name: ``ids``, ``offsets`` of the rows (the first is 0), and further ones."""
_FACTS_FILE, _FACTS_CHECKSUM = "facts.json", "facts.sha256"
_DTYPES = {"ids": "<i4", "starts": "<i4", "offsets": "<i8", "labels": "<i8"}
_TOKEN_ARRAYS = ("ids", "starts")
_MAPPED_READS = 256
"""Places read from one mapping: the system maps 64 KiB around each of them."""
_PIECE_ROWS, _PIECE_CHARACTERS = 2048, 1_000_000
"""Limits of a piece: tokenizing takes some hundred bytes a token."""
_POLL_S, _FOREIGN_LOCK_S = 0.5, 600.0
"""A process on another machine is known by its lock file only, and may have ended: wait so long for it."""


class StoredFacts(Frozen):
    """``facts.json`` of stored rows: checksums and counts.

    ``tokens`` (to be predicted), ``words`` and ``paragraphs`` are a language model's. ``label_rows`` (rows of each
    class), ``empty`` (rows without a text, left out) and ``text_words`` (number of words → texts) are a classifier's.
    """

    key: str
    sha256: dict[str, str]
    rows: int
    fingerprint: str
    truncated: int
    tokens: int = 0
    words: int = 0
    paragraphs: int = 0
    label_rows: tuple[int, ...] = ()
    empty: int = 0
    text_words: dict[str, int] = Field({})


class DiskArray:
    """A one-dimensional array that fills a file. The file stays open, so that deleting the cache breaks no run."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._dtype = np.dtype(dtype)
        self._length = path.stat().st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: Int64s) -> NDArray[Any]:
        """Return a copy of the numbers at ``places``."""
        copies = np.empty(len(places), dtype=self._dtype)
        for start in range(0, len(places), _MAPPED_READS):
            part = slice(start, start + _MAPPED_READS)
            copies[part] = self._mapped()[places[part]]
        return copies

    def read_spans(self, begins: Int64s, sizes: Int64s) -> NDArray[Any]:
        """Return copies of the ``sizes[i]`` numbers from ``begins[i]`` on, concatenated."""
        copies = [np.empty(0, dtype=self._dtype)]
        for start in range(0, len(begins), _MAPPED_READS):
            part = slice(start, start + _MAPPED_READS)
            mapped = self._mapped()
            spans = zip(begins[part].tolist(), sizes[part].tolist(), strict=True)
            copies.append(np.concatenate([mapped[begin : begin + size] for begin, size in spans]))
        return np.concatenate(copies)

    def _mapped(self) -> NDArray[Any]:
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self._length,))


@dataclass(frozen=True)
class StoredRows(Generic[RowsT]):
    """Rows on disk; ``build`` makes rows in memory of their arrays."""

    arrays: Mapping[str, DiskArray]
    facts: StoredFacts
    build: Callable[[Pieces], RowsT]

    def __len__(self) -> int:
        return self.facts.rows

    @property
    def truncated(self) -> int:
        """Rows that were truncated."""
        return self.facts.truncated

    def sizes(self, numbers: Int64s) -> Int64s:
        """Return the tokens of the rows ``numbers``, int64 [n]."""
        offsets = self.arrays["offsets"]
        return np.asarray(offsets[numbers + 1] - offsets[numbers], dtype=np.int64)

    def loaded(self, numbers: Int64s) -> tuple[RowsT, Int64s]:
        """Return the rows ``numbers`` in memory, and their numbers there."""
        begins, sizes = self.arrays["offsets"][numbers], self.sizes(numbers)
        pieces: dict[str, NDArray[np.integer]] = {"offsets": np.concatenate(([0], np.cumsum(sizes)))}
        for name, array in self.arrays.items():
            if name in _TOKEN_ARRAYS:
                pieces[name] = array.read_spans(begins, sizes)
            elif name != "offsets":
                pieces[name] = array[numbers]
        return self.build(pieces), np.arange(len(numbers), dtype=np.int64)


class Writer:
    """Appends rows to the arrays of a folder; see :func:`writing`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder, self._open_files = folder, files
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        self._rows = self._tokens = 0

    def append(self, pieces: Pieces) -> None:
        """Append rows."""
        offsets = pieces["offsets"]
        begins = offsets + self._tokens
        for name, array in {**pieces, "offsets": begins[1:] if self._files else begins}.items():
            if name not in self._files:
                self._files[name] = self._open_files.enter_context((self._folder / f"{name}.bin").open("wb"))
                self._digests[name] = hashlib.sha256()
            content = np.ascontiguousarray(array, dtype=_DTYPES[name]).tobytes()
            self._files[name].write(content)
            self._digests[name].update(content)
        self._rows += len(offsets) - 1
        self._tokens += int(offsets[-1])

    def finish(self, facts: Mapping[str, object]) -> None:
        """Close the arrays and write the facts: ``facts``, the checksums and the number of rows."""
        self._open_files.close()
        checksums = {name: digest.hexdigest() for name, digest in self._digests.items()}
        stored = StoredFacts.model_validate({"sha256": checksums, "rows": self._rows, **facts}, strict=False)
        write_json(self._folder / _FACTS_FILE, stored)
        write_text(self._folder / _FACTS_CHECKSUM, sha256_of(self._folder / _FACTS_FILE) + "\n")


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """Yield a writer. ``folder`` appears when the block has called ``finish`` and ended without an error."""
    with replacing_folder(folder) as temporary, ExitStack() as files:
        yield Writer(temporary, files)


def read_stored(folder: Path, key: str, build: Callable[[Pieces], RowsT]) -> StoredRows[RowsT]:
    """Open stored rows and check every byte of them.

    Raises:
        ArtifactError: damaged, or not the rows of ``key``.
        OSError: a file is missing.
    """
    checksum = read_at_most(folder / _FACTS_CHECKSUM, 100).decode("ascii", "replace").strip()
    if checksum != sha256_of(folder / _FACTS_FILE):
        raise ArtifactError(f"{folder / _FACTS_FILE}: is not what was written")
    facts = read_manifest(StoredFacts, folder / _FACTS_FILE)
    if facts.key != key:
        raise ArtifactError(f"{folder}: is of other data")
    for name, checksum in facts.sha256.items():
        if name not in _DTYPES or sha256_of(folder / f"{name}.bin") != checksum:
            raise ArtifactError(f"{folder / name}.bin: is not what was written")
    arrays = {name: DiskArray(folder / f"{name}.bin", _DTYPES[name]) for name in facts.sha256}
    if not {"ids", "offsets"} <= arrays.keys() or len(arrays["offsets"]) != facts.rows + 1:
        raise ArtifactError(f"{folder}: does not hold the rows that it says")
    return StoredRows(arrays, facts, build)


@dataclass(frozen=True)
class TrainingSet(Generic[RowsT]):
    """The training set, in memory or on disk.

    Attributes:
        texts: number of texts.
        labels: rows of each class; empty: the set has no classes.
        tokens, words: of a language model: to be predicted, and the words that they spell.
        text_words: number of words → texts; empty: not counted.
        findings: warnings about the data.
    """

    tokenizer: Tokenizer
    rows: TrainingRows[RowsT]
    texts: int
    fingerprint: str
    labels: Sequence[int]
    overlap: tuple[OverlapCount, ...]
    tokens: int = 0
    words: int = 0
    findings: tuple[DataFinding, ...] = ()
    text_words: Mapping[int, int] = field(default_factory=dict)


class Encoder(Protocol[RowsT]):
    """Makes rows of texts that come in pieces."""

    def pieces(self, texts: list[str], labels: list[int], *, last: bool) -> Pieces:
        """Return the rows that these texts complete. ``last``: no more texts follow."""

    def facts(self) -> Mapping[str, object]:
        """Return the fields of StoredFacts that the encoder counts, for all texts so far."""

    def build(self, pieces: Pieces) -> RowsT:
        """Return stored rows in memory."""


@dataclass(frozen=True)
class Stream:
    """The sources of a training set.

    Attributes:
        settings: what decides, besides the sources, which texts and labels ``pairs`` yields.
        pairs: all texts with their class index, from the beginning.
        classes: number of classes.
        check: raises DataError if the set cannot be trained on, by its rows of each class, before it is tokenized.
    """

    sources: Sequence[Source]
    settings: Mapping[str, object]
    pairs: Callable[[], Iterator[tuple[str, int]]]
    classes: int
    check: Callable[[Sequence[int]], None] = lambda counts: None

    def pieces(self) -> Iterator[tuple[list[str], list[int]]]:
        """Yield the texts and labels in pieces of bounded size."""
        texts: list[str] = []
        labels: list[int] = []
        characters = 0
        for text, label in self.pairs():
            texts.append(text)
            labels.append(label)
            characters += len(text)
            if len(texts) >= _PIECE_ROWS or characters >= _PIECE_CHARACTERS:
                yield texts, labels
                texts, labels, characters = [], [], 0
        if texts:
            yield texts, labels


class _Survey:
    """The first pass over a stream: every row is checked before hours of tokenizing; labels are counted and hashed.

    ``texts`` yields all texts, once. The other attributes are complete when it is exhausted.
    """

    def __init__(self, stream: Stream, progress: Progress) -> None:
        self.fingerprint = Fingerprint()
        self.labels = np.zeros(stream.classes, dtype=np.int64)
        self.rows = 0
        self.texts = self._read(stream, progress)

    def _read(self, stream: Stream, progress: Progress) -> Iterator[str]:
        with bar(progress, "Reading the training set", None, "texts"):
            for texts, labels in stream.pieces():
                self.fingerprint.add_labels(labels)
                self.labels += np.bincount(labels, minlength=len(self.labels))
                self.rows += len(texts)
                progress.advance(len(texts))
                yield from texts


class Streaming:
    """One reading of a stream, with a folder of tokenizers and tokens. Raises DataError if a file is missing."""

    def __init__(self, stream: Stream, cache: Path, progress: Progress) -> None:
        self._stream, self._cache, self._progress = stream, cache, progress
        self._files = [Path(source.path) for source in stream.sources if source.kind == "file"]
        for path in self._files:
            check_file(path)
        self._file_states = self._read_file_states()
        identities = []
        with bar(progress, "Identifying the training set", len(stream.sources), "sources"):
            for source in stream.sources:
                identity = stated(source.model_dump(mode="json"))
                if source.kind == "file":
                    path = Path(source.path)
                    contents = {"path": sha256_of(path), "format": format_of_source(source)}
                    identity |= {**contents, "packed": path.suffix.lower()}
                elif source.kind == "hub":
                    identity["rows"] = hub_fingerprint(source)
                identities.append(identity)
                progress.advance()
        self._identity = _hash(FORMAT_VERSION, dict(stream.settings), *identities)
        self._survey = _Survey(stream, progress)

    def _read_file_states(self) -> list[tuple[int, int]]:
        return [(state.st_size, state.st_mtime_ns) for state in (path.stat() for path in self._files)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process reads this stream into this cache, and lock the others out."""
        target = self._cache / f"stream-{self._identity[:24]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            is_waiting, deadline = False, time.monotonic() + _FOREIGN_LOCK_S
            while True:
                try:
                    lock.enter_context(lock_path(target))
                    break
                except LockedError as error:
                    if not error.held and time.monotonic() > deadline:
                        raise
                    if not is_waiting:
                        self._progress.message(str(error))
                    is_waiting = True
                    time.sleep(_POLL_S)
            yield

    def tokenizer(
        self, config: TokenizerConfig, load: Callable[..., Tokenizer], settings: Mapping[str, object]
    ) -> Tokenizer:
        """Load the tokenizer of ``config``, or train it on this set unless the cache has it.

        Args:
            load: loads a configuration, or trains on its ``training_texts``.
            settings: what else decides the trained tokenizer.
        """
        if config.kind != "trained":
            return load(config, training_texts=None)
        name = f"tokenizer-{_hash(self._identity, config.model_dump(), dict(settings))[:24]}"
        path = self._cached_file(name)
        if path is not None:
            return load(FileTokenizer(kind="file", path=str(path)), training_texts=None)
        tokenizer = load(config, training_texts=self._survey.texts)
        self._write_cached_file(name, tokenizer.to_str())
        return tokenizer

    def training_set(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder[RowsT],
        settings: Mapping[str, object],
        other_texts: Mapping[str, Sequence[str]],
    ) -> TrainingSet[RowsT]:
        """Return the set, tokenized now or by an earlier run.

        Args:
            settings: what decides the rows, besides texts and tokenizer.
            other_texts: other set → its texts, which are compared with the training texts.

        Raises:
            DataError: a source is unusable, or changed during reading.
        """
        key = _hash(self._identity, fingerprint(tokenizer), dict(settings))
        folder = self._cache / f"tokens-{key[:24]}"
        fingerprints = {name: LabelledTexts.unlabelled(texts).fingerprint() for name, texts in other_texts.items()}
        overlap_name = f"overlap-{_hash(self._identity, fingerprints)[:24]}"
        overlap_file, counter = self._cached_file(overlap_name), OverlapCounter(other_texts)
        rows: StoredRows[RowsT] | None = None
        remove_leftovers(folder)
        if folder.exists():
            try:
                rows = read_stored(folder, key, encoder.build)
            except (ArtifactError, OSError) as error:
                self._progress.message(f"damaged token cache ({error}); made again")
        if rows is None:
            self._write_rows(folder, key, encoder, None if overlap_file else counter)
            rows = read_stored(folder, key, encoder.build)
        elif overlap_file is None:
            with bar(self._progress, "Comparing the other sets with the training set", rows.facts.rows, "texts"):
                for texts, _ in self._stream.pieces():
                    counter.add(texts)
                    self._progress.advance(len(texts))
        if overlap_file is None:
            overlap = counter.counts()
            self._write_cached_file(overlap_name, json.dumps([count.model_dump(mode="json") for count in overlap]))
        else:
            overlap = tuple(map(OverlapCount.model_validate, json.loads(overlap_file.read_bytes())))
        facts = rows.facts
        return TrainingSet(
            tokenizer,
            rows,
            facts.paragraphs or facts.rows,
            facts.fingerprint,
            facts.label_rows,
            overlap,
            facts.tokens,
            facts.words,
            tuple(empty_texts("train", facts.empty)),
            {int(words): texts for words, texts in facts.text_words.items()},
        )

    def _write_rows(self, folder: Path, key: str, encoder: Encoder[Any], counter: OverlapCounter | None) -> None:
        survey = self._survey
        for _ in survey.texts:  # those that no tokenizer was trained on
            pass
        self._stream.check(survey.labels.tolist())
        with bar(self._progress, "Tokenizing the training set", survey.rows, "texts"), writing(folder) as writer:
            rows = 0
            for texts, labels in self._stream.pieces():
                survey.fingerprint.add_texts(texts)
                if counter is not None:
                    counter.add(texts)
                writer.append(encoder.pieces(texts, labels, last=False))
                rows += len(texts)
                self._progress.advance(len(texts))
            writer.append(encoder.pieces([], [], last=True))
            if rows != survey.rows or self._read_file_states() != self._file_states:
                names = ", ".join(map(str, self._files)) or "the training set"
                raise DataError(f"{names}: changed while it was read; start again when nothing writes to it")
            facts = {"key": key, "fingerprint": survey.fingerprint.hexdigest(), "label_rows": survey.labels.tolist()}
            writer.finish({**facts, **encoder.facts()})

    def _cached_file(self, name: str) -> Path | None:
        """Return the file that was written under ``name``, if its content has the checksum in its file name."""
        paths = self._cache.glob(f"{name}-*.json")
        return next((path for path in paths if path.stem == f"{name}-{sha256_of(path)[:24]}"), None)

    def _write_cached_file(self, name: str, text: str) -> None:
        checksum = hashlib.sha256(text.encode("utf-8")).hexdigest()[:24]
        write_text(self._cache / f"{name}-{checksum}.json", text)


def streamed_tokens(stream: Stream, tokenizer: Tokenizer, max_length: int) -> tuple[Mapping[int, int], str]:
    """Return token → number of uses in the texts, each cut to ``max_length`` tokens; and the set's fingerprint."""
    survey = _Survey(stream, SILENT)
    for _ in survey.texts:
        pass
    uses: Counter[int] = Counter()
    for texts, _ in stream.pieces():
        survey.fingerprint.add_texts(texts)
        uses.update(count_values(encode_texts(tokenizer, texts, max_length)[0].ids))
    return uses, survey.fingerprint.hexdigest()


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()
