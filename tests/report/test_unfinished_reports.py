"""Files that killed processes began to write beside reports and profiles: nobody reads them, and they go in time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import profile_names
from edgeformer.report import pictures
from edgeformer.report.compare import _timed
from edgeformer.report.report_files import write_report
from edgeformer.run import Location
from tests.report.made_reports import made_report, made_row, measured


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib, which draws for seconds."""
    monkeypatch.setattr(pictures, "can_draw", lambda: False)


@pytest.mark.parametrize(
    ("name", "age_s", "stays"),
    [
        (".rtx4050.json.abc.tmp.json", 3700, False),
        (".rtx4050.png.abc.tmp.png", 3700, False),
        (".rtx4050.json.abc.tmp.json", 3500, True),  # perhaps another process's, which profiles as well
        (".host.json.abc.tmp.json", 3700, True),  # whoever writes that report removes it
        ("rtx4050.tmp.json", 3700, True),
    ],
)
def test_what_a_killed_process_left_goes_with_the_next_report(
    tmp_path: Path, name: str, age_s: int, stays: bool
) -> None:
    left = tmp_path / "reports" / name
    left.parent.mkdir()
    left.write_text("{", encoding="utf-8")
    os.utime(left, (time.time() - age_s, time.time() - age_s))
    written = write_report(made_report(), Location(run=tmp_path, bundle=None))
    assert {path.name for path in left.parent.iterdir()} == {path.name for path in written} | (
        {name} if stays else set()
    )


def test_a_report_without_its_name_is_not_compared(tmp_path: Path) -> None:
    """Whole, but never given its name: what was profiled since does not hold its rows."""
    location = Location(run=tmp_path, bundle=None)
    write_report(made_report(made_row(measured(20.0))), location)
    rows = _timed(location).rows
    assert [row.latency_ms.p50 for row in rows] == [20.0]
    write_report(made_report(made_row(measured(30.0)), device="other"), location)
    (tmp_path / "reports" / "other.json").rename(tmp_path / "reports" / ".other.json.abc.tmp.json")
    assert _timed(location).rows == rows


def test_a_profile_without_its_name_is_none(tmp_path: Path) -> None:
    for name in ("mine.yaml", ".host.yaml.abc.tmp.yaml"):
        (tmp_path / name).write_text("name: mine", encoding="utf-8")
    assert "mine" in profile_names(tmp_path) and not [name for name in profile_names(tmp_path) if name.startswith(".")]
