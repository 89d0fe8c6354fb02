"""The times of runs side by side: what stands under one name was measured in one way, on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.report import Report, Row
from edgeformer.report.compare import Record, format_comparison, run_records
from edgeformer.run import Location
from tests.report.made_reports import estimated, made_report, made_row, measured

OLD = Path(__file__).resolve().parents[1] / "old_format" / "classifier-v1" / "bundle"
HERE = {"cpu": "Some CPU", "cores": 2, "system": "Linux"}
DAY = "2026-11-{}T00:00:00+00:00"


@pytest.fixture
def bundles(tmp_path: Path) -> list[Location]:
    """Two bundles, which have no reports yet."""
    for name in ("first", "second"):
        shutil.copytree(OLD, tmp_path / name)
    return [Location(None, tmp_path / name) for name in ("first", "second")]


def write(location: Location, name: str, *rows: Row, day: int = 25, host: dict[str, Any] = HERE) -> Report:
    report = made_report(*rows, host=host, created=DAY.format(day))
    location.reports.mkdir(exist_ok=True)
    (location.reports / f"{name}.json").write_text(report.model_dump_json(), encoding="utf-8")
    return report


def timed(p50: float, **facts: Any) -> Row:
    return made_row(measured(p50), **{"threads": 2, **facts})


def times(record: Record) -> Record:
    return {name: value for name, value in record.items() if name.endswith("_p50_ms")}


def test_another_provider_has_its_name(bundles: list[Location]) -> None:
    rows = [timed(9.0), timed(5.0, provider="openvino-cpu"), timed(3.0, provider="openvino-cpu-bf16")]
    rows.append(timed(1.0, provider="CUDAExecutionProvider", threads=None))
    write(bundles[0], "host", *rows, made_row(estimated(), "device"), timed(700.0, phase="cold"))
    (record,) = run_records(bundles[:1])
    assert times(record) == {
        "onnx-fp32_1x128_p50_ms": 9.0,
        "onnx-fp32_1x128_openvino-cpu_p50_ms": 5.0,
        "onnx-fp32_1x128_openvino-cpu-bf16_p50_ms": 3.0,
        "onnx-fp32_1x128_CUDAExecutionProvider_p50_ms": 1.0,
    }


def test_threads_are_named_where_the_runs_were_measured_with_different_ones(bundles: list[Location]) -> None:
    write(bundles[0], "host", timed(9.0))
    write(bundles[1], "host", timed(5.0, threads=4))
    first, second = run_records(bundles)
    assert times(first) == {"onnx-fp32_1x128_2threads_p50_ms": 9.0}
    assert times(second) == {"onnx-fp32_1x128_4threads_p50_ms": 5.0}
    assert [times(*run_records([one])) for one in bundles] == [
        {"onnx-fp32_1x128_p50_ms": 9.0},
        {"onnx-fp32_1x128_p50_ms": 5.0},
    ]


def test_reports_of_another_machine_than_the_newest_ones_are_left_out_and_named(bundles: list[Location]) -> None:
    write(bundles[0], "aged", timed(20.0), day=24)
    write(bundles[0], "host", timed(9.0), timed(8.0, batch=2), day=26)
    write(bundles[0], "other", timed(7.0), timed(6.0, batch=4), day=25, host={**HERE, "cpu": "A small board"})
    (record,) = run_records(bundles[:1])
    assert times(record) == {"onnx-fp32_1x128_p50_ms": 9.0, "onnx-fp32_2x128_p50_ms": 8.0}
    assert record["measured_on"] == "Some CPU"
    assert record["reports_left_out"] == "other.json, of A small board with 2 cores (Linux)"
    assert "reports left out" in format_comparison([record], "plain")


def test_a_bundle_without_reports_has_no_times(bundles: list[Location]) -> None:
    (record,) = run_records(bundles[:1])
    assert times(record) == {} and "measured_on" not in record and record["parameters"] > 0
