"""Every section of docs/results.md says when, where and by what code it was measured, and what has superseded it."""

from __future__ import annotations

import re

from benchmarks.results_page.provenance import (
    origin_of,
)
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


def test_a_document_says_date_machine_and_code() -> None:
    run = {
        "started": "2026-11-21T09:00:00+00:00",
        "code_version": "0.1.0+57de127a59-dirty",
        "host": {"cpu": "AMD EPYC", "cores": 2, "threads": 1},
    }
    other = {**run, "started": "2026-11-22T09:00:00+00:00", "code_version": "0.1.0", "host": {"cpu": "AMD EPYC"}}
    assert str(origin_of([[run, other]])) == (
        "Measured 2026-11-21 to 2026-11-22 on AMD EPYC, 1 thread; code: 57de127a59 with uncommitted changes, "
        "release 0.1.0, its commit not recorded."
    )
    unsaid = str(origin_of([{"rows": []}], ["cpu-2core/2026-11-20-bits.json"]))
    assert unsaid == "Measured 2026-11-20 on a machine that was not recorded; code: not recorded."
