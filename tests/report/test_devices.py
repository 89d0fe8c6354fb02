"""Reports of several devices, side by side."""

import csv
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.report import Choice, Latency, Report, Verdict
from edgeformer.report.devices import (
    compare_devices,
    comparison_tables,
    format_devices,
    name_reports,
    write_comparison,
)
from tests.report import made_reports
from tests.report.made_reports import estimated, made_report, made_row, measured

FP16 = {"artifact": "onnx-fp16", "size_bytes": 10 * made_reports.MIB}
PI = made_report(made_row(measured(20.0)), made_row(measured(80.0), batch=8), made_row(measured(15.0), **FP16))
SHAKY = made_row(measured(5.0, stable=False))
DESK = made_report(SHAKY, made_row(measured(9.0), **FP16), made_row(estimated(), "device"))
HOSTILE = "<script>alert(1)</script>[bold]|x"


def cells(reports: dict[str, Report], artifact: str, batch: int = 1) -> dict[str, tuple[float | None, float | None]]:
    (row,) = (row for row in compare_devices(reports)["rows"] if (row["artifact"], row["batch"]) == (artifact, batch))
    return {name: (cell["p50_ms"], cell["ratio"]) for name, cell in row["devices"].items()}


def test_rows_of_devices_and_their_ratios() -> None:
    reports = {"pi": PI, "desk": DESK}
    assert cells(reports, "onnx-fp32") == {"pi": (20.0, 4.0), "desk": (5.0, 1.0)}
    assert cells(reports, "onnx-fp32", batch=8) == {"pi": (80.0, 1.0)}
    assert len(compare_devices(reports)["rows"]) == 3
    absent = made_report(made_row(Latency(status="unavailable", reason="the model refused it")))
    assert cells({"pi": absent, "desk": DESK}, "onnx-fp32") == {"pi": (None, None), "desk": (5.0, 1.0)}
    several = made_report(made_row(measured(20.0), threads=1), made_row(measured(12.0), threads=4))
    assert [row["threads"] for row in compare_devices({"pi": several, "desk": DESK})["rows"]] == [1, 4, None, None]
    one = made_report(made_row(measured(20.0), threads=4)), made_report(made_row(measured(9.0), threads=2))
    (row,) = compare_devices(dict(zip(("pi", "desk"), one, strict=True)))["rows"]
    assert row["threads"] is None and len(row["devices"]) == 2


def failed(artifact: str) -> Verdict:
    """Breaks the size limit; the latency limit is at 1 × 128."""
    size = made_reports.SIZE.model_copy(update={"artifact": artifact, "status": "fail"})
    return Verdict(status="fail", checks=(size, made_reports.LATENCY))


@pytest.mark.parametrize(
    ("report", "artifact", "p50_ms"),
    [
        (PI, "onnx-fp16", 15.0),
        (PI.model_copy(update={"verdict": failed("onnx-fp16")}), "onnx-fp32", 20.0),
        # Without a latency limit the smallest shape counts, not the smallest time.
        (made_report(made_row(measured(9.0), batch=8), made_row(measured(20.0)), verdict=Verdict(status="pass")),
         "onnx-fp32", 20.0),
        (PI.model_copy(update={"left_out": {"onnx-fp16": "its score is too low"}}), "onnx-fp32", 20.0),
        (PI.model_copy(update={"search": made_reports.made_search()}), "onnx-fp32", 1.0),
    ],
    ids=["fastest", "breaks a limit", "smallest shape", "left out", "search"],
)  # fmt: skip
def test_the_cheapest_artifact(report: Report, artifact: str, p50_ms: float) -> None:
    (device,) = compare_devices({"pi": report})["devices"]
    assert (device["choice"]["artifact"], device["choice"]["p50_ms"]) == (artifact, p50_ms)


def test_no_artifact_to_deploy() -> None:
    nothing = Choice.model_validate(made_reports.made_search().model_dump() | {"pick": None}, strict=False)
    unmeasured = made_report(made_row(estimated(), "device"))
    reports = {"pi": PI.model_copy(update={"search": nothing}), "desk": unmeasured}
    assert [device["choice"] for device in compare_devices(reports)["devices"]] == [None, None]


def test_tables_state_failures_instability_and_different_runs() -> None:
    comparison = compare_devices({"pi": PI, "desk": DESK}, {"jetson": "jetson: Connection refused"})
    text = "".join(made_reports.rendered(table, 140) for table in comparison_tables(comparison))
    assert "mine-001 on 3 devices" in text and "jetson: Connection refused" in text
    assert "5.00 ms unstable" in text and "20.0 ms (4.0×)" in text
    assert "unstable: the times changed during the measurement" in text
    text = format_devices(comparison, "markdown")
    assert "| onnx-fp32" in text and "20.0 ms (4.0×)" in text
    comparison = compare_devices({"pi": PI, "desk": DESK.model_copy(update={"run": "other-002"})})
    assert comparison["notes"][0] == "the reports are of different runs: mine-001, other-002"
    assert comparison["notes"][0] in made_reports.rendered(comparison_tables(comparison)[1], 200)
    lines = [*csv.DictReader(io.StringIO(format_devices(compare_devices({"pi": PI, "desk": DESK}), "csv")))]
    assert [" ".join(line[key] for key in ("device", "artifact", "batch", "p50_ms")) for line in lines] == [
        "pi onnx-fp32 1 20.0", "desk onnx-fp32 1 5.0", "pi onnx-fp32 8 80.0", "pi onnx-fp16 1 15.0",
        "desk onnx-fp16 1 9.0",
    ]  # fmt: skip


def test_the_page_escapes_all_text_and_loads_nothing(tmp_path: Path) -> None:
    host = {"cpu": HOSTILE, "gpu": HOSTILE, "threads": 1}
    hostile = made_report(made_row(measured(20.0), artifact=HOSTILE), run=HOSTILE, host=host)
    comparison = compare_devices({HOSTILE: hostile, "desk": DESK}, {"jetson": f"no connection {HOSTILE}"})
    write_comparison(comparison, tmp_path / "devices.html")
    page = (tmp_path / "devices.html").read_text(encoding="utf-8")
    tags: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)  # type: ignore[method-assign, assignment, misc]
    parser.feed(page)
    assert not tags & {"script", "link", "img", "iframe"} and page.count("&lt;script&gt;") > 5
    assert "default-src 'none'" in page and "--share: 1.000" in page
    assert "[bold]" in "".join(made_reports.rendered(table, 300) for table in comparison_tables(comparison))
    write_comparison(compare_devices({"pi": made_report(made_row(estimated(), "device"))}), tmp_path / "empty.html")
    assert "Nothing was measured." in (tmp_path / "empty.html").read_text(encoding="utf-8")


def test_reports_are_named_by_address_if_it_is_unique(tmp_path: Path) -> None:
    addresses = {"a": "pi@kitchen", "b": "jetson", "c": "jetson", "d": None}
    for name, address in addresses.items():
        host = PI.host | ({"address": address} if address else {})
        write_json(tmp_path / f"{name}.json", PI.model_copy(update={"host": host}))
    paths = [tmp_path / f"{name}.json" for name in addresses]
    assert [*name_reports(paths)] == ["pi@kitchen", *map(str, paths[1:])]
