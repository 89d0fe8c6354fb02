"""Tokenizers of language models: loaded or trained, and text as token numbers without special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from edgeformer.data.cache import encode_cached
from edgeformer.data.encoding import Encoded
from edgeformer.data.texts import LabelledTexts
from edgeformer.data.tokenization import check_size, first_of, tokenizer_from_file, tokenizer_from_hub
from edgeformer.data.tokenizer_training import BOUNDARY, train_language_tokenizer
from edgeformer.formats.data_config import FileTokenizer, HubTokenizer, TokenizerConfig
from edgeformer.formats.errors import DataError
from edgeformer.formats.progress import Progress

BOUNDARIES = (BOUNDARY, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
"""What tokenizers call the token between two documents, in the order in which they are looked for."""

_NEVER_CUT = 2**40


def load_language_tokenizer(
    config: TokenizerConfig, *, vocab_size: int, training_texts: Sequence[str] | None
) -> Tokenizer:
    """Load or train the tokenizer of a language model's recipe; stored truncation and padding are switched off.

    Args:
        vocab_size: the recipe's ``model.vocab_size``, which the tokenizer must agree with.
        training_texts: needed for a trained tokenizer only.

    Raises:
        DataError: missing, not a tokenizer, of another size, without a boundary token, or to be trained as WordPiece.
    """
    if isinstance(config, FileTokenizer):
        tokenizer, name = tokenizer_from_file(Path(config.path)), config.path
    elif isinstance(config, HubTokenizer):
        tokenizer, name = tokenizer_from_hub(config), f"hub tokenizer {config.name}"
    else:
        if config.algorithm != "bpe":
            raise DataError(
                f"tokenizer.algorithm: {config.algorithm} loses case and spaces, so a language model cannot write the "
                "text that it was trained on; set tokenizer.algorithm: bpe"
            )
        if training_texts is None:
            raise DataError("tokenizer.kind: trained needs the training texts; they are there in training only")
        tokenizer, name = train_language_tokenizer(vocab_size, training_texts), "trained bpe tokenizer"
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_size(tokenizer, name, vocab_size)
    _boundary(tokenizer, name)
    return tokenizer


def boundary_id(tokenizer: Tokenizer) -> int:
    """Number of the token between documents. Raises DataError where the tokenizer has none."""
    return _boundary(tokenizer, "the tokenizer")


def _boundary(tokenizer: Tokenizer, name: str) -> int:
    found = first_of(tokenizer, BOUNDARIES)
    if found is None:
        raise DataError(
            f"{name}: has no token for the end of a text; looked for {', '.join(BOUNDARIES)}; use another tokenizer "
            "(gpt2 has one), or tokenizer: {kind: trained, algorithm: bpe}"
        )
    return found


def unlabelled(texts: Sequence[str]) -> LabelledTexts:
    """Texts of a language model in the form that the token cache and the fingerprints know."""
    return LabelledTexts(list(texts), np.zeros(len(texts), dtype=np.int64))


class PlainText:
    """Turns text into the tokens of its characters: no special tokens around it, and never cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.boundary = boundary_id(tokenizer)
        document = json.loads(tokenizer.to_str())
        # Without the template that would put special tokens around every text.
        bare = json.dumps({**document, "post_processor": None, "truncation": None, "padding": None})
        self._tokenizer: Tokenizer = Tokenizer.from_str(bare)

    def encode(self, text: str) -> Encoding:
        """One text, with the place of every token in it.

        A text that itself holds ``<|endoftext|>`` has it spelled out: only the end of a paragraph is one.
        """
        found = self._tokenizer.encode(text)
        if self.boundary not in found.ids:
            return found
        self._tokenizer.encode_special_tokens = True
        try:
            return self._tokenizer.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_all(self, texts: Sequence[str], cache: Path | None, progress: Progress | None = None) -> Encoded:
        """Many texts, or what ``cache`` (None: no cache) holds of them; labels are all 0."""
        encoded = encode_cached(unlabelled(texts), self._tokenizer, _NEVER_CUT, cache, progress)
        places = np.flatnonzero(encoded.ids == self.boundary)
        if not len(places):
            return encoded
        rows = [encoded.row(index) for index in range(len(encoded))]
        for index in set((np.searchsorted(encoded.offsets, places, side="right") - 1).tolist()):
            rows[index] = np.array(self.encode(texts[index]).ids, dtype=np.int32)
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        return Encoded(np.concatenate(rows), offsets, encoded.labels, 0)
