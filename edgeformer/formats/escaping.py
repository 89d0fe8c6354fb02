"""What came from data (labels, texts, names, titles, messages of libraries) inside of what people read.

One function per place; JSON needs none of them, and HTML has its own in the template, behind :func:`visible`. They lie
here because model cards, which the families write, need them as reports do.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
"""Control characters (ESC starts a terminal's commands), and those that turn the direction of the text after them."""
_MARKDOWN = re.compile(r"([\\`*\[\]|~$])|(?<!\w)(_)|(_)(?!\w)|(:)(?=//)|(?<=www)(\.)|(@)(?=\w)")
"""What starts emphasis, code, links, cells, mathematics and mentions; ``_`` inside a word does not."""
_AT_START = re.compile(r"(?m)^(\s*)([#+>=-]|\d+(?=[.)]))")
"""What makes a line a heading, a list or a quotation."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What makes a spreadsheet compute a cell, or skip to what does."""


def visible(text: str) -> str:
    """Text without characters that act instead of being seen: each becomes U+FFFD. Ends of lines and tabs stay."""
    return _HIDDEN.sub("\ufffd", text)


def markdown(text: str) -> str:
    """Text for a line of Markdown, which it can neither leave nor format, and for a table's cell."""
    line = " ".join(visible(text).split("\n")).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda found: "\\" + found[0], line)


def markdown_line(text: str) -> str:
    """As :func:`markdown`, for text that begins a line of its own."""
    return _AT_START.sub(lambda found: f"{found[1]}\\{found[2]}", markdown(text))


def csv_cell(value: object) -> object:
    """A value for CSV: text that a spreadsheet would compute is quoted, numbers stay numbers, also those in text."""
    if not isinstance(value, str):
        return value
    if not value.lstrip(" ").startswith(_FORMULA):
        return visible(value)
    try:
        float(value)
    except ValueError:
        return f"'{visible(value)}"
    return value
