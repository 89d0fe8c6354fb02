"""How byte-level BPE tokenizers of language models split text before their merges, by llama.cpp's names."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_bytes = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _bytes(use_regex=False)])


SPLITS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _bytes,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes()]),
    "qwen2": lambda: _split_by(rf"{_WORDS}\p{{N}}{_REST}"),
    "llama-bpe": lambda: _split_by(rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"),
    "dbrx": lambda: _split_by(rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"),
}
"""``tokenizer.ggml.pre`` of a GGUF file → the pre-tokenizer."""
IGNORES_MERGES = frozenset({"llama-bpe"})
"""Splits with which llama.cpp takes a whole word that is a token without merging its parts."""

_without_offsets = partial(json.loads, object_hook=lambda part: {k: v for k, v in part.items() if k != "trim_offsets"})
"""Read JSON without the key that changes offsets only."""


def split_name(document: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the splits of a tokenizer.json; None: it is no byte-level BPE, or has other splits.

    llama.cpp normalises no text, so of the normalizers NFC is accepted only, which most texts are in.
    """
    if document["model"]["type"] != "BPE" or document.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    pre_tokenizer = _without_offsets(json.dumps(document["pre_tokenizer"]))
    for name, make in SPLITS.items():
        if bool(document["model"].get("ignore_merges")) != (name in IGNORES_MERGES):
            continue
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = make()
        if _without_offsets(tokenizer.to_str())["pre_tokenizer"] == pre_tokenizer:
            return name
    return None
