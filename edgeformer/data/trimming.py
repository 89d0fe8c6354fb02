"""Vocabulary trimming: a classifier's tokenizer with only the tokens that its training text uses.

The training text is cut into the same tokens as before, unless only the most frequent of them are kept. A text may
hold a token that is gone; it is then cut into smaller pieces, for which the letters of the kept tokens stay, as pieces
of their own. A word with a letter that no kept token has becomes [UNK] (WordPiece); bytes are always kept
(byte-level BPE).
"""

from __future__ import annotations

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
from edgeformer.data.encoding import Encoded, counted, encode
from edgeformer.data.prepare import class_stream
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_part, load_parts
from edgeformer.data.splits import draw, split
from edgeformer.data.streaming import streamed_tokens

Document = dict[str, Any]
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True)
class Trimmed:
    """``kept``: int64 [n], the old number of every token in the order of the new ones; special tokens come first."""

    tokenizer: Tokenizer
    kept: NDArray[np.int64]


@dataclass(frozen=True)
class Keeping:
    """Which tokens stay, beside special ones and what others are spelled out with.

    Attributes:
        first: so many from the beginning of the vocabulary, used or not, as :func:`trim_tokenizer` has it.
        most: of those that the text uses, so many that it uses most often (of two that it uses as often the lower
            number); None: all of them.
    """

    first: int = 0
    most: int | None = None

    def used(self, counts: Mapping[int, int]) -> list[int]:
        """Of the tokens that a text uses those that stay. ``counts``: token → how often it uses it."""
        return sorted(counts, key=lambda token: (-counts[token], token))[: self.most]


ALL_USED = Keeping()


def trim_to_training(
    config: DataConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str] | None = None, keeping: Keeping = ALL_USED
) -> tuple[Trimmed, Vocabulary]:
    """Read the training text again, keep its tokens, and see what that does to the validation text.

    Args:
        config: the data of the run's recipe.
        tokenizer: the run's own.
        trained_on: set → fingerprint, as training recorded it.
        keeping: which tokens stay.

    Raises:
        DataError: the data cannot be read, or is not what the run was trained on; a tokenizer that cannot be trimmed.
    """
    if config.stream:
        used, known = streamed_tokens(class_stream(config), tokenizer, config.max_length)
        validation = draw(config, ("validation",), {"validation": load_part(config, "validation")})["validation"]
    else:
        sets = split(config, load_parts(config))
        train, validation = sets["train"], sets["validation"]
        used, known = token_counts(train, tokenizer, config.max_length), train.fingerprint()
    found = {"train": known, "validation": validation.fingerprint()}
    for name, fingerprint in found.items():
        if trained_on and name in trained_on and fingerprint != trained_on[name]:
            raise DataError(
                f"split {config.split!r}: the {name} set is not the one of this model's training; its data changed "
                "since. Restore the data, or export without --vocab-trim"
            )
    trimmed = trim_tokenizer(tokenizer, keeping.used(used), keeping.first)
    return trimmed, trim_effect(tokenizer, trimmed, validation, config.max_length)


def trim_to_texts(
    tokenizer: Tokenizer, texts: LabelledTexts, others: LabelledTexts, max_length: int, keeping: Keeping = ALL_USED
) -> tuple[Trimmed, Vocabulary]:
    """Keep the tokens of ``texts``, each cut to ``max_length``, and see what that does to ``others``.

    Args:
        keeping: which tokens stay.

    Raises:
        DataError: a tokenizer that cannot be trimmed.
    """
    used = keeping.used(token_counts(texts, tokenizer, max_length))
    trimmed = trim_tokenizer(tokenizer, used, keeping.first)
    return trimmed, trim_effect(tokenizer, trimmed, others, max_length)


def token_counts(texts: LabelledTexts, tokenizer: Tokenizer, max_length: int) -> Counter[int]:
    """Token → how often the texts use it, each cut to ``max_length`` tokens."""
    return counted(encode(texts, tokenizer, max_length).ids)


def trim_tokenizer(tokenizer: Tokenizer, used: Iterable[int], frequent: int = 0) -> Trimmed:
    """Keep the tokens ``used``, special and added ones, the unknown token, and what words can be spelled out with.

    Everything else of the tokenizer (cleaning, splitting, special tokens around a text) stays as it is, but for the
    numbers; stored truncation and padding are switched off.

    Args:
        used: numbers of tokens.
        frequent: also keep so many tokens from the beginning of the vocabulary, which WordPiece and BPE number from
            frequent to rare in the text that they were made of: other text will use them. Tokens that stand for
            nothing, as BERT has a thousand of, do not count.

    Raises:
        DataError: neither WordPiece nor byte-level BPE, or a number that is no token.
    """
    document: Document = json.loads(tokenizer.to_str())
    model: Document = document["model"]
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    names = {number: name for name, number in numbers.items()}
    words = [number for number in sorted(names) if not _UNUSED.fullmatch(names[number])]
    wanted = {*used, *words[:frequent]}
    unknown = sorted(wanted - names.keys())
    if unknown:
        raise DataError(f"token {unknown[0]} is in the text but not in the tokenizer, which has {len(names)} tokens")
    added = {token["content"] for token in document["added_tokens"]}
    special = {token["content"] for token in document["added_tokens"] if token["special"]}
    special |= {model.get("unk_token")} & numbers.keys()
    keep = special | added | _closed(document, {names[number] for number in wanted} - special - added)
    kept = np.array(sorted((numbers[name] for name in keep), key=lambda n: (names[n] not in special, n)), np.int64)
    renumbered = {names[old]: new for new, old in enumerate(kept.tolist())}
    result = Tokenizer.from_str(json.dumps(_renumbered(document, renumbered)))
    if result.get_vocab(with_added_tokens=True) != renumbered:
        raise DataError("the tokenizer gives its tokens other numbers than its file does; it cannot be trimmed")
    return Trimmed(result, kept)


def trim_effect(original: Tokenizer, trimmed: Trimmed, texts: LabelledTexts, max_length: int) -> Vocabulary:
    """How the trimmed tokenizer cuts ``texts``, each up to ``max_length`` tokens, against the original one."""
    before = encode(texts, original, max_length)
    after = encode(texts, trimmed.tokenizer, max_length)
    numbers = original.get_vocab(with_added_tokens=True)
    is_kept = np.isin(before.ids, trimmed.kept)
    unknown = json.loads(original.to_str())["model"].get("unk_token")
    lost = 0
    if unknown in numbers:
        old = _per_row(before, before.ids == numbers[unknown])
        new = _per_row(after, after.ids == trimmed.tokenizer.token_to_id(unknown))
        lost = int(np.maximum(new - old, 0).sum())
    return Vocabulary(
        kept=len(trimmed.kept),
        original=max(numbers.values()) + 1,
        coverage=float(is_kept.mean()),
        unknown=lost / len(before.ids),
        # A row all of whose tokens were kept is cut as before; one that lost a token cannot be.
        changed_rows=int((_per_row(before, ~is_kept) > 0).sum()),
        rows=len(before),
    )


def _per_row(encoded: Encoded, marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Marked tokens of every row."""
    return np.add.reduceat(marked.astype(np.int64), encoded.offsets[:-1])


def _closed(document: Document, keep: set[str]) -> set[str]:
    """``keep`` with what these tokens are made of, and what replaces those that are gone."""
    model = document["model"]
    if model["type"] == "WordPiece":
        # And the single letters of these tokens, as a word's first piece and as a later one, where they are tokens.
        prefix = model["continuing_subword_prefix"]
        letters = {letter for name in keep for letter in name.removeprefix(prefix)}
        return keep | {form for letter in letters for form in (letter, prefix + letter) if form in model["vocab"]}
    splitter = document["pre_tokenizer"] or {}
    by_bytes = any(part["type"] == "ByteLevel" for part in splitter.get("pretokenizers", [splitter]) if part)
    if model["type"] == "BPE" and by_bytes and not model.get("continuing_subword_prefix"):
        return _with_parts(model, keep)
    name = "BPE that does not start from bytes" if model["type"] == "BPE" else model["type"]
    raise DataError(
        f"--vocab-trim: the tokenizer is {name}; only WordPiece and byte-level BPE can be trimmed, because only "
        "there every other text can still be spelled out"
    )


def _with_parts(model: Document, keep: set[str]) -> set[str]:
    """And the bytes, and both parts of every merge that makes one of these tokens, and so on."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for left, right in _merges(model):
        parts.setdefault(left + right, []).append((left, right))
    closed, waiting = set(keep), [*keep, *(letter for letter in ByteLevel.alphabet() if letter in model["vocab"])]
    closed.update(waiting)
    while waiting:
        for pair in parts.get(waiting.pop(), ()):
            waiting.extend(part for part in pair if part not in closed)
            closed.update(pair)
    return closed


def _merges(model: Document) -> list[tuple[str, str]]:
    """Merges in their order; older files hold them as one string each."""
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]


def _renumbered(document: Document, numbers: Mapping[str, int]) -> Document:
    """The tokenizer's document with these tokens and no others."""
    # Added tokens go into the model's vocabulary too: the library numbers those that are not in it by itself.
    model = {**document["model"], "vocab": dict(numbers)}
    if "merges" in model:
        merges = _merges(document["model"])
        model["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= numbers.keys()]
    return {
        **document,
        "model": model,
        "added_tokens": [{**token, "id": numbers[token["content"]]} for token in document["added_tokens"]],
        "post_processor": _processor(document["post_processor"], numbers),
        "truncation": None,
        "padding": None,
    }


def _processor(processor: Document | None, numbers: Mapping[str, int]) -> Document | None:
    """A post-processor with the new numbers of the tokens that it puts around a text."""
    if processor is None:
        return None
    changed = dict(processor)
    if "processors" in processor:
        changed["processors"] = [_processor(part, numbers) for part in processor["processors"]]
    for name in ("cls", "sep"):
        if name in processor:
            changed[name] = [processor[name][0], numbers[processor[name][0]]]
    if "special_tokens" in processor:
        changed["special_tokens"] = {
            key: {**token, "ids": [numbers[name] for name in token["tokens"]]}
            for key, token in processor["special_tokens"].items()
        }
    return changed
