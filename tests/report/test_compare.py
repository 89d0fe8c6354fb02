"""Two reports side by side, and runs side by side."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.artifacts.report import Latency
from edgeformer.cli.app import app
from edgeformer.report.compare import compare_reports, format_comparison, format_pairs, report_of, run_records
from edgeformer.run import Location, locate, read_run
from tests.conftest import OLD_FORMAT
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
