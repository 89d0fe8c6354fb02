"""From a language model's recipe to rows of tokens: read paragraphs, tokenize, cut into rows, say what it all was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import Source, TextConfig, TokenizerConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data.batching import Packer, TextRows, cut_paragraphs, packed_rows, paragraph_rows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.overlap import count_overlaps
from edgeformer.data.prepare import summarise
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import Columns, check_columns, file_source, read
from edgeformer.data.stored import Pieces
from edgeformer.data.streaming import Stream, Streaming, TrainingSet
from edgeformer.data.tokenization import load_language_tokenizer


def prepare_text(
    config: TextConfig,
    tokenizer_config: TokenizerConfig,
    vocab_size: int,
    cache: Path,
    progress: Progress = SILENT,
) -> Prepared[TextRows]:
    """Read and encode the parts of a recipe, and count what the other sets share with the training set.

    Args:
        config, tokenizer_config: those sections of the recipe.
        vocab_size: its ``model.vocab_size``; a tokenizer that is trained here may come out smaller.
        cache: where encoded sets are kept between runs.

    Raises:
        DataError: anything about files, columns or the tokenizer; a part without a paragraph that is long enough.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    check_columns(config.parts, labelled=False)
    train, texts = (_streamed if config.stream else _in_memory)(config, tokenizer_config, vocab_size, cache, progress)
    plain = PlainText(train.tokenizer)
    with bar(progress, "Tokenizing", sum(map(len, texts.values())), "paragraphs"):
        rows = {part: _rows(config, plain, found, cache, progress) for part, found in texts.items()}
    counted: dict[str, TrainingSet[TextRows] | TextRows] = {"train": train, **rows}
    return Prepared(
        tokenizer=train.tokenizer,
        pad=plain.boundary,  # the only special token
        train=train.rows,
        validation=rows["validation"],
        tests={part: rows[part] for part in _tests(config)},
        summary=summarise(
            config,
            train,
            {part: LabelledTexts.unlabelled(found) for part, found in texts.items()},
            rows,
            split="given",
            tokens={part: found.tokens for part, found in counted.items()},
            words={part: found.words for part, found in counted.items()},
        ),
    )


def _other_parts(config: TextConfig, progress: Progress) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for part in ("validation", *_tests(config)):
        texts[part] = list(_paragraphs(config, part))
        progress.advance()
    return texts


def _in_memory(
    config: TextConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress
) -> tuple[TrainingSet[TextRows], dict[str, list[str]]]:
    """The training set, and the texts of the others."""
    with bar(progress, "Reading data", len(config.parts), "parts"):
        train = list(_paragraphs(config, "train"))
        progress.advance()
        texts = _other_parts(config, progress)
    with bar(
        progress, "Training the tokenizer" if tokenizer_config.kind == "trained" else "Loading the tokenizer", None
    ):
        tokenizer = load_language_tokenizer(tokenizer_config, vocab_size=vocab_size, training_texts=train)
    with bar(progress, "Tokenizing the training set", len(train), "paragraphs"):
        rows = _rows(config, PlainText(tokenizer), train, cache, progress)
    overlap = count_overlaps(train, texts, "the other sets", progress)
    known = LabelledTexts.unlabelled(train).fingerprint()
    return TrainingSet(tokenizer, rows, len(train), known, (), overlap, rows.tokens, rows.words), texts


def _streamed(
    config: TextConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress
) -> tuple[TrainingSet[TextRows], dict[str, list[str]]]:
    """As :func:`_in_memory`, with the training set on disk."""
    with bar(progress, "Reading data", len(config.parts) - 1, "parts"):
        texts = _other_parts(config, progress)

    def load(tokenizer: TokenizerConfig, training_texts: Iterable[str] | None) -> Tokenizer:
        trained = tokenizer_config.kind == "trained"
        return load_language_tokenizer(
            tokenizer, vocab_size=vocab_size, training_texts=training_texts, may_be_smaller=trained
        )

    decided_by = {"min_characters": config.min_characters, "first_n": config.first_n}
    stream = Stream(
        config.parts["train"], decided_by, lambda: ((text, 0) for text in _paragraphs(config, "train")), classes=0
    )
    streaming = Streaming(stream, cache, progress)
    with streaming.alone():
        tokenizer = streaming.tokenizer(tokenizer_config, load, {"language": True, "vocab_size": vocab_size})
        encoder = _TextEncoder(config, PlainText(tokenizer))
        cut_by = {"mode": config.mode, "sequence_length": config.sequence_length}
        return streaming.training_set(tokenizer, encoder, cut_by, texts), texts


class _TextEncoder:
    """Makes rows of a language model's paragraphs."""

    def __init__(self, config: TextConfig, plain: PlainText) -> None:
        self._config, self._plain = config, plain
        self._packer = Packer(plain.boundary, config.sequence_length)
        self._counts = dict.fromkeys(("tokens", "words", "paragraphs", "truncated"), 0)

    def pieces(self, texts: list[str], labels: list[int], *, last: bool) -> Pieces:
        """A row for each paragraph, or the packed rows that are full."""
        if self._config.mode == "packed":
            encoded = self._plain.encode_all(texts, None)
            rows = self._packer.rows(encoded, _all_words(texts), last=last)
        else:
            rows = _rows(self._config, self._plain, texts, None)
        for name in self._counts:
            self._counts[name] += getattr(rows, name)
        starts = {} if rows.starts is None else {"starts": rows.starts}
        return {"ids": rows.ids, "offsets": rows.offsets, **starts}

    def facts(self) -> dict[str, int]:
        """Tokens, words, paragraphs, and how many of these were cut."""
        return self._counts

    def build(self, pieces: Pieces) -> TextRows:
        """Some rows in memory."""
        ids, offsets = pieces["ids"].astype(np.int32), pieces["offsets"].astype(np.int64)
        starts = pieces["starts"].astype(np.int32) if "starts" in pieces else None
        return TextRows(ids, offsets, starts, len(ids) - len(offsets) + 1, 0, 0, 0)


def prepare_text_set(
    config: TextConfig,
    tokenizer: Tokenizer,
    cache: Path | None,
    split: str,
    trained_on: Mapping[str, str] | None = None,
) -> TextRows:
    """Encode one set of a trained model's text with the model's own tokenizer; only that part is read.

    Args:
        split: a set by name, or ``test``: the set of that name, else the first test set, else validation.
        trained_on: set → fingerprint, as training recorded it.

    Raises:
        InputError: no such set; names those there are.
        DataError: as in :func:`prepare_text`, or the text is not the one of training.
    """
    tests, name = _tests(config), text_set_name(config, split)
    if name == "train" or name not in config.parts:
        known = ", ".join(dict.fromkeys(("test", "validation", *tests)))
        raise InputError(f"--split {split!r}: no such set; allowed: {known}")
    texts = list(_paragraphs(config, name))
    if trained_on and name in trained_on and LabelledTexts.unlabelled(texts).fingerprint() != trained_on[name]:
        raise DataError(
            f"data.parts.{name}: the text is not the one of this model's training; it changed since. Restore it, or "
            "score a file of its own with --data FILE"
        )
    return _rows(config, PlainText(tokenizer), texts, cache)


def text_set_name(config: TextConfig, split: str) -> str:
    """The set that ``split`` stands for: ``test`` is the set of that name, else the first test set, else validation."""
    tests = _tests(config)
    if split == "test" and "test" not in tests:
        return tests[0] if tests else "validation"
    return split


def encode_text_file(path: Path, config: TextConfig, tokenizer: Tokenizer, columns: Columns | None = None) -> TextRows:
    """Encode a file of paragraphs as the model's own sets were: plain text, or a table with a text column.

    Args:
        columns: the text's, where it was named.

    Raises:
        DataError: the file cannot be read, has no text column, or no paragraph that is long enough.
    """
    return encode_paragraphs(text_file(path, config, columns), config, tokenizer)


def text_file(path: Path, config: TextConfig, columns: Columns | None = None) -> list[str]:
    """Read the paragraphs of a file that are long enough for ``config``. Raises DataError as encode_text_file."""
    if columns is not None and (columns.label or columns.text_pair):
        raise DataError(f"{path}: a language model reads texts without labels or second texts; name the text only")
    return list(_long_enough(config, (file_source(path, labelled=False, columns=columns),), str(path)))


def set_paragraphs(config: TextConfig, name: str) -> list[str]:
    """Read the paragraphs of one set, ``train`` among them. Raises DataError as :func:`prepare_text`."""
    return list(_paragraphs(config, name))


def encode_paragraphs(texts: Sequence[str], config: TextConfig, tokenizer: Tokenizer) -> TextRows:
    """Encode paragraphs as ``config`` says, with a trained model's tokenizer."""
    return _rows(config, PlainText(tokenizer), texts, None)


def _tests(config: TextConfig) -> tuple[str, ...]:
    return tuple(part for part in config.parts if part not in ("train", "validation"))


def _paragraphs(config: TextConfig, part: str) -> Iterator[str]:
    """The stripped paragraphs of a part that are long enough; first_n of them for training. Raises DataError."""
    first_n = config.first_n if part == "train" else None
    return _long_enough(config, config.parts[part], f"data.parts.{part}", first_n)


def _long_enough(
    config: TextConfig, sources: Sequence[Source], where: str, first_n: int | None = None
) -> Iterator[str]:
    """The first stripped texts with more than min_characters characters. Raises DataError where there is none."""
    no_label = {"text_pair": None, "label": None, "label_value": None, "skip_unlabelled": False}
    plain = [found if found.kind == "synthetic-reviews" else found.model_copy(update=no_label) for found in sources]
    seen = found = 0
    for row in itertools.chain.from_iterable(map(read, plain)):
        seen += 1
        text = str(row.text).strip()
        if len(text) > config.min_characters:
            found += 1
            yield text
        if found == first_n:
            break
    if not found:
        raise DataError(
            f"{where}: none of its {seen} paragraphs has more than {config.min_characters} characters; give it longer "
            "ones (a text file has one paragraph per line), or lower data.min_characters"
        )


def _rows(
    config: TextConfig, plain: PlainText, texts: Sequence[str], cache: Path | None, progress: Progress = SILENT
) -> TextRows:
    encoded = plain.encode_all(texts, cache, progress)
    if config.mode == "packed":
        return packed_rows(encoded, _all_words(texts), plain.boundary, config.sequence_length)
    words = [len(text.split()) + 1 for text in texts]
    for index in cut_paragraphs(encoded, config.sequence_length).tolist():
        # Only the words that the tokens in front of the cut spell in full; the paragraph's end is not among them.
        text = texts[index]
        end = plain.encode(text).offsets[config.sequence_length - 1][1]
        torn = 0 < end < len(text) and not text[end - 1].isspace() and not text[end].isspace()
        words[index] = len(text[:end].split()) - torn
    return paragraph_rows(encoded, sum(words), plain.boundary, config.sequence_length)


def _all_words(texts: Sequence[str]) -> int:
    """Words of whole paragraphs, and one for the end of each."""
    return sum(len(text.split()) + 1 for text in texts)
