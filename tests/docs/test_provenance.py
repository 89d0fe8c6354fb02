"""Every section of docs/results.md says when, where and by what code it was measured, and what has superseded it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.results_page import provenance
from benchmarks.results_page.provenance import (
    RESULTS,
    changes,
    marks,
    measured,
    origin_of,
    superseded,
    superseded_study,
)
from benchmarks.studies.specification import load_study
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


def test_a_later_change_supersedes_and_an_earlier_one_does_not(tmp_path: Path) -> None:
    affected = {"file": "a.json", "figures": "times", "again": "python a.py"}
    change = {"commit": "abc", "date": "2026-11-23T10:00:00+00:00", "what": "graphs", "results": [affected]}
    (tmp_path / "changes.json").write_text(json.dumps([change]), encoding="utf-8")
    assert superseded("a.json", "2026-11-23T11:00:00+00:00", tmp_path) == []
    assert superseded("b.json", "2026-11-23T09:00:00+00:00", tmp_path) == []
    (mark,) = marks(superseded("a.json", "2026-11-23T09:00:00+00:00", tmp_path))
    assert mark == (
        "**Superseded** on 2026-11-23 by abc (graphs): times here are of older code. "
        "To measure them again: `python a.py`."
    )


def test_times_of_a_study_that_are_measured_again_are_superseded_no_longer(tmp_path: Path) -> None:
    columns = ("accuracy", "latency_ms", "speedup", "ms_per_sample", "size_bytes")
    affected = {"study": ["table6"], "columns": columns[1:], "figures": "times", "again": "make study NAME=NAME"}
    change = {"commit": "abc", "date": "2026-11-23T10:00:00+00:00", "what": "graphs", "results": [affected]}
    (tmp_path / "changes.json").write_text(json.dumps([change]), encoding="utf-8")
    (tmp_path / "studies").mkdir()

    def write(name: str, day: int, **content: object) -> None:
        document = {**content, "started": f"2026-11-{day}T09:00:00+00:00"}
        (tmp_path / "studies" / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")

    def old_columns() -> list[str]:
        return [name for _, old in superseded_study("table6", columns, ["a", "b"], tmp_path) for name in old.columns]

    write("a", 20)
    write("b", 25)
    assert old_columns() == [*columns[1:]]  # no times of their own: as old as the oldest run
    write("times-1", 21, entries=[{"run": "a"}, {"run": "b"}])
    assert old_columns() == [*columns[1:]]
    write("times-1", 24, entries=[{"run": "a"}, {"run": "b"}])
    write("times-2", 20, entries=[{"run": "c"}])  # of another study
    assert old_columns() == ["ms_per_sample", "size_bytes"]
    write("a", 24)
    assert old_columns() == []
    assert superseded_study("table7", columns, ["missing"], tmp_path) == []


def test_the_page_marks_decoding_of_before_it_was_rewritten() -> None:
    assert "**Superseded** on 2026-11-24 by 00807e5" in measured("cpu-2core/2026-11-21-decode.json")
    assert "Superseded" not in measured("graph_size.json")
    for study in ("table6", "table9", "table10", "table11"):
        section = PAGE.partition(f"`make study NAME={study}`:")[2].partition("\n### ")[0]
        assert f"`python -m benchmarks.studies {study} --data DIR --fresh`" in section, study


def test_changes_name_results_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in changes():
        for affected in change.results:
            assert bool(affected.file) != bool(affected.study), affected
            assert not affected.file or (RESULTS / affected.file).is_file(), affected.file
            for name in affected.study:
                assert load_study(name)[0].name == name and affected.columns
    monkeypatch.setattr(provenance, "CHANGES", "none.json")
    assert changes() == ()
