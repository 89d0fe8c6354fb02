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


RULES = (
    # Only Σ is lowercased by its context, and only by some clients; fixing it first makes them all agree.
    Rule("Σ", "σ"),
    Rule(None),
    # HTML tags, then comments and doctypes. A tag needs a letter after "<": "i <3 you" and "a < b" stay.
    Rule(f"</?[a-z][a-z0-9:-]*(?:[{_SPACE}/][^<>]*)?>", " "),
    Rule("<![a-z-][^<>]*>", " "),
    # Not after a letter: "awww.so cute" holds no URL.
    Rule(f"(?<![a-z0-9])(?:(?:https?|ftp)://|www\\.){_URL_CHARACTER}*{_URL_END}", " "),
    # A punctuation mark that is followed by the same mark.
    Rule("([!-/:-@\\[-`{-~])(?=\\1)", ""),
    Rule(f"[{_SPACE}]+", " "),
    Rule("^ | $", ""),
)

_COMPILED = tuple((rule, None if rule.pattern is None else re.compile(rule.pattern)) for rule in RULES)


def clean(text: str) -> str:
    """Lowercase, drop HTML tags and URLs, collapse repeated punctuation marks and white space, strip."""
    for rule, pattern in _COMPILED:
        text = text.lower() if pattern is None else pattern.sub(rule.replacement, text)
    return text


def normalizers() -> list[Normalizer]:
    """The same cleaning as a list of ``tokenizers`` normalizers, in order."""
    return [Lowercase() if rule.pattern is None else Replace(Regex(rule.pattern), rule.replacement) for rule in RULES]
