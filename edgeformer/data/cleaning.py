"""The paper's cleaning, as a Python function and as normalizers inside ``tokenizer.json``.

Both come from one table, so that the clients of a bundle clean exactly as training did. Three regex engines run the
patterns (Python's ``re``, Oniguruma in ``tokenizers``, JavaScript in Transformers.js). So they use only what these
three agree on: explicit character classes, look-around of fixed length, and no ``\\s``, ``\\w`` or ``\\b``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex
from tokenizers.normalizers import Lowercase, Normalizer, Replace

from edgeformer.data.rows import Text, text_parts

# All characters that one of the three engines treats as white space, including U+FEFF (a stray byte order mark).
SPACE = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_URL_CHARACTER = f'[^{SPACE}<>"]'
_URL_END = f"""[^{SPACE}<>"'.,;:!?)\\]}}]"""  # a full stop or bracket after a URL belongs to the sentence


@dataclass(frozen=True)
class Rule:
    """Replace every match of ``pattern``; a rule without a pattern lowercases, character by character."""

    pattern: str | None
    replacement: str = ""


_ASCII_MARKS = "!-/:-@\\[-`{-~"
# Punctuation of other scripts and of print: full-width and CJK marks, quotes, dashes, bullets, the ellipsis; Spanish,
# Greek, Arabic and Indic marks. No letters: "ー" lengthens a vowel and may be repeated.
MARKS = (
    f"{_ASCII_MARKS}\xa1\xa7\xab\xb6\xb7\xbb\xbf\u037e\u060c\u061b\u061f\u06d4\u0964\u0965\u2010-\u2027\u2030-\u205e"
    "\u3001-\u3003\u3008-\u3011\u3014-\u301f\u3030\u30fb\ufe10-\ufe19\ufe30-\ufe6b\uff01-\uff0f"
    "\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)


def _rules(marks: str) -> tuple[Rule, ...]:
    """Return the rules; ``marks``: punctuation marks, as the inside of a character class."""
    return (
        # Only Σ is lowercased by its context, and only by some clients; replacing it first makes all of them agree.
        Rule("Σ", "σ"),
        Rule(None),
        # HTML tags, then comments and doctypes. A tag needs a letter after "<": "i <3 you" and "a < b" stay.
        Rule(f"</?[a-z][a-z0-9:-]*(?:[{SPACE}/][^<>]*)?>", " "),
        Rule("<![a-z-][^<>]*>", " "),
        # Not after a letter: "awww.so cute" holds no URL.
        Rule(f"(?<![a-z0-9])(?:(?:https?|ftp)://|www\\.){_URL_CHARACTER}*{_URL_END}", " "),
        # A punctuation mark that is followed by the same mark.
        Rule(f"([{marks}])(?=\\1)", ""),
        Rule(f"[{SPACE}]+", " "),
        Rule("^ | $", ""),
    )


RULES = _rules(MARKS)
VERSIONS = (RULES, _rules(_ASCII_MARKS))
"""Rules of this version and of earlier ones. Tokenizers of existing models begin with one of them."""
_COMPILED = [[(rule, re.compile(rule.pattern) if rule.pattern else None) for rule in rules] for rules in VERSIONS]


def clean(text: str, version: int = 0) -> str:
    """Lowercase, remove HTML tags and URLs, collapse repeated punctuation marks and white space, strip.

    ``version``: index in ``VERSIONS``. Splits are drawn by version 1, so that existing ones do not change.
    """
    for rule, pattern in _COMPILED[version]:
        text = text.lower() if pattern is None else pattern.sub(rule.replacement, text)
    return text


def normalizers(rules: tuple[Rule, ...] = RULES) -> list[Normalizer]:
    """Return the same cleaning as a list of ``tokenizers`` normalizers, in order."""
    return [Lowercase() if rule.pattern is None else Replace(Regex(rule.pattern), rule.replacement) for rule in rules]


def count_words(texts: Iterable[Text], cleaning: str) -> NDArray[np.int64]:
    """Count the words (separated by white space) of each text, of both texts of a pair, int64 [n]."""
    words = (
        sum(len((clean(part) if cleaning == "paper" else part).split()) for part in text_parts(text)) for text in texts
    )
    return np.fromiter(words, np.int64)
