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
    """Yield the warnings of the rows: measured rows and estimated rows apart, since only a measurement is noisy.

    Up to two rows of either get a line each, more of them one line with counts. Cold rows are single calls; their
    warnings are those of the process, which its other rows repeat.

    Args:
        report: of `profile`.
        written: whether report files exist, which hold every row's warnings.
    """
    rows = [row for row in report.rows if row.phase != "cold"]
    where = "the report" if written else "the report's rows"
    for status in ("measured", "estimated"):
        of_status = [row for row in rows if row.latency_ms.status == status]
        warned = [row for row in of_status if row.latency_ms.warnings]
        if len(warned) <= _ONE_BY_ONE:
            for row in warned:
                estimate = "estimate of " if status == "estimated" else ""
                yield f"{estimate}{row.artifact} {shape_words(row, report)}: {'; '.join(row.latency_ms.warnings)}"
            continue
        kinds = Counter(kind for row in warned for kind in dict.fromkeys(map(_kind, row.latency_ms.warnings)))
        named = [f"{kind} ({_rows(count)})" for kind, count in kinds.most_common(_MOST_KINDS)]
        more = f"; and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
        counted = f"{len(warned)} of {len(of_status)} estimated rows are less certain"
        if status == "measured":
            unstable = sum(row.latency_ms.stable is False for row in warned)
            counted = f"{len(warned)} of {len(of_status)} rows are noisy, {unstable} not stable"
        yield f"{counted}: {'; '.join(named)}{more}; row by row in {where}"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"


def _kind(warning: str) -> str:
    """What a warning says without its figures: up to a colon or a bracket, numbers left out."""
    words = re.split(r"[:(]", warning)[0]
    return re.sub(r"\s+", " ", re.sub(r"\s*\bby \d[\d.]*%?|\b\d[\d.]*%?( ms)?", "", words)).strip()
