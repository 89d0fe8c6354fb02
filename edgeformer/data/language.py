"""From a language model's recipe to rows of tokens: read paragraphs, tokenize, cut into rows, say what it all was."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.data.batching import TextRows, cut_paragraphs, packed_rows, paragraph_rows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.overlap import count_overlaps
from edgeformer.data.prepare import summarise
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import file_source, read
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.formats.data_config import Source, TextConfig, TokenizerConfig
from edgeformer.formats.errors import DataError, InputError
from edgeformer.formats.manifest import OverlapCount
from edgeformer.formats.progress import SILENT, Progress, bar

OVERLAP_WORDS = 10_000_000
"""Training text up to this many words is compared with the other sets (on WikiText-2 that took 125 bytes a word)."""


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
        vocab_size: its ``model.vocab_size``.
        cache: where encoded sets are kept between runs.

    Raises:
        DataError: anything about files, columns or the tokenizer; a part without a paragraph that is long enough.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    texts: dict[str, list[str]] = {}
    with bar(progress, "Reading data", len(config.parts), "parts"):
        for part in ("train", "validation", *_tests(config)):
            texts[part] = _paragraphs(config, part)
            progress.advance()
    tokenizer = load_language_tokenizer(tokenizer_config, vocab_size=vocab_size, training_texts=texts["train"])
    plain = PlainText(tokenizer)
    with bar(progress, "Tokenizing", sum(map(len, texts.values())), "paragraphs"):
        rows = {part: _rows(config, plain, found, cache, progress) for part, found in texts.items()}
    words, overlap = sum(len(text.split()) for text in texts["train"]), tuple[OverlapCount, ...]()
    if words > OVERLAP_WORDS:
        progress.message(
            f"not compared for duplicates: {words:,} words of training text are more than {OVERLAP_WORDS:,}"
        )
    else:
        others = {part: found for part, found in texts.items() if part != "train"}
        overlap = count_overlaps(texts["train"], others, "the other sets", progress)
    return Prepared(
        tokenizer=tokenizer,
        pad=plain.boundary,  # the only special token
        train=rows["train"],
        validation=rows["validation"],
        tests={part: rows[part] for part in _tests(config)},
        summary=summarise(
            config,
            {part: LabelledTexts.unlabelled(found) for part, found in texts.items()},
            rows,
            split="given",
            tokens={part: found.tokens for part, found in rows.items()},
            words={part: found.words for part, found in rows.items()},
            overlap=overlap,
        ),
    )


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
    texts = _paragraphs(config, name)
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


def encode_text_file(path: Path, config: TextConfig, tokenizer: Tokenizer) -> TextRows:
    """Encode a file of paragraphs as the model's own sets were: plain text, or a table with a text column.

    Raises:
        DataError: the file cannot be read, has no text column, or no paragraph that is long enough.
    """
    texts = _long_enough(config, (file_source(path, labelled=False),), str(path))
    return _rows(config, PlainText(tokenizer), texts, None)


def _tests(config: TextConfig) -> tuple[str, ...]:
    return tuple(part for part in config.parts if part not in ("train", "validation"))


def _paragraphs(config: TextConfig, part: str) -> list[str]:
    """The stripped paragraphs of a part that are long enough; first_n of them for training. Raises DataError."""
    first_n = config.first_n if part == "train" else None
    return _long_enough(config, config.parts[part], f"data.parts.{part}", first_n)


def _long_enough(config: TextConfig, sources: Sequence[Source], where: str, first_n: int | None = None) -> list[str]:
    """The first stripped texts with more than min_characters characters. Raises DataError where there is none."""
    no_label = {"label": None, "label_value": None, "skip_unlabelled": False}
    plain = [found if found.kind == "synthetic-reviews" else found.model_copy(update=no_label) for found in sources]
    seen = 0
    texts: list[str] = []
    for row in itertools.chain.from_iterable(map(read, plain)):
        seen += 1
        text = row.text.strip()
        if len(text) > config.min_characters:
            texts.append(text)
        if len(texts) == first_n:
            break
    if not texts:
        raise DataError(
            f"{where}: none of its {seen} paragraphs has more than {config.min_characters} characters; give it longer "
            "ones (a text file has one paragraph per line), or lower data.min_characters"
        )
    return texts


def _rows(
    config: TextConfig, plain: PlainText, texts: Sequence[str], cache: Path | None, progress: Progress = SILENT
) -> TextRows:
    encoded = plain.encode_all(texts, cache, progress)
    words = [len(text.split()) + 1 for text in texts]
    if config.mode == "packed":
        return packed_rows(encoded, sum(words), plain.boundary, config.sequence_length)
    for index in cut_paragraphs(encoded, config.sequence_length).tolist():
        # Only the words that the tokens in front of the cut spell in full; the paragraph's end is not among them.
        text = texts[index]
        end = plain.encode(text).offsets[config.sequence_length - 1][1]
        torn = 0 < end < len(text) and not text[end - 1].isspace() and not text[end].isspace()
        words[index] = len(text[:end].split()) - torn
    return paragraph_rows(encoded, sum(words), plain.boundary, config.sequence_length)
