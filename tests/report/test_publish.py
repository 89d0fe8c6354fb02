"""Rows of --publish: the columns of the published measurements, and nothing that identifies the owner."""

import csv
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.report.publish import COLUMNS, append_published
from tests.conftest import GOLDEN
from tests.report.made_reports import estimated, made_report, made_row, measured


def test_stable_measured_times_are_added_to_a_file_with_these_columns(tmp_path: Path) -> None:
    bundle, path = Bundle.open(GOLDEN / "small" / "bundle"), tmp_path / "rows.csv"
    report = made_report(
        made_row(measured(12.5)), made_row(measured(stable=False)), made_row(measured(), phase="cold"),
        made_row(estimated(), "device"), run="my secret run", bundle="/home/me/bundle",
    )  # fmt: skip
    assert append_published(report, bundle, path) == append_published(report, bundle, path) == 1
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text and "/home" not in text
    first, second = csv.DictReader(text.splitlines())
    assert first == second and tuple(first) == COLUMNS
    expected = {
        "device": "Some CPU", "runtime": "ONNX Runtime", "version": "1.31", "input": "sequence 128",
        "precision": "FP32", "batch": "1", "value": "12.5", "unit": "ms", "date": "2026-11-21", "note": "200 calls",
    }  # fmt: skip
    assert expected.items() <= first.items()
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="give a new file"):
        append_published(made_report(), Bundle.open(GOLDEN / "small" / "bundle"), path)
    assert path.read_text(encoding="utf-8") == "a,b\n1,2\n"
