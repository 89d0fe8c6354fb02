"""From a classifier's recipe to encoded sets: read, split, tokenize, and say what it all was."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import DataConfig, DataSection, TokenizerConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import DataFinding, DataSummary
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data.data_warnings import Empties, label_findings, load_and_look, rows_per_label, seen_findings
from edgeformer.data.encoding import Encoded, Prepared, TrainingRows, encode, encode_texts
from edgeformer.data.lengths import count_words, lengths_of_sets, tally, tally_tokens
from edgeformer.data.overlap import count_overlaps
from edgeformer.data.rows import LabelledTexts, in_one, label_counts, label_rows, labelled
from edgeformer.data.sources import Columns, check_columns, load_part, own_file, part_rows, read, with_text
from edgeformer.data.splits import check_classes, check_sets_differ, draw, set_parts, split, unknown_set
from edgeformer.data.stored import Pieces
from edgeformer.data.streaming import Stream, Streaming, TrainingSet
from edgeformer.data.tokenization import load_tokenizer, special_ids


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress = SILENT
) -> Prepared[Encoded]:
    """Read, split and encode the data of a recipe, and count what its test sets share with its training set.

    Args:
        data, tokenizer_config: those sections of the recipe.
        vocab_size: its ``model.vocab_size``; a tokenizer that is trained here may come out smaller.
        cache: where encoded sets are kept between runs.

    Raises:
        DataError: anything about files, rows, labels, splits or the tokenizer.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    check_sets_differ(data)
    check_columns(data.parts)
    train, sets = (_streamed if data.stream else _in_memory)(data, tokenizer_config, vocab_size, cache, progress)
    tokenizer = train.tokenizer
    with bar(progress, "Tokenizing", sum(map(len, sets.values())), "rows"):
        encoded = {name: encode(texts, tokenizer, data.max_length, cache, progress) for name, texts in sets.items()}
        words = {name: tally(count_words(found.texts, data.cleaning)) for name, found in sets.items()}
    tokens = {name: tally_tokens(rows) for name, rows in {"train": train.rows, **encoded}.items()}
    trained = dict(zip(data.labels, train.labels, strict=True))
    counts = {"train": trained, **rows_per_label(data, sets)}
    return Prepared(
        tokenizer=tokenizer,
        pad=special_ids(tokenizer).pad,
        train=train.rows,
        validation=encoded["validation"],
        tests={name: encoded[name] for name in _tests(sets)},
        summary=summarise(
            data,
            train,
            sets,
            encoded,
            split=data.split,
            label_rows=counts,
            findings=(*train.findings, *label_findings(data, counts)),
            text_words=lengths_of_sets({"train": train.text_words, **words}),
            text_tokens=lengths_of_sets(tokens),
        ),
    )


def look(data: DataConfig) -> list[DataFinding]:
    """What :func:`prepare` would find worth saying of the data, without tokenizing any. Raises as that does."""
    check_columns(data.parts)
    if data.stream:
        return []
    parts, findings = load_and_look(data)
    sets = split(data, parts)
    return [*findings, *seen_findings(data, sets), *label_findings(data, rows_per_label(data, sets))]


def _tests(sets: Iterable[str]) -> list[str]:
    return [name for name in sets if name not in ("train", "validation")]


def _in_memory(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress
) -> tuple[TrainingSet[Encoded], dict[str, LabelledTexts]]:
    """The training set, and the texts of the others."""
    with bar(progress, "Reading data", None, "parts"):
        parts, findings = load_and_look(data)
        sets = split(data, parts)
    findings += seen_findings(data, sets)
    train = sets.pop("train")
    with bar(
        progress, "Training the tokenizer" if tokenizer_config.kind == "trained" else "Loading the tokenizer", None
    ):
        tokenizer = load_tokenizer(
            tokenizer_config, cleaning=data.cleaning, vocab_size=vocab_size, training_texts=map(in_one, train.texts)
        )
    with bar(progress, "Tokenizing the training set", len(train), "rows"):
        rows = encode(train, tokenizer, data.max_length, cache, progress)
    others = {name: [*map(in_one, sets[name].texts)] for name in _tests(sets)}
    overlap = count_overlaps(map(in_one, train.texts), others, "test sets", progress)
    labels = label_counts(train.labels, len(data.labels), several=data.separator is not None)
    known = train.fingerprint()
    words = tally(count_words(train.texts, data.cleaning))
    found = TrainingSet(tokenizer, rows, len(train), known, labels, overlap, findings=(*findings,), text_words=words)
    return found, sets


def _streamed(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress
) -> tuple[TrainingSet[Encoded], dict[str, LabelledTexts]]:
    """As :func:`_in_memory`, with the training set on disk."""
    names = [name for name in set_parts(data) if name != "train"]
    findings: list[DataFinding] = []
    with bar(progress, "Reading data", None, "parts"):
        parts: dict[str, LabelledTexts] = {}
        for part in data.parts:
            if part != "train":
                parts[part] = load_part(data, part, (empties := Empties()).add)
                findings += empties.findings(part)
        sets = draw(data, names, parts)

    def load(config: TokenizerConfig, texts: Iterable[str] | None) -> Tokenizer:
        trained = tokenizer_config.kind == "trained"
        return load_tokenizer(
            config, cleaning=data.cleaning, vocab_size=vocab_size, training_texts=texts, may_be_smaller=trained
        )

    empties = Empties()
    streaming = Streaming(class_stream(data, empties), cache, progress)
    with streaming.alone():
        trained_by = {"cleaning": data.cleaning, "vocab_size": vocab_size}
        tokenizer = streaming.tokenizer(tokenizer_config, load, trained_by)
        others = {name: [*map(in_one, sets[name].texts)] for name in _tests(sets)}
        encoder = ClassEncoder(tokenizer, data, empties)
        train = streaming.training_set(tokenizer, encoder, {"max_length": data.max_length}, others)
        return replace(train, findings=(*train.findings, *findings)), sets


def class_stream(data: DataConfig, empties: Empties | None = None) -> Stream:
    """The part ``train`` of a classifier's data, to be read piece by piece.

    Args:
        empties: counts the rows that have no text, anew whenever it is read from the beginning.
    """

    def pairs() -> Iterator[tuple[str, int]]:
        counted = empties or Empties()
        counted.rows = 0
        found = labelled(part_rows(data, "train", counted.add), data.labels)
        return ((str(text), label) for text, label in found)  # pairs of texts are never streamed: DataConfig sees to it

    settings: dict[str, object] = {"labels": data.labels, "empty": "left out"}
    if data.sampled("train"):
        settings["split_seed"] = data.split_seed
    return Stream(data.parts["train"], settings, pairs, len(data.labels), partial(check_classes, data))


class ClassEncoder:
    """Makes rows of a classifier's texts, each of at most ``data.max_length`` tokens."""

    def __init__(self, tokenizer: Tokenizer, data: DataConfig, empties: Empties) -> None:
        self._tokenizer, self._data, self._empties = tokenizer, data, empties
        self._truncated = 0
        self._words: Counter[int] = Counter()

    def pieces(self, texts: list[str], labels: list[int], *, last: bool) -> Pieces:
        """One row for each text."""
        encoded, _ = encode_texts(self._tokenizer, texts, self._data.max_length)
        self._truncated += encoded.truncated
        self._words += tally(count_words(texts, self._data.cleaning))
        return {"ids": encoded.ids, "offsets": encoded.offsets, "labels": np.array(labels, dtype=np.int64)}

    def facts(self) -> dict[str, object]:
        """Rows that were cut, those that had no text, and how many words the others have."""
        words = {str(number): texts for number, texts in self._words.items()}
        return {"truncated": self._truncated, "empty": self._empties.rows, "text_words": words}

    def build(self, pieces: Pieces) -> Encoded:
        """Some rows in memory."""
        ids, offsets, labels = (pieces[name] for name in ("ids", "offsets", "labels"))
        return Encoded(ids.astype(np.int32), offsets.astype(np.int64), labels.astype(np.int64), 0)


def summarise(
    config: DataSection,
    train: TrainingSet[Any],
    texts: Mapping[str, LabelledTexts],
    rows: Mapping[str, TrainingRows[Any]],
    **facts: Any,
) -> DataSummary:
    """What a run was trained and tested on.

    Args:
        texts: every other set, in order.
        rows: these sets encoded.
        facts: the summary's other fields.
    """
    fingerprints = {"train": train.fingerprint} | {name: found.fingerprint() for name, found in texts.items()}
    counts = {"train": train.texts} | {name: len(found) for name, found in texts.items()}
    encoded: dict[str, TrainingRows[Any]] = {"train": train.rows, **rows}
    lines = (f"{name} {counts[name]} {found}\n" for name, found in fingerprints.items())
    return DataSummary(
        synthetic=config.synthetic,
        rows={name: len(found) for name, found in encoded.items()},
        fingerprint=hashlib.sha256("".join(lines).encode()).hexdigest(),
        fingerprints=fingerprints,
        truncated_rows={name: found.truncated for name, found in encoded.items()},
        overlap=train.overlap,
        **facts,
    )


def prepare_test(
    config: DataConfig,
    tokenizer: Tokenizer,
    max_length: int,
    cache: Path | None,
    split: str,
    trained_on: Mapping[str, str] | None = None,
) -> Encoded:
    """Encode one set of a trained model's data with the model's own tokenizer.

    Only the parts that the set is drawn from are read.

    Args:
        trained_on: set → fingerprint, as training recorded it: other data cut by the same protocol would put
            training rows into the test set.
        split: ``test`` (the protocol's own test set), ``validation``, or a test set by name.

    Raises:
        InputError: no such set; names those there are.
        DataError: as in :func:`prepare`.
    """
    sets = set_parts(config)
    name = list(sets)[2] if split == "test" else split
    if name not in sets or name == "train":
        known = ", ".join(("test", *(key for key in sets if key != "train")))
        raise InputError(f"--split {split!r}: no such set; allowed: {known}")
    texts = set_texts(config, name)
    if trained_on and name in trained_on and texts.fingerprint() != trained_on[name]:
        raise DataError(
            f"split {config.split!r}: the {name} set is not the one of this model's training; its data changed since. "
            "Restore the data, or score a file of its own with --data FILE"
        )
    return encode(texts, tokenizer, max_length, cache)


def set_texts(config: DataConfig, name: str) -> LabelledTexts:
    """Read one set of a model's data, not encoded; only the parts that it is drawn from are read.

    Args:
        name: ``train``, ``validation`` or a test set by its own name.

    Raises:
        DataError: as in :func:`prepare`, or the model was imported without the data of this set.
    """
    parts = set_parts(config)[name]
    if not parts:
        raise DataError(unknown_set(name, own_file=True))
    return draw(config, (name,), {part: load_part(config, part) for part in parts})[name]


def encode_file(path: Path, data: DataConfig, tokenizer: Tokenizer, columns: Columns | None = None) -> Encoded:
    """Encode a labelled file as a model reads it whose own data is ``data``; rows without a text are left out.

    Raises DataError as :func:`file_texts`.
    """
    empties = Empties()
    texts = file_texts(path, data, columns, empties)
    return replace(encode(texts, tokenizer, data.max_length), empty=empties.rows)


def file_texts(
    path: Path, data: DataConfig, columns: Columns | None = None, empties: Empties | None = None
) -> LabelledTexts:
    """Read a labelled file for a model whose own data is ``data``; rows without a text are left out.

    Its columns are those that are named, else called as those of ``data``, or have well-known names (text …, label …).

    Args:
        empties: counts the rows that are left out.

    Raises:
        DataError: the file, its columns or its rows.
    """
    empties = empties or Empties()
    rows = with_text(read(own_file(path, data.parts, columns), data.labels, data.separator), empties.add)
    texts = label_rows(rows, data.labels)
    if not len(texts):
        raise DataError(f"{path}: no row of it has a text")
    return texts
