"""What `edgeformer profile` and `edgeformer calibrate` refuse before they measure anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgeformer.bundle import Bundle, seal
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
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["edgeformer", command, str(folder), "--device", "host", "--json", *options])
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
        (["--bundle", "another-run"], "--bundle: belongs to a report"),
        (["--calibrate"], "No such option"),
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--threads", "1,2"], "one number of threads"),
        (["--validate-only", "--threads", "1"], "those of the calibration"),
        (["--validate-only"], "has no calibration; run edgeformer calibrate"),
        (
            ["--also", "another-run", "--validate-only"],
            "--also: names runs to calibrate with; leave out --validate-only",
        ),
        (["--also", "another-run"], "another-run"),
        (["--search"], "No such option"),
    ],
)
def test_options_of_calibrate_that_make_no_sense(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    expected: str,
) -> None:
    assert expected in refused(folder, monkeypatch, capsys, *options, command="calibrate")
