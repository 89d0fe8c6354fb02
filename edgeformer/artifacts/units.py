"""Quantities with a unit in flags and profiles ("5.4 GiB", "5ms"): parsing, formatting, and escapes for output."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

from pydantic import BeforeValidator, Field

_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "m": 6e4, "h": 3.6e6}
_MILLIJOULES = {"uJ": 1e-3, "mJ": 1.0, "J": 1e3}  # units are case-insensitive: MJ is a millijoule
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def _parse(text: str, units: Mapping[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    sizes = {unit.lower(): size for unit, size in units.items()}
    if match is None or match.group(2).lower() not in sizes:
        allowed = ", ".join(units)
        raise ValueError(f"{text!r} is not a quantity; write a number and a unit ({allowed}), e.g. {example}")
    return float(match.group(1)) * sizes[match.group(2).lower()]


def parse_bytes(text: str) -> int:
    """Parse a size (``"5.4GiB"``) into bytes. Raises ValueError naming the allowed units."""
    return round(_parse(text, _BYTES, "20MiB"))


parse_milliseconds = partial(_parse, units=_MILLISECONDS, example="5ms")
"""Parse a time (``"5ms"``) into milliseconds. Raises ValueError naming the allowed units."""
parse_millijoules = partial(_parse, units=_MILLIJOULES, example="10mJ")
"""Parse an energy (``"10mJ"``) into millijoules. Raises ValueError naming the allowed units."""


def parse_share(text: str) -> float:
    """Parse ``"5%"`` into 0.05. Raises ValueError without a per cent sign, so that 0.05 is never read as 5%."""
    number = text.strip().removesuffix("%")
    if number == text.strip() or not re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*", number):
        raise ValueError(f"{text!r} is not a percentage; write e.g. 5%")
    return float(number) / 100


def format_bytes(value: float | None) -> str:
    """Format bytes for a table: ``41.9 MiB``; an en dash for None."""
    if value is None:
        return "–"
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(value) >= size:
            return f"{value / size:.{digits}f} {unit}"
    return f"{value:.0f} B"


def format_memory(value: float, ratio: float | None) -> str:
    """Format memory and how many times the weights' bytes that is, if it is mostly weights: ``48.1 MiB (1.30×)``."""
    return format_bytes(value) + (f" ({ratio:.2f}×)" if ratio is not None else "")


def format_milliseconds(value: float | None) -> str:
    """Format milliseconds for a table with three significant digits; an en dash for None."""
    if value is None:
        return "–"
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds for people: ``42 s``, ``12 min 05 s``, ``1 h 02 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_time(created: str) -> str:
    """Format a time of a file, which is UTC, for people: ``2026-11-28 14:03 UTC``."""
    return f"{created[:16].replace('T', ' ')} UTC"


def format_threads(threads: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{threads} thread{'s' if threads != 1 else ''}"


def _reading(parse: Callable[[str], float]) -> BeforeValidator:
    # JSON schema for editors: a number, or a number with its unit.
    either = Annotated[float, Field(ge=0)] | Annotated[str, Field(pattern=_QUANTITY.pattern)]
    return BeforeValidator(
        lambda value: parse(value) if isinstance(value, str) else value, json_schema_input_type=either
    )


Bytes = Annotated[int, _reading(parse_bytes), Field(ge=0)]  # size in bytes; YAML may have `5.4GiB`

Milliseconds = Annotated[float, _reading(parse_milliseconds), Field(ge=0)]  # time in milliseconds; YAML may have `5ms`


# Escapes for untrusted text (labels, names, messages of libraries) in output for people. JSON needs none, and HTML is
# escaped in the template, after :func:`visible`.

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
"""Control characters (ESC starts a terminal command), and characters that change the text direction."""
_MARKDOWN = re.compile(r"([\\`*\[\]|~$])|(?<!\w)(_)|(_)(?!\w)|(:)(?=//)|(?<=www)(\.)|(@)(?=\w)")
"""Characters that start emphasis, code, links, cells, mathematics or mentions in Markdown; ``_`` not inside a word."""
_AT_START = re.compile(r"(?m)^(\s*)([#+>=-]|\d+(?=[.)]))")
"""Characters that start a heading, list or quotation at the beginning of a line."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters by which a spreadsheet treats a cell as a formula, or that it skips before one."""


def visible(text: str) -> str:
    """Replace each control or direction character by U+FFFD. Line ends and tabs stay."""
    return _HIDDEN.sub("\ufffd", text)


def markdown(text: str) -> str:
    """Escape text for a line or table cell of Markdown, so that it stays one line without formatting."""
    line = " ".join(visible(text).split("\n")).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: "\\" + match[0], line)


def markdown_line(text: str) -> str:
    """Escape as :func:`markdown` does, for text at the beginning of a line."""
    return _AT_START.sub(lambda match: f"{match[1]}\\{match[2]}", markdown(text))


def csv_cell(value: object) -> object:
    """Return a value for CSV: text that a spreadsheet would compute is quoted; numbers, also in text, stay numbers."""
    if not isinstance(value, str):
        return value
    if not value.lstrip(" ").startswith(_FORMULA):
        return visible(value)
    try:
        float(value)
    except ValueError:
        return f"'{visible(value)}"
    return value
