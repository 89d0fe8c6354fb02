"""The paper's cleaning, once as a Python function and once as normalizers inside ``tokenizer.json``.

Both come from one table, so that a bundle's clients clean exactly as training did. Three regex engines run
the patterns (Python's ``re``, Oniguruma in ``tokenizers``, JavaScript in Transformers.js), so they only use
what those three agree on: explicit character classes, look-around of fixed length, and no ``\\s``, ``\\w`` or
``\\b``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import Lowercase, Normalizer, Replace

# Whatever one of the three engines takes for white space, U+FEFF (a stray byte order mark) included.
_SPACE = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_URL_CHARACTER = f'[^{_SPACE}<>"]'
# A full stop or bracket after a URL belongs to the sentence.
_URL_END = f"""[^{_SPACE}<>"'.,;:!?)\\]}}]"""


@dataclass(frozen=True)
class Rule:
    """Replace every match of ``pattern``; a rule without a pattern lowercases, character by character."""

    pattern: str | None
    replacement: str = ""


_ASCII_MARKS = "!-/:-@\\[-`{-~"
# Marks of the same kinds in other scripts and in print: full-width and CJK ones, quotes, dashes, bullets, the ellipsis;
# Spanish, Greek, Arabic and Indic ones. No letters: "ー" lengthens a vowel and may well follow itself.
_MARKS = (
    f"{_ASCII_MARKS}\xa1\xa7\xab\xb6\xb7\xbb\xbf\u037e\u060c\u061b\u061f\u06d4\u0964\u0965\u2010-\u2027\u2030-\u205e"
    "\u3001-\u3003\u3008-\u3011\u3014-\u301f\u3030\u30fb\ufe10-\ufe19\ufe30-\ufe6b\uff01-\uff0f"
    "\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)


def _rules(marks: str) -> tuple[Rule, ...]:
    """``marks``: of punctuation, as a character class."""
    return (
        # Only Σ is lowercased by its context, and only by some clients; fixing it first makes them all agree.
        Rule("Σ", "σ"),
        Rule(None),
        # HTML tags, then comments and doctypes. A tag needs a letter after "<": "i <3 you" and "a < b" stay.
        Rule(f"</?[a-z][a-z0-9:-]*(?:[{_SPACE}/][^<>]*)?>", " "),
        Rule("<![a-z-][^<>]*>", " "),
        # Not after a letter: "awww.so cute" holds no URL.
        Rule(f"(?<![a-z0-9])(?:(?:https?|ftp)://|www\\.){_URL_CHARACTER}*{_URL_END}", " "),
        # A punctuation mark that is followed by the same mark.
        Rule(f"([{marks}])(?=\\1)", ""),
        Rule(f"[{_SPACE}]+", " "),
        Rule("^ | $", ""),
    )


RULES = _rules(_MARKS)
VERSIONS = (RULES, _rules(_ASCII_MARKS))
"""What tokenizers begin with, the present rules first. A model that was trained with others goes on reading so."""

_Compiled = tuple[tuple[Rule, re.Pattern[str] | None], ...]


def _compiled(rules: tuple[Rule, ...]) -> _Compiled:
    return tuple((rule, None if rule.pattern is None else re.compile(rule.pattern)) for rule in rules)


_PRESENT, _FIRST = map(_compiled, VERSIONS)


def clean(text: str) -> str:
    """Lowercase, drop HTML tags and URLs, collapse repeated punctuation marks and white space, strip."""
    return _cleaned(text, _PRESENT)


def clean_at_first(text: str) -> str:
    """As :func:`clean` was before other than ASCII marks were collapsed: what splits are drawn by stays as it was."""
    return _cleaned(text, _FIRST)


def _cleaned(text: str, rules: _Compiled) -> str:
    for rule, pattern in rules:
        text = text.lower() if pattern is None else pattern.sub(rule.replacement, text)
    return text


def normalizers(rules: tuple[Rule, ...] = RULES) -> list[Normalizer]:
    """The same cleaning as a list of ``tokenizers`` normalizers, in order."""
    return [Lowercase() if rule.pattern is None else Replace(Regex(rule.pattern), rule.replacement) for rule in rules]
