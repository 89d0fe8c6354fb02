"""Data of language models: read paragraphs, tokenize them, make rows of tokens, summarize the sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import Source, TextConfig, TokenizerConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data.batching import Packer, TextRows, paragraph_rows
from edgeformer.data.encoding import PlainText, Prepared, TrainingRows
from edgeformer.data.prepare import summarize
from edgeformer.data.rows import LabelledTexts, Text, check_unchanged, join_pair
from edgeformer.data.sources import Columns, file_source, read
from edgeformer.data.storage import Pieces
from edgeformer.data.streaming import Stream, store_training_set
from edgeformer.data.tokenization import load_language_tokenizer


def prepare_text(
    config: TextConfig,
    tokenizer_config: TokenizerConfig,
    vocab_size: int,
    cache: Path,
    progress: Progress = SILENT,
) -> Prepared[TextRows]:
    """Read and encode the parts of a recipe, and count the overlap of the other sets with the training set.

    Args:
        vocab_size: ``model.vocab_size`` of the recipe. A trained tokenizer may have fewer tokens.
        cache: folder of encoded sets.

    Raises:
        DataError: a file, a column or the tokenizer is unusable; a part has no paragraph that is long enough.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """

    def read_part(part: str) -> list[str]:
        texts = list(_paragraphs(config, part))
        progress.advance()
        return texts

    with bar(progress, "Reading data", len(config.parts) - config.stream, "parts"):
        texts = {part: read_part(part) for part in ("validation", *_test_parts(config))}
        settings = {"min_characters": config.min_characters, "first_n": config.first_n}
        if config.stream:
            pairs = lambda: ((text, 0) for text in _paragraphs(config, "train"))  # noqa: E731
            stream = Stream(config.parts["train"], settings, pairs, classes=0)
        else:
            stream = Stream.of_texts(LabelledTexts.unlabelled(read_part("train")))
    tokenizer, stored = store_training_set(
        stream,
        tokenizer_config,
        partial(load_language_tokenizer, vocab_size=vocab_size),
        lambda tokenizer: _TextEncoder(config, PlainText(tokenizer)),
        lambda pieces, facts: TextRows(
            pieces["ids"],
            pieces["offsets"],
            pieces.get("starts"),
            facts.tokens,
            facts.words,
            facts.texts,
            facts.truncated,
        ),
        {"mode": config.mode, "sequence_length": config.sequence_length, "vocab_size": vocab_size},
        texts,
        cache,
        progress,
    )
    train: TrainingRows[TextRows] = stored if config.stream else stored.in_memory()
    plain = PlainText(tokenizer)
    with bar(progress, "Tokenizing", sum(map(len, texts.values())), "paragraphs"):
        rows = {part: _encode(config, plain, part_texts, progress) for part, part_texts in texts.items()}
    return Prepared(
        tokenizer=tokenizer,
        pad=plain.boundary,  # the only special token
        train=train,
        validation=rows["validation"],
        tests={part: rows[part] for part in _test_parts(config)},
        summary=summarize(
            config,
            stored,
            {part: LabelledTexts.unlabelled(part_texts) for part, part_texts in texts.items()},
            rows,
            split="given",
            tokens={"train": stored.facts.tokens} | {part: part_rows.tokens for part, part_rows in rows.items()},
            words={"train": stored.facts.words} | {part: part_rows.words for part, part_rows in rows.items()},
        ),
    )


class _TextEncoder:
    """Makes rows of a language model's paragraphs."""

    def __init__(self, config: TextConfig, plain: PlainText) -> None:
        self._config, self._plain = config, plain
        self._packer = Packer(plain.boundary, config.sequence_length)
        self._counts = dict.fromkeys(("tokens", "words", "truncated"), 0)

    def pieces(self, texts: list[Text], labels: list[int], *, last: bool) -> Pieces:
        paragraphs = [*map(join_pair, texts)]
        if self._config.mode == "packed":
            encoded = self._plain.encode_all(paragraphs)
            rows = self._packer.rows(encoded, sum(_word_counts(paragraphs)), last=last)
        else:
            rows = _encode(self._config, self._plain, paragraphs)
        for name in self._counts:
            self._counts[name] += getattr(rows, name)
        starts = {} if rows.starts is None else {"starts": rows.starts}
        return {"ids": rows.ids, "offsets": rows.offsets, **starts}

    def facts(self) -> dict[str, int]:
        return self._counts


def prepare_text_set(
    config: TextConfig,
    tokenizer: Tokenizer,
    split: str,
    trained_on: Mapping[str, str] | None = None,
) -> TextRows:
    """Encode one set of a trained model's text with the model's tokenizer. Reads only the part of that set.

    Args:
        split: name of a set, or ``test`` as :func:`text_set_name` resolves it.
        trained_on: set → fingerprint, as recorded by training.

    Raises:
        InputError: no such set.
        DataError: as in :func:`prepare_text`, or the text differs from that of training.
    """
    name = text_set_name(config, split)
    if name == "train" or name not in config.parts:
        allowed = ", ".join(dict.fromkeys(("test", "validation", *_test_parts(config))))
        raise InputError(f"--split {split!r}: no such set; allowed: {allowed}")
    texts = list(_paragraphs(config, name))
    fingerprint = LabelledTexts.unlabelled(texts).fingerprint()
    check_unchanged(name, fingerprint, trained_on, "score a file of its own with --data FILE")
    return encode_paragraphs(texts, config, tokenizer)


def text_set_name(config: TextConfig, split: str) -> str:
    """Return the set that ``split`` names: ``test`` is the set of that name, else the first test set, or validation."""
    tests = _test_parts(config)
    if split == "test" and "test" not in tests:
        return tests[0] if tests else "validation"
    return split


def encode_text_file(path: Path, config: TextConfig, tokenizer: Tokenizer, columns: Columns | None = None) -> TextRows:
    """Encode the paragraphs of a file (plain text, or a table with a text column) like the model's own sets.

    Raises DataError: the file cannot be read, has no text column, or no paragraph that is long enough.
    """
    return encode_paragraphs(text_file(path, config, columns), config, tokenizer)


def text_file(path: Path, config: TextConfig, columns: Columns | None = None) -> list[str]:
    """Read the paragraphs of a file that are long enough for ``config``. Raises DataError as encode_text_file."""
    if columns is not None and (columns.label or columns.text_pair):
        raise DataError(f"{path}: a language model reads texts without labels or second texts; name the text only")
    return list(_long_paragraphs(config, (file_source(path, labelled=False, columns=columns),), str(path)))


def set_paragraphs(config: TextConfig, name: str) -> list[str]:
    """Read the paragraphs of one set, also of ``train``. Raises DataError as :func:`prepare_text`."""
    return list(_paragraphs(config, name))


def encode_paragraphs(texts: Sequence[str], config: TextConfig, tokenizer: Tokenizer) -> TextRows:
    """Encode paragraphs as ``config`` says, with a trained model's tokenizer."""
    return _encode(config, PlainText(tokenizer), texts)


def _test_parts(config: TextConfig) -> tuple[str, ...]:
    return tuple(part for part in config.parts if part not in ("train", "validation"))


def _paragraphs(config: TextConfig, part: str) -> Iterator[str]:
    """Yield the paragraphs of a part; of the training part the first ``first_n``. Raises DataError."""
    first_n = config.first_n if part == "train" else None
    return _long_paragraphs(config, config.parts[part], f"data.parts.{part}", first_n)


def _long_paragraphs(
    config: TextConfig, sources: Sequence[Source], where: str, first_n: int | None = None
) -> Iterator[str]:
    """Yield the first stripped texts with more than min_characters characters. Raises DataError if there is none."""
    no_label = {"text_pair": None, "label": None, "label_value": None, "skip_unlabelled": False}
    plain = [source if source.kind == "synthetic-reviews" else source.model_copy(update=no_label) for source in sources]
    rows_read = long_rows = 0
    for row in itertools.chain.from_iterable(map(read, plain)):
        rows_read += 1
        text = str(row.text).strip()
        if len(text) > config.min_characters:
            long_rows += 1
            yield text
        if long_rows == first_n:
            break
    if not long_rows:
        raise DataError(
            f"{where}: none of its {rows_read} paragraphs has more than {config.min_characters} characters; give it "
            "longer ones (a text file has one paragraph per line), or lower data.min_characters"
        )


def _encode(config: TextConfig, plain: PlainText, texts: Sequence[str], progress: Progress = SILENT) -> TextRows:
    encoded = plain.encode_all(texts, progress)
    if config.mode == "packed":
        packer = Packer(plain.boundary, config.sequence_length)
        return packer.rows(encoded, sum(_word_counts(texts)), last=True)
    words = _word_counts(texts)
    for index in np.flatnonzero(encoded.lengths >= config.sequence_length).tolist():
        # Of a truncated paragraph count the words that its tokens spell in full, and not its end.
        text = texts[index]
        end = plain.encode(text).offsets[config.sequence_length - 1][1]
        is_word_cut = 0 < end < len(text) and not text[end - 1].isspace() and not text[end].isspace()
        words[index] = len(text[:end].split()) - is_word_cut
    return paragraph_rows(encoded, sum(words), plain.boundary, config.sequence_length)


def _word_counts(texts: Sequence[str]) -> list[int]:
    """Count the words of each paragraph, plus one for its end."""
    return [len(text.split()) + 1 for text in texts]
