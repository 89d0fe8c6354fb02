"""What `edgeformer profile` refuses before it measures anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_bundle import write_bundle

from edgeformer.bundle import Bundle, seal
from edgeformer.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The message of exit code 2; stdout is one JSON document and nothing was written."""
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["edgeformer", "profile", str(folder), "--device", "host", "--json", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sorted(folder.rglob("*")) == before
    return str(json.loads(capsys.readouterr().out)["error"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--search", "--max-perplexity", "20"], "classifier; bound it with --min-accuracy"),
        (["--search", "--min-accuracy", "91"], "0.91 for 91 %"),
        (["--min-accuracy", "0.9"], "--min-accuracy: says what to search for; add --search"),
        (["--minimize", "size"], "--minimize: says what to search for; add --search"),
        (["--search", "--minimize", "price"], "price"),
        (["--search", "--calibrate"], "--search: --calibrate and --validate judge nothing"),
        (["--max-size", "1MiB", "--validate"], "--max-size: --calibrate and --validate judge nothing"),
        (["--calibrate", "--threads", "1,2"], "one number of threads"),
        (["--validate", "--threads", "1"], "those of the calibration"),
        (["--validate"], "has no calibration"),
        (["--also", "another-run", "--validate"], "--also: names runs to calibrate with; say --calibrate"),
        (["--also", "another-run"], "--also: names runs to calibrate with; say --calibrate"),
        (["--also", "another-run", "--calibrate"], "another-run"),
        (["--max-energy", "10"], "--max-energy"),
        (["--max-energy", "10MiB"], "UJ, MJ, J"),
        (["--threads", "1,two"], "--threads 1,16"),
        (["--threads", "0"], "at least 1"),
    ],
)
def test_options_that_make_no_sense(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    expected: str,
) -> None:
    assert expected in refused(folder, monkeypatch, capsys, *options)


def test_accuracy_of_a_language_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Bundle.open(folder).manifest.model_copy(update={"task": "language-modeling"})
    seal(folder, manifest)
    message = refused(folder, monkeypatch, capsys, "--search", "--min-accuracy", "0.9")
    assert "language model; bound it with --max-perplexity" in message
