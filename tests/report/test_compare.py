"""Reports side by side: two reports, reports of several devices, and runs."""

import csv
import io
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.artifacts.report import Choice, Latency, Report, Verdict
from edgeformer.cli.app import app
from edgeformer.report.compare import compare_reports, format_comparison, format_pairs, report_of, run_records
from edgeformer.report.devices import (
    compare_devices,
    comparison_tables,
    format_devices,
    name_reports,
    write_comparison,
)
from edgeformer.run import Location, locate, read_run
from tests.conftest import OLD_FORMAT
from tests.report import made_reports
from tests.report.made_reports import copy_run, estimated, made_report, made_row, measured

HOST = {"cpu": "Some CPU", "cores": 2, "system": "Linux"}
every_style = pytest.mark.parametrize("style", ["plain", "markdown", "csv"])


class TestReports:
    @pytest.mark.parametrize(
        ("a", "b", "mark"),
        [
            (measured(20.0), measured(21.9), "within the noise"),
            (measured(20.0), measured(22.1), "slower"),
            (measured(22.1), measured(20.0), "faster"),
            (measured(20.0), measured(30.0, stable=False), "unstable"),
            # 1.96 · √(π/2) · √(2 · 1² / 50) = 0.49: this spread needs more calls before 1.4 is significant.
            (measured(20.0, cv=1.0, n=50), measured(28.0, cv=1.0, n=50), "within the noise"),
            (measured(20.0, cv=1.0, n=5000), measured(28.0, cv=1.0, n=5000), "slower"),
            (estimated(1.0, 2.0), estimated(1.9, 3.0), "within the ranges of the estimates"),
            (estimated(1.0, 2.0), estimated(2.1, 3.0), "estimated slower"),
            (measured(1.0), estimated(2.1, 3.0), "an estimate and a measurement"),
        ],
    )
    def test_mark_of_a_difference(self, a: Latency, b: Latency, mark: str) -> None:
        (row,) = compare_reports(made_report(made_row(a)), made_report(made_row(b)))["rows"]
        assert row["mark"] == mark

    def test_rows_are_matched_by_shape_and_unmatched_rows_kept(self) -> None:
        first = made_report(made_row(measured(20.0)), made_row(measured(90.0), batch=8))
        second = made_report(made_row(measured(10.0), batch=8), made_row(measured(20.0), seq=64))
        rows = compare_reports(first, second)["rows"]
        assert [(row["batch"], row["seq"]) for row in rows] == [(1, 128), (8, 128), (1, 64)]
        assert [row["mark"] for row in rows] == ["only in one report", "faster", "only in one report"]
        assert rows[1]["ratio"] == pytest.approx(1 / 9)
        pair = made_row(measured(40.0), threads=1), made_row(measured(20.0), threads=2)
        rows = compare_reports(made_report(*pair), made_report(*reversed(pair)))["rows"]
        assert [(row["threads"], row["ratio"]) for row in rows] == [(1, 1.0), (2, 1.0)]

    def test_different_machines_are_noted(self) -> None:
        other = made_report(host={"cpu": "Another CPU", "threads": 4, "versions": {"onnxruntime": "1.20"}})
        notes = " ".join(compare_reports(made_report(), other)["notes"])
        assert "different machines: Some CPU and Another CPU" in notes
        assert "different threads: 2 and 4" in notes and "1.31 and 1.20" in notes
        assert compare_reports(made_report(), made_report())["notes"] == []

    def test_formats(self) -> None:
        compared = compare_reports(made_report(), made_report(made_row(measured(40.0))))
        json.dumps(compared)
        for style in ("plain", "markdown"):
            text = format_pairs(compared, style)  # type: ignore[arg-type]
            assert "2.00" in text and "slower" in text and "only in one report" in text
        rows = list(csv.DictReader(io.StringIO(format_pairs(compared, "csv"))))
        assert float(rows[0]["ratio"]) == 2.0 and rows[0]["a_status"] == "measured"

    def test_missing_report_names_the_command(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match=r"edgeformer profile .*mine --device t4"):
            report_of(Location(tmp_path / "mine", None), "t4")

    def test_command_takes_two_report_files(self, tmp_path: Path) -> None:
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        write_json(files[0], made_report(made_row(measured(20.0))))
        write_json(files[1], made_report(made_row(measured(10.0))))
        runner, names = CliRunner(), [str(file) for file in files]
        outcome = runner.invoke(app, ["compare", *names, "--json"])
        assert outcome.exit_code == 0
        assert json.loads(outcome.stdout)["rows"][0].items() >= {"ratio": 0.5, "mark": "faster"}.items()
        for arguments, message in (
            ([names[0]], "needs two reports, not 1"),
            ([names[0], "a-run"], "the other argument is a run"),
            ([*names, "--device", "t4"], "leave it out"),
            ([names[0], str(tmp_path / "gone.json")], "cannot be read"),
        ):
            error = runner.invoke(app, ["compare", *arguments]).exception
            assert isinstance(error, EdgeformerError) and error.exit_code == 2
            assert message in str(error)


def test_times_of_runs_name_unusual_providers_and_other_machines(tmp_path: Path) -> None:
    location = Location(None, Path(shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", tmp_path / "bundle")))
    board, steady = {**HOST, "cpu": "A small board"}, {"threads": 2}
    cuda = made_row(measured(1.0), provider="CUDAExecutionProvider")
    openvino = made_row(measured(5.0), provider="openvino-cpu", **steady)
    cold = made_row(measured(700.0), phase="cold", **steady)
    newest = (made_row(measured(9.0), **steady), openvino, cuda, made_row(estimated(), "device"), cold)
    location.reports.mkdir(exist_ok=True)
    for name, day, host, rows in (
        ("older", 24, HOST, (made_row(measured(20.0), **steady),)),
        ("other", 25, board, (made_row(measured(7.0), **steady), made_row(measured(6.0), batch=4, **steady))),
        ("host", 26, HOST, newest),
        (".host.json.x.tmp", 27, HOST, (made_row(measured(1.5), **steady),)),  # of a killed process
    ):
        report = made_report(*rows, host=host, created=f"2026-11-{day}T00:00:00+00:00")
        write_json(location.reports / f"{name}.json", report)
    (record,) = run_records([location])
    times = {name.split("1x128")[1]: value for name, value in record.items() if name.startswith("onnx-fp32_1x128")}
    assert times == {"_p50_ms": 9.0, "_openvino-cpu_p50_ms": 5.0, "_CUDAExecutionProvider_p50_ms": 1.0}
    assert sum(name.endswith("_p50_ms") for name in record) == len(times)
    assert record["measured_on"] == "Some CPU"
    assert record["reports_left_out"] == "other.json, of A small board with 2 cores (Linux)"
    assert "reports left out" in format_comparison([record], "plain")


class TestScoresOfRuns:
    @every_style
    def test_classifier(self, finished_run: Path, style: str) -> None:
        rows = run_records([locate(str(finished_run), finished_run.parent)]) * 2
        assert rows[0]["parameters"] == read_run(finished_run).parameters
        assert rows[0]["onnx-fp16_bytes"] < rows[0]["onnx-fp32_bytes"]
        assert format_comparison(rows, style).count("small") >= 2  # type: ignore[arg-type]
        json.dumps(rows)

    def test_language_model_beside_a_classifier(self, finished_language_run: Path, finished_run: Path) -> None:
        locations = [locate(str(run), run.parent) for run in (finished_run, finished_language_run)]
        classifier, language = run_records(locations)
        score = read_run(finished_language_run).test
        assert language["perplexity"] == score.perplexity
        assert language["perplexity_exit2"] == score.exits["2"].perplexity
        assert "perplexity_exit4" not in language and "caution" not in language and "accuracy" not in language
        assert "accuracy" in classifier and "perplexity" not in classifier
        assert format_comparison([classifier, language], "plain").count("–") > 4

    @every_style
    def test_leak_is_on_top(self, finished_language_run: Path, tmp_path: Path, style: str) -> None:
        leaking = copy_run(finished_language_run, tmp_path / "leaking", leaks=True)
        rows = run_records([locate(str(run), tmp_path) for run in (finished_language_run, leaking)])
        text = format_comparison(rows, style)  # type: ignore[arg-type]
        assert text.index("caution") < text.index("perplexity")
        assert LEAKS in text


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
