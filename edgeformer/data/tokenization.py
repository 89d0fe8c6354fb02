"""Tokenizers: by hub name, from a file, or trained here; checked, and those of classifiers made to clean as training
does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from tokenizers.normalizers import Normalizer, Sequence

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TokenizerConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.files import read_at_most
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.cleaning import RULES, VERSIONS, normalizers
from edgeformer.data.records import check_file, first_line
from edgeformer.data.tokenizer_training import BOUNDARY, train_language_tokenizer, train_tokenizer

RecipeT = TypeVar("RecipeT", bound=Recipe)
BOUNDARIES = (BOUNDARY, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
"""What tokenizers call the token between two documents, in the order in which they are looked for."""
_PAD = ("[PAD]", "<pad>", "<|pad|>")
_UNKNOWN = ("[UNK]", "<unk>", "<|unk|>", "[MASK]", "<mask>")

_MOST_BYTES = 128 << 20
"""Of a tokenizer.json: four times that of the largest vocabularies in use (256,000 words)."""
_MOST_ENTRIES = 3_000_000
"""Its commas and brackets: a vocabulary of 256,000 words with its merges has 1.9 million. The library takes 100 bytes
for each, also where it refuses the file in the end."""


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers of padding, of the unknown token, and of the token in front of every text."""

    pad: int
    unk: int
    cls: int


def load_tokenizer(
    config: TokenizerConfig,
    *,
    cleaning: str,
    vocab_size: int,
    training_texts: Iterable[str] | None,
    may_be_smaller: bool = False,
) -> Tokenizer:
    """Load or train the tokenizer of a classifier's or an embedding model's recipe.

    With ``cleaning == "paper"`` the cleaning goes in front of the tokenizer's own normalizer, once.

    Args:
        vocab_size: the recipe's ``model.vocab_size``, which the tokenizer must agree with. A tokenizer that is trained
            here may be smaller; see :func:`fitted_recipe`.
        training_texts: needed for a trained tokenizer only.
        may_be_smaller: ``config`` names the file of a tokenizer that was trained for this recipe before.

    Raises:
        DataError: missing, not a tokenizer, of another size, or without the special tokens of a classifier.
    """
    front = normalizers() if cleaning == "paper" else []
    tokenizer, name = _load(config, vocab_size, training_texts, partial(train_tokenizer, front=front), may_be_smaller)
    own = tokenizer.normalizer
    if front and not _cleans(_steps(own)):
        tokenizer.normalizer = Sequence([*front, own] if own is not None else front)
    special_ids(tokenizer, name)
    return tokenizer


def _steps(normalizer: Normalizer | None) -> list[object]:
    stored = json.loads(normalizer.__getstate__()).get("normalizers", []) if normalizer is not None else []
    return list(stored)


def _cleans(steps: list[object]) -> bool:
    """Whether a tokenizer's normalizer begins with the cleaning, of this version or an earlier one."""
    fronts = [_steps(Sequence(normalizers(rules))) for rules in VERSIONS]
    return any(steps[: len(front)] == front for front in fronts)


def cleaning_as_now(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, with the present cleaning in place of that of an earlier version, if it has one."""
    document = json.loads(tokenizer.to_str())
    steps = _steps(tokenizer.normalizer)
    if not _cleans(steps):
        return tokenizer
    document["normalizer"]["normalizers"] = [*_steps(Sequence(normalizers())), *steps[len(RULES) :]]
    return Tokenizer.from_str(json.dumps(document))


def load_language_tokenizer(
    config: TokenizerConfig, *, vocab_size: int, training_texts: Iterable[str] | None, may_be_smaller: bool = False
) -> Tokenizer:
    """Load or train the tokenizer of a language model's recipe.

    Args:
        vocab_size, training_texts, may_be_smaller: as of :func:`load_tokenizer`.

    Raises:
        DataError: missing, not a tokenizer, of another size, without a boundary token, or to be trained as WordPiece.
    """
    if config.kind == "trained" and config.algorithm != "bpe":
        raise DataError(
            f"tokenizer.algorithm: {config.algorithm} loses case and spaces, so a language model cannot write the "
            "text that it was trained on; set tokenizer.algorithm: bpe"
        )

    def train(algorithm: str, size: int, texts: Iterable[str]) -> Tokenizer:
        return train_language_tokenizer(size, texts)

    tokenizer, name = _load(config, vocab_size, training_texts, train, may_be_smaller)
    boundary_id(tokenizer, name)
    return tokenizer


def _load(
    config: TokenizerConfig,
    vocab_size: int,
    training_texts: Iterable[str] | None,
    train: Callable[[str, int, Iterable[str]], Tokenizer],
    may_be_smaller: bool,
) -> tuple[Tokenizer, str]:
    """A tokenizer of the model's size, and what to call it in messages.

    Truncation and padding that a file carries are switched off: they silently cut texts, or pad short ones.
    """
    if isinstance(config, FileTokenizer):
        tokenizer, name = tokenizer_from_file(Path(config.path)), config.path
    elif isinstance(config, HubTokenizer):
        tokenizer, name = _tokenizer_from_hub(config), f"hub tokenizer {config.name}"
    elif training_texts is None:
        raise DataError("tokenizer.kind: trained needs the training texts; they are there in training only")
    else:
        tokenizer, name = train(config.algorithm, vocab_size, training_texts), f"trained {config.algorithm} tokenizer"
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = tokens_of(tokenizer)
    # A small training text has fewer tokens to learn than the recipe provides for.
    smaller = size < vocab_size and (may_be_smaller or config.kind == "trained")
    if size != vocab_size and not smaller:
        raise DataError(f"{name}: has {size} tokens, the model {vocab_size}; set model.vocab_size: {size}")
    return tokenizer, name


def tokens_of(tokenizer: Tokenizer) -> int:
    """Rows that an embedding of its tokens needs: numbers may have holes, and the largest one has a row, too."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return max([tokenizer.get_vocab_size(with_added_tokens=True), *(number + 1 for number in vocabulary.values())])


def fitted_recipe(recipe: RecipeT, tokenizer: Tokenizer, note: Callable[[str], None]) -> RecipeT:
    """Return ``recipe`` with the vocabulary of a tokenizer that was trained for it and came out smaller.

    Args:
        note: is called with a message where the vocabulary changes.
    """
    size, stated = tokens_of(tokenizer), recipe.model.vocab_size
    if size == stated:
        return recipe
    note(
        f"the trained tokenizer has {size:,} tokens, as many as the training text has to learn; model.vocab_size is "
        f"{size} instead of {stated}, here and in the saved recipe"
    )
    return recipe.with_vocabulary(size)


def fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 of everything that the tokenizer is."""
    return hashlib.sha256(tokenizer.to_str().encode("utf-8")).hexdigest()


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError."""
    check_file(path)
    try:
        content = read_at_most(path, _MOST_BYTES)
        if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_ENTRIES:
            raise DataError(f"{path}: holds more than {_MOST_ENTRIES:,} entries, which no tokenizer does; use another")
        return Tokenizer.from_str(content.decode("utf-8"))
    except DataError:
        raise
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except Exception as error:  # the library raises plain Exception
        reason = first_line(error)
    raise DataError(f"{path}: not a tokenizer: {reason}; tokenizer.path: must name a tokenizer.json file")


def _tokenizer_from_hub(config: HubTokenizer) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(config.name, revision=config.revision or "main")
    except Exception as error:  # the library raises plain Exception, and the hub client its own
        raise DataError(
            f"hub tokenizer {config.name}: cannot be loaded: {first_line(error)}; check tokenizer.name, or use a file: "
            "--tokenizer PATH/tokenizer.json"
        ) from None


def special_ids(tokenizer: Tokenizer, name: str = "the tokenizer") -> SpecialIds:
    """The special tokens' numbers.

    Raises:
        DataError: no padding or unknown token, or texts do not start with a special token; it calls it ``name``.
    """
    remedy = "use another tokenizer (bert-base-uncased has all of them), or tokenizer: {kind: trained}"
    probe = tokenizer.encode("a")
    if not probe.ids or not probe.special_tokens_mask[0]:
        raise DataError(
            f"{name}: puts no special token ([CLS]) in front of a text, which the classifier reads; {remedy}"
        )
    own = getattr(tokenizer.model, "unk_token", None)
    unknown = (own, *_UNKNOWN) if isinstance(own, str) else _UNKNOWN
    pad, unk = _first_of(tokenizer, _PAD), _first_of(tokenizer, unknown)
    if pad is None:
        raise DataError(f"{name}: has no padding token ({', '.join(_PAD)}); {remedy}")
    if unk is None:
        raise DataError(f"{name}: has no unknown token ({', '.join(_UNKNOWN[:3])}); {remedy}")
    return SpecialIds(pad, unk, probe.ids[0])


def boundary_id(tokenizer: Tokenizer, name: str = "the tokenizer") -> int:
    """Number of the token between documents. Raises DataError, which calls it ``name``, where there is none."""
    found = _first_of(tokenizer, BOUNDARIES)
    if found is None:
        raise DataError(
            f"{name}: has no token for the end of a text; looked for {', '.join(BOUNDARIES)}; use another tokenizer "
            "(gpt2 has one), or tokenizer: {kind: trained, algorithm: bpe}"
        )
    return found


def _first_of(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    """The number of the first of ``names`` that the tokenizer knows."""
    numbers = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in numbers if number is not None), None)
