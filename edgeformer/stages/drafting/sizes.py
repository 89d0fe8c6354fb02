"""What a first recipe gets for so many rows: length, vocabulary, width, epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.cleaning import normalizers
from edgeformer.data.encoding import encode_texts
from edgeformer.data.labelled import LabelledTexts
from edgeformer.data.rows import in_one
from edgeformer.data.tokenization import tokens_of
from edgeformer.data.tokenizer_training import SPECIAL_TOKENS, train_tokenizer

_MOST_TEXTS = 50_000
"""From which the vocabulary's size is taken; more words than these have are no use to a small model."""
_MEASURED_TEXTS = 5_000
_VOCABULARY = 8_000
_LENGTHS = (16, 256)
"""Tokens of the shortest and the longest text that a first recipe reads."""
_NOT_CUT = 0.98
_PATIENCE = 5
_MANY = 20_000
"""Rows from which on a wider model learns more."""


@dataclass(frozen=True)
class Sizes:
    """The sections of a recipe that depend on the rows."""

    max_length: int
    model: dict[str, Any]
    training: dict[str, Any]


def from_scratch(train: LabelledTexts) -> Sizes:
    """For a small recurrent encoder whose tokenizer is trained on ``train``, too."""
    tokenizer = train_tokenizer("wordpiece", _VOCABULARY, map(in_one, islice(train.texts, _MOST_TEXTS)), normalizers())
    rows, many = len(train), len(train) >= _MANY
    width = {"hidden_size": 256, "layers": 3} if many else {"hidden_size": 128, "layers": 2}
    model = {
        "kind": "encoder",
        "vocab_size": _reachable(tokenizer),
        **width,
        "iterations": 2,
        "heads": 4,
        "ffn_size": 4 * width["hidden_size"],
        "residual_scale": 0.5,
    }
    training: dict[str, Any] = {
        "epochs": _epochs(rows, 100_000, 4, 30),
        "batch_size": 16 if rows < 1_000 else 32 if not many else 64,
        "precision": "auto",
        "optimizer": {"lr": 1e-3, "weight_decay": 0.05},
        "schedule": {"kind": "cosine"},
    }
    if training["epochs"] > 2 * _PATIENCE:
        training["early_stopping"] = {"patience": _PATIENCE}
    return Sizes(_length(tokenizer, train, _LENGTHS[1]), model, training)


def fine_tuned(train: LabelledTexts, tokenizer: Tokenizer, longest: int) -> Sizes:
    """For a pretrained encoder, which takes texts of ``longest`` tokens; the model's section is left to its source."""
    rows = len(train)
    training = {
        "epochs": _epochs(rows, 20_000, 2, 8),
        "batch_size": 16 if rows < 1_000 else 32,
        "precision": "auto",
        "optimizer": {"lr": 5e-5},
        "schedule": {"kind": "linear"},
    }
    return Sizes(_length(tokenizer, train, min(longest, _LENGTHS[1])), {}, training)


def _reachable(tokenizer: Tokenizer) -> int:
    """Tokens that a tokenizer of nearly the same texts has, too: all letters, and three quarters of the rest."""
    size = tokens_of(tokenizer)
    if size >= _VOCABULARY:
        return size
    letters = sum(len(token.removeprefix("##")) == 1 for token in tokenizer.get_vocab()) + len(SPECIAL_TOKENS)
    return letters + (size - letters) * 3 // 4


def _length(tokenizer: Tokenizer, train: LabelledTexts, most: int) -> int:
    """Tokens that all but a few texts have at most, special tokens included; a multiple of 8."""
    texts: Sequence[Any] = train.texts[:: max(1, len(train) // _MEASURED_TEXTS)]
    encoded, _ = encode_texts(tokenizer, list(texts), most)
    wanted = int(np.ceil(np.quantile(encoded.lengths, _NOT_CUT) / 8)) * 8
    return min(most, max(_LENGTHS[0], wanted))


def _epochs(rows: int, seen: int, fewest: int, most: int) -> int:
    """So many that about ``seen`` rows are seen in all."""
    return min(most, max(fewest, round(seen / rows)))
