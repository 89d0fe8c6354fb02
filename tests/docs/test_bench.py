"""`make bench` says what it skips and why, ends in time, and what it leaves is shown."""

import json
import time
from pathlib import Path

import pytest
import typer

from benchmarks.bench import Case, Models, main, run


def read_cases(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / "session.json").read_text(encoding="utf-8"))["cases"]


def test_skipped_and_unknown_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(only="hugging_face_trainer", out=tmp_path) == 0
    (result,) = read_cases(tmp_path).values()
    assert result["status"] == "skipped" and str(result["reason"]).startswith("needs ")
    assert "hugging_face_trainer: skipped: needs " in capsys.readouterr().out
    assert main(only="floors,waiting", minutes=0, out=tmp_path) == 0
    assert {case["reason"] for case in read_cases(tmp_path).values()} == {"no time is left"}
    with pytest.raises(typer.BadParameter, match="unknown nothing; there are waiting, floors"):
        main(only="nothing", out=tmp_path)


def test_a_script_that_fails_says_why_and_leaves_nothing_of_an_earlier_session(tmp_path: Path) -> None:
    (tmp_path / "waiting.json").write_text("{}", encoding="utf-8")
    models = Models({}, tmp_path, time.monotonic() + 60)
    results = run(Case("waiting", (str(tmp_path / "no-such-run"),)), models, tmp_path)
    assert results["status"] == "failed" and results["reason"] and results["seconds"] > 0
    assert not (tmp_path / "waiting.json").exists()
