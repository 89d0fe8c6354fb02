"""Every section of docs/results.md says when, where and by what code it was measured, and what has superseded it."""

from __future__ import annotations

import re

from tests.docs.document import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
ORIGIN = re.compile(r"^(Measured|Trained and measured|Counted) |^\d+ threads, 20\d\d-\d\d-\d\d", re.MULTILINE)


def test_every_section_of_results_says_where_its_figures_are_from() -> None:
    parts = re.split(r"^#{2,3} (.*)$", PAGE, flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    nothing_measured = {"The papers' tables and figures, re-run", "How fast", "On a GPU"}  # their parts say it
    assert [name for name, text in sections.items() if not ORIGIN.search(text)] == [
        name for name in sections if name in nothing_measured
    ]
    assert len(sections) > 25
