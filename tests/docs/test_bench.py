"""`make bench` says what it skips and why, ends in time, and what it leaves is shown."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.bench import Case, Models, main, run


def read_cases(folder: Path) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = json.loads((folder / "session.json").read_text(encoding="utf-8"))["cases"]
    return results


def models(folder: Path, **paths: list[str]) -> Models:
    return Models({"peers_python": [sys.executable], **paths}, folder, time.monotonic() + 60)


def test_what_is_not_at_hand_is_skipped_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "peers,hugging_face_trainer", "--out", str(tmp_path)]) == 0
    results = read_cases(tmp_path)
    assert results["peers"] == {"status": "skipped", "reason": "needs MiniLM's folder: --model DIR"}
    assert results["hugging_face_trainer"]["status"] == "skipped"
    assert "--model DIR" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    assert main(["--only", "floors,waiting", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert {case["reason"] for case in read_cases(tmp_path).values()} == {"no time is left"}


def test_a_script_that_fails_says_why_and_leaves_nothing_of_an_earlier_session(tmp_path: Path) -> None:
    (tmp_path / "waiting.json").write_text("{}", encoding="utf-8")
    results = run(Case("waiting", (str(tmp_path / "no-such-run"),)), models(tmp_path), tmp_path)
    assert results["status"] == "failed"
    assert results["reason"]
    assert results["seconds"] > 0
    assert not (tmp_path / "waiting.json").exists()


def test_unknown_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "nothing", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "there are waiting, floors" in capsys.readouterr().err
