"""From a recipe to encoded sets: read, split, tokenize, and say what it all was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.cache import encode_cached
from edgeformer.data.encoding import Encoded, encode
from edgeformer.data.overlap import SeenTexts
from edgeformer.data.sources import file_source, read
from edgeformer.data.splits import Splits, draw, set_parts, split
from edgeformer.data.texts import LabelledTexts, label_rows, load_part, load_parts
from edgeformer.data.tokenization import SpecialIds, load_tokenizer, special_ids
from edgeformer.formats.data_config import DataConfig, TokenizerConfig
from edgeformer.formats.errors import DataError, InputError
from edgeformer.formats.manifest import DataSummary
from edgeformer.formats.progress import Progress, Silent


@dataclass(frozen=True)
class PreparedData:
    """Everything that training needs to know of the data; the texts themselves are gone."""

    tokenizer: Tokenizer
    special: SpecialIds
    train: Encoded
    validation: Encoded
    tests: dict[str, Encoded]
    summary: DataSummary

    @property
    def pad(self) -> int:
        """The token that fills up rows."""
        return self.special.pad


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress | None = None
) -> PreparedData:
    """Read, split and encode the data of a recipe, and count what its test sets share with its training set.

    Args:
        data, tokenizer_config: those sections of the recipe.
        vocab_size: its ``model.vocab_size``.
        cache: where encoded sets are kept between runs.

    Raises:
        DataError: anything about files, rows, labels, splits or the tokenizer.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    progress = progress or Silent()
    progress.start("Reading data", None, "parts")
    try:
        splits = split(data, load_parts(data))
    finally:
        progress.finish()
    tokenizer = load_tokenizer(
        tokenizer_config,
        cleaning=data.cleaning,
        vocab_size=vocab_size,
        training_texts=splits.train.texts,
    )
    sets = {"train": splits.train, "validation": splits.validation, **splits.tests}
    progress.start("Tokenizing", sum(map(len, sets.values())), "rows")
    try:
        encoded = {
            name: encode_cached(texts, tokenizer, data.max_length, cache, progress) for name, texts in sets.items()
        }
    finally:
        progress.finish()
    return PreparedData(
        tokenizer=tokenizer,
        special=special_ids(tokenizer),
        train=encoded["train"],
        validation=encoded["validation"],
        tests={name: encoded[name] for name in splits.tests},
        summary=_summary(data, splits, encoded, progress),
    )


def _summary(config: DataConfig, splits: Splits, encoded: dict[str, Encoded], progress: Progress) -> DataSummary:
    sets = {"train": splits.train, "validation": splits.validation, **splits.tests}
    progress.start("Comparing test sets with the training set", len(splits.tests), "sets")
    overlap = []
    try:
        seen = SeenTexts(splits.train.texts)
        for name, texts in splits.tests.items():
            overlap.append(seen.count(name, texts.texts))
            progress.advance()
    finally:
        progress.finish()
    return DataSummary(
        split=config.split,
        synthetic=config.synthetic,
        rows={name: len(texts) for name, texts in sets.items()},
        label_rows={name: _label_rows(texts, config.labels) for name, texts in sets.items()},
        fingerprint=_fingerprint(sets),
        fingerprints={name: texts.fingerprint() for name, texts in sets.items()},
        overlap=tuple(overlap),
        truncated_rows={name: rows.truncated for name, rows in encoded.items()},
    )


def _label_rows(texts: LabelledTexts, labels: Sequence[str]) -> dict[str, int]:
    counts = np.bincount(texts.labels, minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))


def _fingerprint(sets: dict[str, LabelledTexts]) -> str:
    digest = hashlib.sha256()
    for name, texts in sets.items():
        digest.update(f"{name} {len(texts)} {texts.fingerprint()}\n".encode())
    return digest.hexdigest()


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
    own = list(sets)[2]
    name = own if split == "test" else split
    if name not in sets or name == "train":
        known = ", ".join(("test", *(key for key in sets if key != "train")))
        raise InputError(f"--split {split!r}: no such set; allowed: {known}")
    texts = draw(config, name, {part: load_part(config, part) for part in sets[name]})
    if trained_on and name in trained_on and texts.fingerprint() != trained_on[name]:
        raise DataError(
            f"split {config.split!r}: the {name} set is not the one of this model's training; its data changed since. "
            "Restore the data, or score a file of its own with --data FILE"
        )
    return encode_cached(texts, tokenizer, max_length, cache)


def encode_file(path: Path, labels: Sequence[str], tokenizer: Tokenizer, max_length: int) -> Encoded:
    """Encode a labelled file whose columns have well-known names (text …, label …). Raises DataError."""
    texts = label_rows(read(file_source(path), labels), labels)
    return encode(tokenizer, texts.texts, texts.labels, max_length)
