"""Vocabulary trimming: reduces a tokenizer to the tokens that its training text uses.

The training text is cut into the same tokens as before, unless only the most frequent tokens are kept. In another text
a removed token is cut into smaller pieces, for which the letters of the kept tokens stay as tokens. A letter that no
kept token has becomes the unknown token, in WordPiece with its word; bytes are always kept (byte-level BPE).
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.manifest import Vocabulary
from edgeformer.data.encoding import encode, encode_texts
from edgeformer.data.prepare import class_stream, cut_pool, set_texts
from edgeformer.data.rows import LabelledTexts, check_unchanged, hash_labels, hash_texts
from edgeformer.data.sources import load_parts
from edgeformer.data.splits import split
from edgeformer.data.streaming import Stream
from edgeformer.data.tokenization import keep_settings

Document = dict[str, Any]
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True)
class Trimmed:
    """A trimmed tokenizer; ``kept``: int64 [n], old number of each token by its new number, special tokens first."""

    tokenizer: Tokenizer
    kept: NDArray[np.int64]


@dataclass(frozen=True)
class Keeping:
    """Selection of tokens to keep besides special tokens and those that spell out other words."""

    first: int = 0  # first tokens of the vocabulary, used or not; see :func:`trim_tokenizer`
    max_used: int | None = None  # used tokens, by frequency, then by number; None: all


ALL_USED = Keeping()


def trim_to_training(
    config: DataConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str] | None = None, keeping: Keeping = ALL_USED
) -> tuple[Trimmed, Vocabulary]:
    """Keep the tokens of a classifier's training text, and measure the effect on validation text. Raises DataError."""
    if config.stream:
        stream, validation = class_stream(config, cut_pool(config), []), set_texts(config, "validation")
    else:
        sets = split(config, load_parts(config))
        stream, validation = Stream.of_texts(sets["train"]), sets["validation"]
    check_unchanged("validation", validation.fingerprint(), trained_on, "export without --vocab-trim")
    return trim_to_stream(stream, validation, tokenizer, config.max_length, trained_on, keeping)


def trim_to_stream(
    stream: Stream, other_texts: LabelledTexts, tokenizer: Tokenizer, max_length: int,
    trained_on: Mapping[str, str] | None = None, keeping: Keeping = ALL_USED,
) -> tuple[Trimmed, Vocabulary]:  # fmt: skip
    """Keep the tokens of the training texts of a stream, and measure the effect on other texts. Raises DataError."""
    digest, uses = hashlib.sha256(), Counter[int]()
    for piece in stream.pieces():
        hash_labels(digest, piece.labels)
    for piece in stream.pieces():
        hash_texts(digest, piece.texts)
        uses.update(encode_texts(tokenizer, piece.texts, max_length)[0].ids.tolist())
    check_unchanged("train", digest.hexdigest(), trained_on, "export without --vocab-trim")
    most_used = sorted(uses, key=lambda token: (-uses[token], token))[: keeping.max_used]
    trimmed = trim_tokenizer(tokenizer, most_used, keeping.first)
    return trimmed, trim_effect(tokenizer, trimmed, other_texts, max_length)


def trim_tokenizer(tokenizer: Tokenizer, used: Iterable[int], frequent: int = 0) -> Trimmed:
    """Keep the tokens ``used``, special and added tokens, the unknown token, and the tokens that spell out words.

    The rest of the tokenizer does not change, except for the numbers; see also :func:`keep_settings`. ``frequent``:
    also keep so many tokens from the beginning of the vocabulary, which is sorted by descending frequency; the
    ``[unused…]`` tokens of BERT do not count.

    Raises DataError: neither WordPiece, byte-level BPE nor Unigram, or a number that is no token.
    """
    # 1. Select the tokens
    document: Document = json.loads(tokenizer.to_str())
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    names = {number: name for name, number in numbers.items()}
    words = [number for number in sorted(names) if not _UNUSED.fullmatch(names[number])]
    requested = {*used, *words[:frequent]}
    unknown = sorted(requested - names.keys())
    if unknown:
        raise DataError(f"token {unknown[0]} of the text is not in the tokenizer, which has {len(names)} tokens")
    model = document["model"]
    if "merges" in model:  # older files have one string for each
        model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    added = {token["content"] for token in document["added_tokens"]}
    special = {token["content"] for token in document["added_tokens"] if token["special"]}
    special |= {_unknown_token(model)} & numbers.keys()
    requested_names = {names[number] for number in requested} - special - added
    # 2. Add the tokens that they are made of, and that spell out words with removed tokens
    vocabulary, splitter = model["vocab"], document["pre_tokenizer"] or {}
    is_byte_level = any(part["type"] == "ByteLevel" for part in splitter.get("pretokenizers", [splitter]) if part)
    if model["type"] == "Unigram":
        # A letter scores worse as unknown than as a piece, so kept pieces are preferred as before.
        spelling = {letter for name in requested_names for letter in name} & {name for name, _ in vocabulary}
    elif model["type"] == "WordPiece":
        # Single letters, as the first piece of a word and as a later one.
        prefix = model["continuing_subword_prefix"]
        letters = {letter for name in requested_names for letter in name.removeprefix(prefix)}
        spelling = {form for letter in letters for form in (letter, prefix + letter) if form in vocabulary}
    elif model["type"] == "BPE" and is_byte_level and not model.get("continuing_subword_prefix"):
        # Bytes, and both parts of every merge that makes one of the tokens, recursively.
        merges: dict[str, list[tuple[str, str]]] = {}
        for left, right in model["merges"]:
            merges.setdefault(left + right, []).append((left, right))
        pending = [*requested_names, *(letter for letter in ByteLevel.alphabet() if letter in vocabulary)]
        spelling = set(pending)
        while pending:
            for pair in merges.get(pending.pop(), ()):
                pending.extend(part for part in pair if part not in spelling)
                spelling.update(pair)
    else:
        name = "BPE that does not start from bytes" if model["type"] == "BPE" else model["type"]
        raise DataError(
            f"--vocab-trim: the tokenizer is {name}; only WordPiece, byte-level BPE and Unigram can be trimmed: "
            "only these can still spell every other word"
        )
    kept_names = special | added | requested_names | spelling
    kept = sorted((numbers[name] for name in kept_names), key=lambda number: (names[number] not in special, number))
    # 3. Number them anew, everywhere in the document
    new_numbers = {names[old]: new for new, old in enumerate(kept)}
    # Added tokens are in the model's vocabulary, too: the library would number them itself otherwise.
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        unknown_token = _unknown_token(model)
        model["unk_id"] = None if unknown_token is None else new_numbers.get(unknown_token)
        model["vocab"] = [[name, scores.get(name, 0.0)] for name in new_numbers]
    else:
        model["vocab"] = new_numbers
    if "merges" in model:
        model["merges"] = [
            [left, right] for left, right in model["merges"] if {left, right, left + right} <= new_numbers.keys()
        ]
    for token in document["added_tokens"]:
        token["id"] = new_numbers[token["content"]]
    # Processors put the special tokens around a text.
    processor = document["post_processor"] or {}
    for part in (processor, *processor.get("processors", ())):
        for key in {"cls", "sep"} & part.keys():
            part[key] = [part[key][0], new_numbers[part[key][0]]]
        for token in part.get("special_tokens", {}).values():
            token["ids"] = [new_numbers[name] for name in token["tokens"]]
    document["truncation"] = document["padding"] = None
    result = Tokenizer.from_str(json.dumps(document))
    if result.get_vocab(with_added_tokens=True) != new_numbers:
        raise DataError("the tokenizer numbers its tokens differently than its file, so it cannot be trimmed")
    side = (tokenizer.truncation or {}).get("direction", "right")
    keep_settings(result, (tokenizer.padding or {}).get("pad_token"), side)
    return Trimmed(result, np.array(kept, dtype=np.int64))


def _unknown_token(model: Document) -> str | None:
    """Return the name of the unknown token of a tokenizer's model."""
    number = model.get("unk_id")
    return model["vocab"][number][0] if number is not None else model.get("unk_token")


def trim_effect(original: Tokenizer, trimmed: Trimmed, texts: LabelledTexts, max_length: int) -> Vocabulary:
    """Compare how the trimmed and the original tokenizer cut ``texts``, each up to ``max_length`` tokens."""
    original_rows = encode(texts, original, max_length)
    trimmed_rows = encode(texts, trimmed.tokenizer, max_length)
    numbers = original.get_vocab(with_added_tokens=True)
    is_kept = np.isin(original_rows.ids, trimmed.kept)
    unknown = _unknown_token(json.loads(original.to_str())["model"])
    new_unknown = 0
    if unknown in numbers:
        unknown_ids = numbers[unknown], trimmed.tokenizer.token_to_id(unknown)
        before, after = (
            np.add.reduceat(rows.ids == number, rows.offsets[:-1], dtype=np.int64)
            for rows, number in zip((original_rows, trimmed_rows), unknown_ids, strict=True)
        )
        new_unknown = int(np.maximum(after - before, 0).sum())
    # A row is cut as before exactly if all its tokens were kept.
    changed_rows = int(np.logical_or.reduceat(~is_kept, original_rows.offsets[:-1]).sum())
    return Vocabulary(
        kept=len(trimmed.kept), original=max(numbers.values()) + 1, coverage=float(is_kept.mean()),
        unknown=new_unknown / len(original_rows.ids), changed_rows=changed_rows, rows=len(original_rows),
    )  # fmt: skip
