"""What the terminal says below a report's tables: one line for what many rows have in common, the rest in the files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from edgeformer.formats.report import Report
from edgeformer.reporting.words import shape_words, state_words

_ONE_BY_ONE = 2
"""So many rows may each have a line of their own."""
_MOST_KINDS = 3
"""Different doubts that one line names; the commonest."""


def absent_words(report: Report) -> Iterator[str]:
    """A line per reason why something has no figures. What was left out of the verdict is in the report's notes."""
    why: dict[str, dict[str, None]] = {}
    for row in report.rows:
        if row.latency_ms.status == "unavailable" and row.artifact not in report.left_out:
            why.setdefault(state_words(row), {})[row.artifact] = None
    for reason, artifacts in why.items():
        yield f"{', '.join(artifacts)}: {reason}"


def warning_words(report: Report, written: bool) -> Iterator[str]:
    """What speaks against the measurements: row by row where they are few, else one line with counts.

    Args:
        report: what `profile` found.
        written: there are files, which hold every row's warnings.
    """
    warned = [row for row in report.rows if row.latency_ms.warnings]
    if len(warned) <= _ONE_BY_ONE:
        for row in warned:
            yield f"{row.artifact} {shape_words(row, report)}: {'; '.join(row.latency_ms.warnings)}"
        return
    of = sum(row.phase != "cold" and row.latency_ms.status == "measured" for row in report.rows)
    unstable = sum(row.latency_ms.stable is False for row in warned)
    kinds = Counter(kind for row in warned for kind in {_kind(text) for text in row.latency_ms.warnings})
    named = [f"{kind} ({count} rows)" for kind, count in kinds.most_common(_MOST_KINDS)]
    more = f"; and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    where = "the report" if written else "the report's rows"
    counted = f"{len(warned)} of {of} rows are noisy, {unstable} not stable"
    yield f"{counted}: {'; '.join(named)}{more}; row by row in {where}"


def _kind(warning: str) -> str:
    """What a warning says without its figures: up to a colon or a bracket, numbers left out."""
    words = re.split(r"[:(]", warning)[0]
    return re.sub(r"\s+", " ", re.sub(r"\s*\bby \d[\d.]*%?|\b\d[\d.]*%?( ms)?", "", words)).strip()
