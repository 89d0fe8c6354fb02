"""What `edgeformer profile` and `edgeformer calibrate` refuse before they measure anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgeformer.cli import main
from tests.runtimes.tiny_bundle import write_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
    command: str = "profile",
) -> str:
    """The message of exit code 2; stdout is one JSON document and nothing was written."""
    files = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["edgeformer", command, str(folder), "--device", "host", "--json", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sorted(folder.rglob("*")) == files
    return str(json.loads(capsys.readouterr().out)["error"])


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("profile", ["--choose", "--min-accuracy", "0.9"], "No such option"),
        ("profile", ["--choose", "--min-score", "91"], "0.91 is 91%"),
        ("profile", ["--min-score", "0.9"], "--min-score: is an option of --choose; add --choose"),
        ("profile", ["--minimize", "size"], "--minimize: is an option of --choose; add --choose"),
        ("profile", ["--choose", "--minimize", "price"], "price"),
        ("profile", ["--search"], "give --choose instead"),
        ("profile", ["--bundle", "another-run"], "--bundle: is for a report"),
        ("profile", ["--calibrate"], "No such option"),
        ("profile", ["--max-energy", "10"], "--max-energy"),
        ("profile", ["--max-energy", "10MiB"], "uJ, mJ, J"),
        ("profile", ["--threads", "1,two"], "--threads 1,16"),
        ("profile", ["--threads", "0"], "at least 1"),
        ("calibrate", ["--threads", "1,2"], "one number of threads"),
        ("calibrate", ["--validate-only", "--threads", "1"], "uses the threads of the calibration"),
        ("calibrate", ["--validate-only"], "has no calibration; run edgeformer calibrate"),
        ("calibrate", ["--also", "another-run", "--validate-only"], "--also: adds runs to a calibration"),
        ("calibrate", ["--also", "another-run"], "another-run"),
        ("calibrate", ["--choose"], "No such option"),
    ],
)
def test_options_that_make_no_sense(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    expected: str,
) -> None:
    assert expected in refused(folder, monkeypatch, capsys, *options, command=command)
