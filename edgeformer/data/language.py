"""Data of language models: read paragraphs, tokenize them, make rows of tokens, summarize the sets."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import Source, TextConfig, TokenizerConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data.batching import Packer, TextRows, paragraph_rows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.prepare import summarize
from edgeformer.data.rows import LabelledTexts, join_pair, text_parts
from edgeformer.data.sources import read
from edgeformer.data.streaming import Stream, store_training_set
from edgeformer.data.tokenization import load_language_tokenizer


def prepare_text(
    config: TextConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress = SILENT
) -> Prepared[TextRows]:
    """Read and encode the parts of a recipe, and count the overlap of the other sets with the training set.

    Arguments and errors are those of :func:`~edgeformer.data.prepare.prepare`; a part needs a long paragraph.
    """
    # 1. Read the texts
    tests = [part for part in config.parts if part not in ("train", "validation")]
    texts: dict[str, list[str]] = {}
    with bar(progress, "Reading data", len(config.parts) - config.stream, "parts"):
        for part in ("validation", *tests, *([] if config.stream else ["train"])):
            texts[part] = list(paragraphs(config, part))
            progress.advance()
    if config.stream:
        limits = {"min_characters": config.min_characters, "first_n": config.first_n}
        pairs = lambda: ((text, 0) for text in paragraphs(config, "train"))  # noqa: E731
        stream = Stream(config.parts["train"], limits, pairs, classes=0)
    else:
        stream = Stream.of_texts(LabelledTexts.unlabelled(texts.pop("train")))

    def encode_pieces(
        tokenizer: Tokenizer, pieces: Iterator[LabelledTexts], facts: dict[str, Any]
    ) -> Iterator[TextRows]:
        plain = PlainText(tokenizer)
        packer = Packer(plain.boundary, config.sequence_length)
        for piece in itertools.chain(pieces, [LabelledTexts.unlabelled([])]):
            piece_texts = [*map(join_pair, piece.texts)]
            if config.mode == "packed":
                words = sum(len(text.split()) + 1 for text in piece_texts)  # a paragraph's end counts as a word
                yield packer.rows(plain.encode_all(piece_texts), words, last=not piece_texts)
            else:
                yield encode_paragraphs(piece_texts, config, plain)

    # 2. Tokenize the training set on disk, then the others
    load = partial(load_language_tokenizer, vocab_size=vocab_size)
    settings = {"mode": config.mode, "sequence_length": config.sequence_length, "vocab_size": vocab_size}
    tokenizer, stored = store_training_set(
        stream, tokenizer_config, load, encode_pieces, TextRows, settings, texts, cache, progress
    )
    plain = PlainText(tokenizer)
    with bar(progress, "Tokenizing", sum(map(len, texts.values())), "paragraphs"):
        rows = {part: encode_paragraphs(part_texts, config, plain, progress) for part, part_texts in texts.items()}
    other_texts = {part: LabelledTexts.unlabelled(part_texts) for part, part_texts in texts.items()}
    summary = summarize(
        config, stored, other_texts, rows, split="given",
        tokens={"train": stored.facts.tokens} | {part: part_rows.tokens for part, part_rows in rows.items()},
        words={"train": stored.facts.words} | {part: part_rows.words for part, part_rows in rows.items()},
    )  # fmt: skip
    return Prepared(
        tokenizer=tokenizer, pad=plain.boundary,  # the only special token
        train=stored if config.stream else stored.in_memory(), validation=rows["validation"],
        tests={part: rows[part] for part in tests}, summary=summary,
    )  # fmt: skip


def paragraphs(config: TextConfig, part: str) -> Iterator[str]:
    """Yield the paragraphs of a part; of the training part the first ``first_n``. Raises DataError."""
    first_n = config.first_n if part == "train" else None
    return long_paragraphs(config, config.parts[part], f"data.parts.{part}", first_n)


def long_paragraphs(
    config: TextConfig, sources: Sequence[Source], where: str, first_n: int | None = None
) -> Iterator[str]:
    """Yield the first stripped texts with more than min_characters characters. Raises DataError if there is none."""
    rows_read = long_rows = 0
    for row in (row for source in sources for row in read(source, with_labels=False)):
        rows_read += 1
        text = text_parts(row.text)[0].strip()
        if len(text) > config.min_characters:
            long_rows += 1
            yield text
        if long_rows == first_n:
            break
    if not long_rows:
        raise DataError(
            f"{where}: none of its {rows_read} paragraphs has more than {config.min_characters} characters; use "
            "longer paragraphs (in a text file each line is one), or reduce data.min_characters"
        )


def encode_paragraphs(
    texts: Sequence[str], config: TextConfig, plain: PlainText, progress: Progress = SILENT
) -> TextRows:
    """Encode paragraphs by ``config.mode``: packed, or one row each."""
    encoded = plain.encode_all(texts, progress)
    words = [len(text.split()) + 1 for text in texts]  # a paragraph's end counts as a word
    if config.mode == "packed":
        return Packer(plain.boundary, config.sequence_length).rows(encoded, sum(words), last=True)
    begin = plain.bounds.begin
    kept = config.sequence_length + 1 - len(begin)
    for index in np.flatnonzero(encoded.lengths >= kept).tolist():
        # For a truncated paragraph, count the words that its tokens spell in full, without its end.
        text = texts[index]
        end = plain.encode(text).offsets[kept - 1][1]
        is_word_cut = 0 < end < len(text) and not text[end - 1].isspace() and not text[end].isspace()
        words[index] = len(text[:end].split()) - is_word_cut
    # Without a token in front, the first token is not predicted, and no word is spelled in full without it.
    total = sum(words) - (0 if begin else len(words))
    return paragraph_rows(encoded, total, plain.boundary, config.sequence_length, begin)
