"""Ctrl-C in `profile`: what was measured is kept and named; nothing is judged, and no finished report is touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_bundle import write_bundle

from edgeformer.cli import main, progress
from edgeformer.formats.progress import Silent
from edgeformer.formats.report import Report


class PressesCtrlC(Silent):
    """Raises KeyboardInterrupt, as Ctrl-C does, after some shapes were measured."""

    def __init__(self, shapes: int) -> None:
        self.left = shapes

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        if self.left <= 0:
            raise KeyboardInterrupt


def interrupted(folder: Path, shapes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(progress, "show_progress", lambda: PressesCtrlC(shapes))
    words = ["edgeformer", "profile", str(folder), "--device", "host", "--json", "--batch", "1,2", "--seq", "8"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    return str(json.loads(capsys.readouterr().out)["error"])


def test_rows_that_were_measured_before_ctrl_c_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bundle(tmp_path / "bundle")
    (folder / "reports").mkdir()
    (folder / "reports" / "host.json").write_text("an earlier report", encoding="utf-8")
    message = interrupted(folder, 1, monkeypatch, capsys)
    (path,) = (folder / "reports" / "interrupted").iterdir()
    report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    assert [(row.phase, row.batch, row.latency_ms.status) for row in report.rows] == [
        ("cold", 1, "measured"),
        ("steady", 1, "measured"),
    ]
    assert report.verdict.status == "unknown" and report.verdict.checks == ()
    assert any("interrupted: 2 rows of 1 of" in note and "nothing was judged" in note for note in report.notes)
    assert "2 rows of" in message and str(path) in message and "nothing was judged" in message
    assert (folder / "reports" / "host.json").read_text(encoding="utf-8") == "an earlier report"


def test_ctrl_c_before_the_first_row_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bundle(tmp_path / "bundle")
    before = sorted(folder.rglob("*"))
    message = interrupted(folder, 0, monkeypatch, capsys)
    assert message == "interrupted before anything was measured; nothing was written"
    assert sorted(folder.rglob("*")) == before
