"""Text that comes token by token: the same text, and never half a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgeformer.data.encoding import PlainText
from edgeformer.inference.generate import TextStream
from tests.inference.language_run import TEXT, tokenizer_of

HARD = "naïve 漢字 👩‍👩‍👧 e\u0301 \t two  spaces\nline"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([TEXT])


def pieces_of(tokenizer: Tokenizer, prompt: str, text: str) -> list[str]:
    plain = PlainText(tokenizer)
    stream = TextStream(tokenizer, [plain.boundary, *plain.encode(prompt).ids])
    return [*(stream.push(token) for token in plain.encode(text).ids), stream.finish()]


@pytest.mark.parametrize("prompt", ["", "The café", "漢"])
@pytest.mark.parametrize("text", [TEXT, HARD, "€", " leading space", "x" * 40])
def test_pieces_are_the_text_and_whole_characters(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    pieces = pieces_of(tokenizer, prompt, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > 1 or len(text) == 1


def test_nothing_is_held_back_longer_than_needed(tokenizer: Tokenizer) -> None:
    pieces = pieces_of(tokenizer, "", "a漢b")
    assert pieces[0] == "a" and pieces[-2] == "b" and pieces[-1] == ""


def test_bytes_that_never_become_a_character(tokenizer: Tokenizer) -> None:
    plain = PlainText(tokenizer)
    lead = plain.encode("漢").ids[0]
    stream = TextStream(tokenizer, [plain.boundary])
    assert stream.push(lead) == ""
    assert stream.finish() == "\ufffd"
    stream = TextStream(tokenizer, [plain.boundary])
    assert stream.push(lead) == ""
    assert stream.push(plain.encode("a").ids[0]) == "\ufffda"


def test_a_character_genuinely_written_as_replacement(tokenizer: Tokenizer) -> None:
    assert "".join(pieces_of(tokenizer, "", "a\ufffdb\ufffd")) == "a\ufffdb\ufffd"


def test_tokenizers_that_mark_words_with_their_first_space() -> None:
    words = Tokenizer(models.WordLevel({"</s>": 0, "▁one": 1, "▁two": 2, "▁three": 3}, unk_token="</s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stream = TextStream(words, [1])
    assert stream.push(2) == " two"
    assert stream.push(3) == " three"
