"""Tokens as text while they come: never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""

_CONTEXT = 8
"""Earlier tokens that are decoded together with new ones: enough for a character's bytes and a word's first space."""


class TextStream:
    """The text of a growing list of tokens that go on from a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)

    def push(self, token: int) -> str:
        """Take a token; returns the text that is complete now, often a word, sometimes nothing yet."""
        self._ids.append(token)
        return self._new(final=False)

    def finish(self) -> str:
        """What is left: bytes that never became a character, as the replacement character."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if not final and text.endswith(_INCOMPLETE):
            return ""
        self._read = len(self._ids)
        self._start = max(self._start, self._read - _CONTEXT)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        result: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return result
