"""From a classifier's recipe to encoded sets: read, split, tokenize, and say what it all was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.encoding import Encoded, Prepared, encode
from edgeformer.data.overlap import count_overlaps
from edgeformer.data.rows import LabelledTexts, label_rows
from edgeformer.data.sources import file_source, load_part, load_parts, read
from edgeformer.data.splits import draw, set_parts, split
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.formats.data_config import DataConfig, DataSection, TokenizerConfig
from edgeformer.formats.errors import DataError, InputError
from edgeformer.formats.manifest import DataSummary
from edgeformer.formats.progress import SILENT, Progress, bar


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress = SILENT
) -> Prepared[Encoded]:
    """Read, split and encode the data of a recipe, and count what its test sets share with its training set.

    Args:
        data, tokenizer_config: those sections of the recipe.
        vocab_size: its ``model.vocab_size``.
        cache: where encoded sets are kept between runs.

    Raises:
        DataError: anything about files, rows, labels, splits or the tokenizer.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    with bar(progress, "Reading data", None, "parts"):
        sets = split(data, load_parts(data))
    training_texts = sets["train"].texts
    tokenizer = load_tokenizer(
        tokenizer_config, cleaning=data.cleaning, vocab_size=vocab_size, training_texts=training_texts
    )
    with bar(progress, "Tokenizing", sum(map(len, sets.values())), "rows"):
        encoded = {name: encode(texts, tokenizer, data.max_length, cache, progress) for name, texts in sets.items()}
    tests = list(sets)[2:]
    overlap = count_overlaps(training_texts, {name: sets[name].texts for name in tests}, "test sets", progress)
    counts = {name: np.bincount(texts.labels, minlength=len(data.labels)).tolist() for name, texts in sets.items()}
    labelled = {name: dict(zip(data.labels, numbers, strict=True)) for name, numbers in counts.items()}
    return Prepared(
        tokenizer=tokenizer,
        pad=special_ids(tokenizer).pad,
        train=encoded["train"],
        validation=encoded["validation"],
        tests={name: encoded[name] for name in tests},
        summary=summarise(data, sets, encoded, split=data.split, label_rows=labelled, overlap=overlap),
    )


def summarise(
    config: DataSection, texts: Mapping[str, LabelledTexts], rows: Mapping[str, Any], **facts: Any
) -> DataSummary:
    """What a run was trained and tested on.

    Args:
        texts: every set, in order.
        rows: the same sets encoded: Encoded or TextRows.
        facts: the summary's other fields.
    """
    fingerprints = {name: found.fingerprint() for name, found in texts.items()}
    lines = (f"{name} {len(found)} {fingerprints[name]}\n" for name, found in texts.items())
    return DataSummary(
        synthetic=config.synthetic,
        rows={name: len(found) for name, found in rows.items()},
        fingerprint=hashlib.sha256("".join(lines).encode()).hexdigest(),
        fingerprints=fingerprints,
        truncated_rows={name: found.truncated for name, found in rows.items()},
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
    texts = draw(config, (name,), {part: load_part(config, part) for part in sets[name]})[name]
    if trained_on and name in trained_on and texts.fingerprint() != trained_on[name]:
        raise DataError(
            f"split {config.split!r}: the {name} set is not the one of this model's training; its data changed since. "
            "Restore the data, or score a file of its own with --data FILE"
        )
    return encode(texts, tokenizer, max_length, cache)


def encode_file(path: Path, labels: Sequence[str], tokenizer: Tokenizer, max_length: int) -> Encoded:
    """Encode a labelled file whose columns have well-known names (text …, label …). Raises DataError."""
    return encode(label_rows(read(file_source(path), labels), labels), tokenizer, max_length)
