"""A training set that is too large for memory: read piece by piece, kept as tokens on disk, and found there again.

Its sources are read twice: once to check every row and to count the labels (and to train a tokenizer), once to
tokenize. Both passes go through the readers that every other set goes through. What is kept is named by what decides
it, the bytes of the files among that: a run that goes on hashes the files and reads no row again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer, Source, TokenizerConfig, stated
from edgeformer.artifacts.errors import ArtifactError, DataError
from edgeformer.artifacts.files import sha256_of, write_text
from edgeformer.artifacts.manifest import DataFinding, OverlapCount
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data.data_warnings import empty_texts
from edgeformer.data.encoding import FORMAT_VERSION, RowsT, TrainingRows, counted, encode_texts
from edgeformer.data.overlap import OverlapCounter
from edgeformer.data.records import check_file, format_of_source, hub_fingerprint
from edgeformer.data.rows import Fingerprint, LabelledTexts
from edgeformer.data.stored import Pieces, StoredRows, read_stored, writing
from edgeformer.data.tokenization import fingerprint
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import LockedError, claiming

_MOST_ROWS, _MOST_CHARACTERS = 2048, 1_000_000  # of a piece: what is tokenized takes some hundred bytes a token
_WAIT_S, _MOST_S = 0.5, 600.0  # of another machine only a file knows: it may be gone
LoadTokenizer = Callable[[TokenizerConfig, Iterable[str] | None], Tokenizer]


@dataclass(frozen=True)
class TrainingSet(Generic[RowsT]):
    """The training set, wherever its rows are.

    Attributes:
        texts: how many there are.
        labels: rows of each class; empty: it has none.
        tokens, words: of a language model: to be predicted, and what they spell.
        text_words: number of words → texts that have so many; empty: not counted.
        findings: what its owner should know of it.
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
        """The rows that are complete with these texts. ``last``: no more follow."""

    def facts(self) -> Mapping[str, object]:
        """What StoredFacts says of all rows so far, beyond what is counted here."""

    def build(self, pieces: Pieces) -> RowsT:
        """Some rows in memory."""


@dataclass(frozen=True)
class Stream:
    """A training set as its sources have it.

    Attributes:
        settings: what decides, beside the sources, which texts and labels ``pairs`` gives.
        pairs: all texts with their class index, from the beginning.
        classes: how many there are.
        check: refuses the set by its number of rows of each class, before it is tokenized.
    """

    sources: Sequence[Source]
    settings: Mapping[str, object]
    pairs: Callable[[], Iterator[tuple[str, int]]]
    classes: int
    check: Callable[[Sequence[int]], None] = lambda counts: None


class Streaming:
    """One reading of a stream; ``cache`` is where its tokens are kept. Raises DataError where a file is not there."""

    def __init__(self, stream: Stream, cache: Path, progress: Progress) -> None:
        self._stream, self._cache, self._progress = stream, cache, progress
        self._files = [Path(source.path) for source in stream.sources if source.kind == "file"]
        for path in self._files:
            check_file(path)
        self._state = self._states()
        with bar(progress, "Identifying the training set", len(stream.sources), "sources"):
            self._identity = _hash(FORMAT_VERSION, dict(stream.settings), *map(self._identified, stream.sources))
        self._survey: _Survey | None = None

    def _identified(self, source: Source) -> dict[str, object]:
        known = stated(source.model_dump(mode="json"))
        if source.kind == "file":
            path = Path(source.path)
            known |= {"path": sha256_of(path), "format": format_of_source(source), "packed": path.suffix.lower()}
        elif source.kind == "hub":
            known["rows"] = hub_fingerprint(source)
        self._progress.advance()
        return known

    def _states(self) -> list[tuple[int, int]]:
        return [(found.st_size, found.st_mtime_ns) for found in (path.stat() for path in self._files)]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process that reads this stream into this cache; others wait, and find what it has made."""
        target = self._cache / f"stream-{self._identity[:24]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            said, until = False, time.monotonic() + _MOST_S
            while True:
                try:
                    held.enter_context(claiming(target))
                    break
                except LockedError as error:
                    if not error.held and time.monotonic() > until:
                        raise
                    if not said:
                        self._progress.message(str(error))
                    said = True
                    time.sleep(_WAIT_S)
            yield

    def tokenizer(self, config: TokenizerConfig, load: LoadTokenizer, settings: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that ``config`` names, or trained on this set, or found where it was trained before.

        Args:
            load: gets the texts only where they are needed.
            settings: what else decides what is trained.
        """
        if config.kind != "trained":
            return load(config, None)
        name = f"tokenizer-{_hash(self._identity, config.model_dump(), dict(settings))[:24]}"
        found = self._recalled(name)
        if found is not None:
            return load(FileTokenizer(kind="file", path=str(found)), None)
        self._survey = _Survey(self._stream)
        tokenizer = load(config, self._survey.texts(self._progress))
        self._keep(name, tokenizer.to_str())
        return tokenizer

    def training_set(
        self, tokenizer: Tokenizer, encoder: Encoder[RowsT], settings: Mapping[str, object], others: _Texts
    ) -> TrainingSet[RowsT]:
        """Its rows, tokenized now or before.

        Args:
            settings: what decides the rows, beside texts and tokenizer.
            others: the other sets' texts, by set, with which it is compared.

        Raises:
            DataError: anything about the sources; they changed while they were read.
        """
        key = _hash(self._identity, fingerprint(tokenizer), dict(settings))
        folder = self._cache / f"tokens-{key[:24]}"
        told = {name: LabelledTexts.unlabelled(texts).fingerprint() for name, texts in others.items()}
        name = f"overlap-{_hash(self._identity, told)[:24]}"
        kept, counter = self._recalled(name), OverlapCounter(others)
        rows = self._opened(folder, key, encoder)
        if rows is None:
            self._write(folder, key, encoder, None if kept else counter)
            rows = read_stored(folder, key, encoder.build)
        elif kept is None:
            with bar(self._progress, "Comparing the other sets with the training set", rows.facts.rows, "texts"):
                for texts, _ in _in_pieces(self._stream.pairs()):
                    counter.add(texts)
                    self._progress.advance(len(texts))
        if kept is None:
            overlap = counter.counts()
            self._keep(name, json.dumps([found.model_dump(mode="json") for found in overlap]))
        else:
            overlap = tuple(map(OverlapCount.model_validate, json.loads(kept.read_bytes())))
        facts = rows.facts
        count, found = facts.paragraphs or facts.rows, tuple(empty_texts("train", facts.empty))
        words = {int(number): texts for number, texts in facts.text_words.items()}
        counted = (facts.tokens, facts.words, found, words)
        return TrainingSet(tokenizer, rows, count, facts.fingerprint, facts.label_rows, overlap, *counted)

    def _opened(self, folder: Path, key: str, encoder: Encoder[RowsT]) -> StoredRows[RowsT] | None:
        remove_leftovers(folder)
        if not folder.exists():
            return None
        try:
            return read_stored(folder, key, encoder.build)
        except (ArtifactError, OSError) as error:
            self._progress.message(f"damaged token cache ({error}); made again")
            return None

    def _write(self, folder: Path, key: str, encoder: Encoder[Any], overlaps: OverlapCounter | None) -> None:
        survey = self._survey or _Survey(self._stream)
        for _ in survey.texts(self._progress):
            pass
        self._stream.check(survey.labels.tolist())
        with (
            bar(self._progress, "Tokenizing the training set", survey.rows, "texts"),
            writing(folder) as writer,
        ):
            rows = 0
            for texts, labels in _in_pieces(self._stream.pairs()):
                survey.fingerprint.add_texts(texts)
                if overlaps is not None:
                    overlaps.add(texts)
                writer.append(encoder.pieces(texts, labels, last=False))
                rows += len(texts)
                self._progress.advance(len(texts))
            writer.append(encoder.pieces([], [], last=True))
            if rows != survey.rows or self._states() != self._state:
                changed = ", ".join(map(str, self._files)) or "the training set"
                raise DataError(f"{changed}: changed while it was read; start again when nothing writes to it")
            known = {"key": key, "fingerprint": survey.fingerprint.hexdigest(), "label_rows": survey.labels.tolist()}
            writer.finish({**known, **encoder.facts()})

    def _recalled(self, name: str) -> Path | None:
        """The file that was kept under ``name``, if what is in it is what its own name says."""
        found = self._cache.glob(f"{name}-*.json")
        return next((path for path in found if path.stem == f"{name}-{sha256_of(path)[:24]}"), None)

    def _keep(self, name: str, text: str) -> None:
        checksum = hashlib.sha256(text.encode("utf-8")).hexdigest()[:24]
        write_text(self._cache / f"{name}-{checksum}.json", text)


_Texts = Mapping[str, Sequence[str]]


def streamed_tokens(stream: Stream, tokenizer: Tokenizer, max_length: int) -> tuple[Mapping[int, int], str]:
    """How often the texts use each token, each text cut to ``max_length`` tokens; the fingerprint of the set."""
    survey = _Survey(stream)
    for _ in survey.texts(SILENT):
        pass
    used = counted(np.zeros(0, np.int64))
    for texts, _ in _in_pieces(stream.pairs()):
        survey.fingerprint.add_texts(texts)
        used.update(counted(encode_texts(tokenizer, texts, max_length)[0].ids))
    return used, survey.fingerprint.hexdigest()


class _Survey:
    """The first pass: every row is looked at before hours are spent on tokenizing; labels are counted and hashed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest: Iterator[str] | None = None
        self.fingerprint = Fingerprint()
        self.labels = np.zeros(stream.classes, dtype=np.int64)
        self.rows = 0

    def texts(self, progress: Progress) -> Iterator[str]:
        """The texts, once: whoever asks again gets those that are left."""
        if self._rest is None:
            self._rest = self._all(progress)
        return self._rest

    def _all(self, progress: Progress) -> Iterator[str]:
        with bar(progress, "Reading the training set", None, "texts"):
            for texts, labels in _in_pieces(self._stream.pairs()):
                self.fingerprint.add_labels(labels)
                self.labels += np.bincount(labels, minlength=len(self.labels))
                self.rows += len(texts)
                progress.advance(len(texts))
                yield from texts


def _in_pieces(pairs: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], list[int]]]:
    texts: list[str] = []
    labels: list[int] = []
    characters = 0
    for text, label in pairs:
        texts.append(text)
        labels.append(label)
        characters += len(text)
        if len(texts) >= _MOST_ROWS or characters >= _MOST_CHARACTERS:
            yield texts, labels
            texts, labels, characters = [], [], 0
    if texts:
        yield texts, labels


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()
