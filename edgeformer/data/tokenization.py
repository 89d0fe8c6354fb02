"""Tokenizers: by hub name, from a file, or trained here; checked, and made to clean as training does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.normalizers import Sequence

from edgeformer.data.cleaning import normalizers
from edgeformer.data.encoding import Encoded, encode
from edgeformer.data.text_files import check_file
from edgeformer.data.tokenizer_training import train_tokenizer
from edgeformer.formats.data_config import FileTokenizer, HubTokenizer, TokenizerConfig
from edgeformer.formats.errors import DataError

__all__ = ["Encoded", "SpecialIds", "encode", "fingerprint", "load_tokenizer", "special_ids"]

_PAD = ("[PAD]", "<pad>", "<|pad|>")
_UNKNOWN = ("[UNK]", "<unk>", "<|unk|>", "[MASK]", "<mask>")


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers of padding, of the unknown token, and of the token in front of every text."""

    pad: int
    unk: int
    cls: int


def load_tokenizer(
    config: TokenizerConfig, *, cleaning: str, vocab_size: int, training_texts: list[str] | None
) -> Tokenizer:
    """Load or train the tokenizer of a recipe.

    Truncation and padding that a file carries are switched off: they silently cut texts, or pad short ones.
    With ``cleaning == "paper"`` the cleaning goes in front of the tokenizer's own normalizer, once.

    Args:
        vocab_size: the recipe's ``model.vocab_size``, which the tokenizer must agree with.
        training_texts: needed for a trained tokenizer only.

    Raises:
        DataError: missing, not a tokenizer, of another size, or without the special tokens of a classifier.
    """
    if isinstance(config, FileTokenizer):
        tokenizer, name = tokenizer_from_file(Path(config.path)), config.path
    elif isinstance(config, HubTokenizer):
        tokenizer, name = tokenizer_from_hub(config), f"hub tokenizer {config.name}"
    else:
        if training_texts is None:
            raise DataError("tokenizer.kind: trained needs the training texts; they are there in training only")
        name = f"trained {config.algorithm} tokenizer"
        front = normalizers() if cleaning == "paper" else []
        tokenizer = train_tokenizer(config.algorithm, vocab_size, training_texts, front)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if cleaning == "paper":
        _prepend_cleaning(tokenizer)
    check_size(tokenizer, name, vocab_size)
    _check_specials(tokenizer, name)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The special tokens' numbers.

    Raises:
        DataError: no padding or unknown token, or texts do not start with a special token.
    """
    return _check_specials(tokenizer, "the tokenizer")


def fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 of everything that the tokenizer is."""
    return hashlib.sha256(tokenizer.to_str().encode("utf-8")).hexdigest()


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError."""
    check_file(path)
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0]
    raise DataError(f"{path}: not a tokenizer: {reason}; tokenizer.path: must name a tokenizer.json file")


def tokenizer_from_hub(config: HubTokenizer) -> Tokenizer:
    """Fetch a tokenizer by hub name. Raises DataError."""
    try:
        return Tokenizer.from_pretrained(config.name, revision=config.revision or "main")
    except Exception as error:  # the library raises plain Exception, and the hub client its own
        first = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"hub tokenizer {config.name}: cannot be loaded: {first}; check tokenizer.name, or use a file: "
            "--tokenizer PATH/tokenizer.json"
        ) from None


def _prepend_cleaning(tokenizer: Tokenizer) -> None:
    own = tokenizer.normalizer
    ours = normalizers()
    wanted = json.loads(Sequence(ours).__getstate__())["normalizers"]
    if own is None:
        tokenizer.normalizer = Sequence(ours)
        return
    stored = json.loads(own.__getstate__())
    if stored["type"] == "Sequence" and stored["normalizers"][: len(wanted)] == wanted:
        return
    tokenizer.normalizer = Sequence([*ours, own])


def check_size(tokenizer: Tokenizer, name: str, vocab_size: int) -> None:
    """Refuse a tokenizer whose numbers do not fit the model's table. Raises DataError."""
    # Numbers may have holes; the embedding needs a row for the largest one.
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max([tokenizer.get_vocab_size(with_added_tokens=True), *(number + 1 for number in vocabulary.values())])
    if size != vocab_size:
        raise DataError(f"{name}: has {size} tokens, the model {vocab_size}; set model.vocab_size: {size}")


def _check_specials(tokenizer: Tokenizer, name: str) -> SpecialIds:
    remedy = "use another tokenizer (bert-base-uncased has all of them), or tokenizer: {kind: trained}"
    probe = tokenizer.encode("a")
    if not probe.ids or not probe.special_tokens_mask[0]:
        raise DataError(
            f"{name}: puts no special token ([CLS]) in front of a text, which the classifier reads; {remedy}"
        )
    pad, unk = first_of(tokenizer, _PAD), first_of(tokenizer, (*_model_unknown(tokenizer), *_UNKNOWN))
    if pad is None:
        raise DataError(f"{name}: has no padding token ({', '.join(_PAD)}); {remedy}")
    if unk is None:
        raise DataError(f"{name}: has no unknown token ({', '.join(_UNKNOWN[:3])}); {remedy}")
    return SpecialIds(pad, unk, probe.ids[0])


def _model_unknown(tokenizer: Tokenizer) -> list[str]:
    name = getattr(tokenizer.model, "unk_token", None)
    return [name] if isinstance(name, str) else []


def first_of(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    """The number of the first of ``names`` that the tokenizer knows."""
    for name in names:
        number: int | None = tokenizer.token_to_id(name)
        if number is not None:
            return number
    return None
