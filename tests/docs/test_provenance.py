"""Every page of results names the date, machine and code of its figures, and the changes that supersede them."""

import re

from tests.docs.document import ROOT

FOLDER = ROOT / "docs" / "results"
PAGES = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.md")}
ORIGIN = re.compile(r"^(Measured|Trained and measured|Counted) |^\d+ threads, 20\d\d-\d\d-\d\d", re.MULTILINE)
SUMMARIES = {"index.md", "claims.md", "fidelity.md", "speed.md", "speed-targets.md", "gpu.md"}
"""Pages without figures, or with figures whose origin is on another page."""


def test_pages_name_the_origin_of_their_figures_and_mark_superseded_ones() -> None:
    assert {name for name, text in PAGES.items() if not ORIGIN.search(text)} == SUMMARIES
    assert len(PAGES) > 30
    assert "**Superseded** on 2026-11-24 by commit 00807e5" in PAGES["language-models.md"]
    for study in ("table6", "table9", "table10", "table11"):
        assert f"`python -m benchmarks.studies {study} --data DIR --fresh`" in PAGES[f"studies/{study}.md"], study
