"""`make bench` says what it skips and why, ends in time, and what it leaves is shown."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.bench import Case, Models, main, run
from benchmarks.judging import judged
from benchmarks.results_page.bench import bench


def read_cases(folder: Path) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = json.loads((folder / "session.json").read_text(encoding="utf-8"))["cases"]
    return results


def models(folder: Path, **paths: list[str]) -> Models:
    return Models({"peers_python": [sys.executable], **paths}, folder, time.monotonic() + 60)


def test_what_is_not_at_hand_is_skipped_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "peers,loop_int8", "--out", str(tmp_path)]) == 0
    results = read_cases(tmp_path)
    assert results["peers"] == {"status": "skipped", "reason": "needs MiniLM's folder: --model DIR"}
    assert results["loop_int8"]["status"] == "skipped"
    assert "--model DIR" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    assert main(["--only", "decode,waiting", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert {case["reason"] for case in read_cases(tmp_path).values()} == {"no time is left"}


def test_a_script_that_fails_says_why_and_leaves_nothing_of_an_earlier_session(tmp_path: Path) -> None:
    (tmp_path / "plan_time.json").write_text("{}", encoding="utf-8")
    results = run(Case("plan_time", (str(tmp_path / "no-such-run"),)), models(tmp_path), tmp_path)
    assert results["status"] == "failed"
    assert results["reason"]
    assert results["seconds"] > 0
    assert not (tmp_path / "plan_time.json").exists()


def test_unknown_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "nothing", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "there are waiting, floors" in capsys.readouterr().err


def test_the_page_shows_what_was_measured_machine_by_machine(tmp_path: Path) -> None:
    assert bench(tmp_path) == ""
    first, second = tmp_path / "a-cpu", tmp_path / "b-cpu"
    first.mkdir()
    second.mkdir()
    cases = {
        "waiting": {"status": "incomplete", "reason": "another"},
        "floors": {"status": "done", "measured": "2026-11-25T00:00:00", "code_version": "0.2"},
    }
    cases |= {"peers": {"status": "skipped", "reason": "needs MiniLM's folder"}}
    session = {"host": "A CPU", "threads": 2, "measured": "2026-11-23T01:00:00", "cases": cases, "code_version": "0.1"}
    (first / "session.json").write_text(json.dumps(session), encoding="utf-8")
    row = {"median": 0.21, "least": 0.2, "most": 0.25, "bar": 0.3}
    bars = [judged("--help, s", [0.2, 0.21, 0.25], 0.3, at_least=False), judged("another, s", [], 5, at_least=False)]
    (first / "waiting.json").write_text(json.dumps({"seconds": {"--help": row}, "bars": bars}), encoding="utf-8")
    way = {"way": "onnxruntime fp32", "floors": 1.38, "bar": 1.4}
    floors = {"bundles": {"light": {"16x128": {"best": {"fp32": way}}}}}
    (first / "floors.json").write_text(json.dumps(floors), encoding="utf-8")
    (first / "peers.json").write_text("{", encoding="utf-8")  # of an earlier session
    other = {**session, "host": "B", "kernels": ["vnni"], "cases": {"waiting": {"status": "done"}}}
    (second / "session.json").write_text(json.dumps(other), encoding="utf-8")
    slow = [judged("--help, s", [0.4, 0.5, 0.6], 0.3, at_least=False)]
    (second / "waiting.json").write_text(json.dumps({"seconds": {"--help": row}, "bars": slow}), encoding="utf-8")
    page = bench(tmp_path)
    table, of_first, of_second = page.split("\n\n### ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    unjudged = "– not judged: 0 of at least 3 rounds were measured"
    assert [rows[0], *rows[2:]] == [
        ["", "bar", "A CPU", "B (vnni)"],
        ["--help, s", "at most 0.3", "0.21 s (0.20–0.25) met", "0.50 s (0.40–0.60) not met"],
        ["another, s", "at most 5", unjudged, "not measured"],
    ]
    assert of_first.startswith("A CPU\n\n2 threads, 2026-11-23 to 2026-11-25.")
    assert "By the code of 0.1 (`waiting`); 0.2 (`floors`)." in of_first
    assert "0.21 (0.20–0.25)" in of_first
    assert "| light" in of_first
    assert "1.38" in of_first
    assert "`peers` did not run: needs MiniLM's folder." in of_first
    assert of_second.startswith("B (vnni)\n\n2 threads, 2026-11-23.")
    assert "peers" not in of_second
