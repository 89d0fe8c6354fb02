"""Ctrl-C in `profile`: what was measured is kept and named; nothing is judged, and no finished report is touched."""

import json
import sys
from pathlib import Path

import pytest

from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.report import Report
from edgeformer.cli import main, progress
from edgeformer.report.sentences import verdict_sentence
from tests.runtimes.tiny_bundle import write_bundle


class PressesCtrlC(Progress):
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
    monkeypatch.setattr(sys, "argv", [*words, "--max-latency", "50ms"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    return str(json.loads(capsys.readouterr().out)["error"])


@pytest.mark.slow
def test_rows_that_were_measured_before_ctrl_c_are_written(tmp_path, monkeypatch, capsys):
    folder = write_bundle(tmp_path / "bundle")
    (folder / "reports").mkdir()
    (folder / "reports" / "host.json").write_text("an earlier report", encoding="utf-8")
    message = interrupted(folder, 1, monkeypatch, capsys)
    (path,) = (folder / "reports" / "interrupted").iterdir()
    report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    assert [(row.phase, row.batch) for row in report.rows] == [("cold", 1), ("steady", 1)]
    assert {row.latency_ms.status for row in report.rows} == {"measured"}
    assert report.verdict.status == "unknown" and report.verdict.checks == ()
    assert report.notes == (
        "interrupted after 2 rows of 1 of 1 artifacts; there is no verdict",
        "the model was trained on synthetic text, so its scores say nothing about real text",
    )
    assert verdict_sentence(report) == "No limit was checked; size, latency and memory were not judged: interrupted."
    assert report.rows[1].latency_ms.stable is False
    assert report.estimate_evidence == () and report.estimated_for is None
    assert "2 rows of" in message and str(path) in message and "without a verdict" in message
    assert (folder / "reports" / "host.json").read_text(encoding="utf-8") == "an earlier report"


def test_ctrl_c_before_the_first_row_says_that_nothing_was_written(tmp_path, monkeypatch, capsys):
    folder = write_bundle(tmp_path / "bundle")
    files = sorted(folder.rglob("*"))
    message = interrupted(folder, 0, monkeypatch, capsys)
    assert message == "interrupted before the first row was measured; nothing was written"
    assert sorted(folder.rglob("*")) == files
