"""Terminal, Markdown, CSV and badge of a report with estimates; the PNG; the comparison of two reports."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.report import Check, NotJudged, Report, Search, Verdict
from edgeformer.cli.app import app
from edgeformer.report.compare import compare_reports, format_pairs, report_of
from edgeformer.report.html_report import as_html
from edgeformer.report.panels import named_below
from edgeformer.report.pictures import draw_report
from edgeformer.report.report_files import as_csv, as_markdown, badge_svg
from edgeformer.report.report_tables import print_report, print_search
from edgeformer.report.words import badge_markdown, estimate_words, in_words, numbered, warning_words
from edgeformer.run import Location
from tests.report.made_reports import (
    LATENCY,
    SIZE,
    estimated,
    made_report,
    made_row,
    made_search,
    measured,
)


def printed(report: Report) -> str:
    console = Console(width=180, file=io.StringIO(), highlight=False)
    print_report(report, [Path("reports/rtx4050.svg")], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("made", [printed, as_markdown])
def test_text_marks_every_estimate_and_says_where_it_was_checked(made: object) -> None:
    assert callable(made)
    text = made(made_report())
    assert "≈ 1.00 ms (0.500 to 2.00)" in text
    assert "never checked on a GPU" in text
    assert "≈ 20.0 ms" not in text and "20.0 ms" in text
    assert "the model refused 8 × 999" in text
    assert "![edgeformer rtx4050: pass (estimated)](" in text


def test_a_report_without_estimates_says_nothing_about_them() -> None:
    report = made_report(made_row(measured()), verdict=Verdict(status="pass", checks=(SIZE,)))
    assert estimate_words(report) is None
    assert "≈" not in as_markdown(report) and "estimat" not in as_markdown(report)
    assert in_words(report) == "Every check is within budget."


def test_words_name_what_is_only_estimated() -> None:
    assert in_words(made_report()) == "Every check is within budget; latency only by estimate."
    over = LATENCY.model_copy(update={"status": "fail", "low": 6.0, "value": 8.0, "high": 10.0})
    failed = made_report(verdict=Verdict(status="fail", checks=(SIZE, over)))
    assert in_words(failed) == "Over budget: latency of onnx-fp32 (estimated)."
    between: Check = LATENCY.model_copy(update={"status": "unknown", "value": 4.0, "high": 9.0})
    unknown = in_words(made_report(verdict=Verdict(status="unknown", checks=(SIZE, between))))
    assert unknown == "size within budget; latency not known."


def test_csv_keeps_the_range_apart_from_what_was_measured() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(made_report()))))
    assert [row["status"] for row in rows] == ["measured", "unavailable", "estimated"]
    assert (rows[0]["low_ms"], rows[0]["high_ms"]) == ("", "")
    assert (float(rows[2]["low_ms"]), float(rows[2]["high_ms"])) == (0.5, 2.0)
    assert rows[2]["memory_status"] == "estimated"


def test_markdown_cells_cannot_break_the_table() -> None:
    text = as_markdown(made_report(made_row(measured(), artifact="a|b\nc")))
    assert "a\\|b c" in text


def test_markdown_of_a_search_has_its_pick_in_bold() -> None:
    text = as_markdown(made_report(search=made_search()))
    assert "the only one that fits" in text and "**onnx-fp32**" in text and "| onnx-fp32-big" in text


@pytest.mark.parametrize(("status", "colour"), [("pass", "#2e7d46"), ("fail", "#b3372f"), ("unknown", "#69707a")])
def test_badge_shows_the_verdict_in_its_colour(status: str, colour: str) -> None:
    report = made_report(made_row(measured()), device="a<b", verdict={"status": status, "checks": (SIZE,)})
    root = ElementTree.fromstring(badge_svg(report))
    texts = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert texts == ["edgeformer", f"a<b: {status}"]
    assert colour in badge_svg(report)
    assert badge_markdown(report, "reports/x.svg") == f"![edgeformer a&lt;b: {status}](reports/x.svg)"


PARTIAL = Verdict(
    status="pass",
    checks=(SIZE, SIZE.model_copy(update={"name": "memory"})),
    judged=("size", "memory"),
    not_judged=(NotJudged(name="latency", reason="the profile rtx4050 sets no limit"),),
)


@pytest.mark.parametrize("made", [printed, as_markdown, as_html])
def test_a_partial_pass_says_so_in_every_document(made: object) -> None:
    assert callable(made)
    text = made(made_report(made_row(measured()), verdict=PARTIAL))
    assert "pass (size and memory only)" in text and "Every check" not in text
    said = "Within the limits for size and memory; latency was not judged: the profile rtx4050 sets no limit."
    assert said in " ".join(text.split())


def test_a_partial_pass_has_no_green_badge() -> None:
    report = made_report(made_row(measured()), verdict=PARTIAL)
    assert "rtx4050: pass (size and memory only)" in badge_svg(report)
    assert "#2e7d46" not in badge_svg(report) and "#8a6a12" in badge_svg(report)
    assert '<span class="mark big partial">' in as_html(report)


def test_a_failure_and_an_open_check_name_what_has_no_limit_too() -> None:
    why = PARTIAL.not_judged
    over = SIZE.model_copy(update={"status": "fail"})
    failed = made_report(verdict=Verdict(status="fail", checks=(over,), judged=("size",), not_judged=why))
    assert in_words(failed) == (
        "Over budget: size of onnx-fp32; latency was not judged: the profile rtx4050 sets no limit."
    )
    assert badge_svg(failed).count("rtx4050: fail<") == 2 and "#b3372f" in badge_svg(failed)
    nothing = made_report(verdict=Verdict(status="unknown", not_judged=why))
    assert in_words(nothing) == "Nothing was checked; latency was not judged: the profile rtx4050 sets no limit."


def undecided_search() -> Search:
    """The bound lies inside the interval of the pick's score."""
    search = made_search()
    interval = {"score": 0.9313, "score_rows": 422, "score_low": 0.9028, "score_high": 0.9535, "bound_inside": True}
    pick = search.candidates[0].model_copy(update=interval)
    return search.model_copy(update={"candidates": (pick, *search.candidates[1:]), "bound": 0.93})


def searched(report: Report) -> str:
    assert report.search is not None
    console = Console(width=200, file=io.StringIO(), highlight=False)
    print_search(report.search, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("made", [searched, as_markdown, as_html])
def test_a_score_has_its_interval_in_every_document(made: object) -> None:
    assert callable(made)
    text = made(made_report(search=undecided_search()))
    assert "0.9313 (0.9028 to 0.9535)" in text and "accuracy (95 % interval)" in text
    assert "0.9200 (" not in text, "of a score without an interval there is none"


def test_the_headline_says_that_the_rows_do_not_decide_the_bound() -> None:
    said = "The search picks onnx-fp32; 422 rows do not decide whether its accuracy is at least 0.93. "
    assert in_words(made_report(search=undecided_search())).startswith(said)


def test_a_noisy_row_is_counted_once_and_an_estimate_is_not_noisy() -> None:
    warned = measured(stable=False, warnings=("the calls vary by 9.0%", "drifted: 1 to 2 ms"))
    wider = estimated().model_copy(update={"warnings": ("the range is wider: never checked are estimates of Conv",)})
    rows = [made_row(warned, batch=batch) for batch in (1, 8, 16)] + [made_row(measured(), batch=32)]
    rows += [made_row(measured(n=1, warnings=("2 nodes run on the CPU",)), phase="cold")]
    rows += [made_row(wider, "device", batch=batch) for batch in (1, 8, 16, 32)]
    lines = list(warning_words(made_report(*rows), written=True))
    assert lines == [
        "3 of 4 rows are noisy, 3 not stable: the calls vary (3 rows); drifted (3 rows); row by row in the report",
        "4 of 4 estimated rows are less certain: the range is wider (4 rows); row by row in the report",
    ]
    few = list(warning_words(made_report(*rows[:2], rows[5]), written=True))
    assert len(few) == 3 and few[2].startswith("estimate of onnx-fp32 1 × 128: the range is wider")


def test_png_of_measurements_estimates_and_a_search(tmp_path: Path) -> None:
    path = draw_report(made_report(search=made_search()), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_search_of_many_numbers_its_bubbles_as_the_table_does() -> None:
    one = made_search().candidates[0]
    many = tuple(
        one.model_copy(update={"artifact": f"a{i}", "latency_ms": 9.0 - i, "on_front": i == 5, "feasible": i != 6})
        for i in range(7)
    )
    search = made_search().model_copy(update={"candidates": many, "pick": 5})
    assert [(number, c.artifact) for number, _, c in numbered(search)][:2] == [(1, "a5"), (2, "a4")]
    assert numbered(search)[-1][2].artifact == "a6"
    assert named_below(made_report(search=search)) == ["1  a5 ≈ ← pick"]
    few = made_search().model_copy(update={"candidates": many[:2], "pick": None})
    assert named_below(made_report(search=few)) == []  # their names stand beside them


def marks(first: Report, second: Report) -> list[str]:
    return [row["mark"] for row in compare_reports(first, second)["rows"]]


@pytest.mark.parametrize(
    ("a", "b", "mark"),
    [
        (measured(20.0), measured(21.9), "within the noise"),
        (measured(20.0), measured(22.1), "slower"),
        (measured(22.1), measured(20.0), "faster"),
        (measured(20.0), measured(30.0, stable=False), "not stable"),
        # 1.96 · √(π/2) · √(2 · 1² / 50) = 0.49: such spread needs more calls before 1.4 says anything.
        (measured(20.0, cv=1.0, n=50), measured(28.0, cv=1.0, n=50), "within the noise"),
        (measured(20.0, cv=1.0, n=5000), measured(28.0, cv=1.0, n=5000), "slower"),
        (estimated(1.0, 2.0), estimated(1.9, 3.0), "within the estimates' ranges"),
        (estimated(1.0, 2.0), estimated(2.1, 3.0), "estimated slower"),
        (measured(1.0), estimated(2.1, 3.0), "an estimate beside a measurement"),
    ],
)
def test_mark_of_a_difference(a: object, b: object, mark: str) -> None:
    first, second = (made_report(made_row(latency)) for latency in (a, b))  # type: ignore[arg-type]
    assert marks(first, second) == [mark]


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0, 0.5), st.integers(2, 5000))
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_reports_does_not_matter(x: float, y: float, cv: float, n: int) -> None:
    a, b = made_report(made_row(measured(x, cv=cv, n=n))), made_report(made_row(measured(y, n=n)))
    turned = {"faster": "slower", "slower": "faster"}
    forth, back = compare_reports(a, b)["rows"][0], compare_reports(b, a)["rows"][0]
    assert back["mark"] == turned.get(forth["mark"], forth["mark"])
    assert back["ratio"] == pytest.approx(1 / forth["ratio"])


def test_rows_are_matched_by_shape_and_one_sided_ones_kept() -> None:
    first = made_report(made_row(measured(20.0)), made_row(measured(90.0), batch=8))
    second = made_report(made_row(measured(10.0), batch=8), made_row(measured(20.0), seq=64))
    rows = compare_reports(first, second)["rows"]
    assert [(r["batch"], r["seq"], r["mark"]) for r in rows] == [
        (1, 128, "only in one report"), (8, 128, "faster"), (1, 64, "only in one report"),
    ]  # fmt: skip
    assert rows[1]["ratio"] == pytest.approx(1 / 9)


def test_a_sweep_is_matched_by_threads_too() -> None:
    first = made_report(made_row(measured(40.0), threads=1), made_row(measured(20.0), threads=2))
    second = made_report(made_row(measured(20.0), threads=2), made_row(measured(40.0), threads=1))
    rows = compare_reports(first, second)["rows"]
    assert [(row["threads"], row["ratio"]) for row in rows] == [(1, 1.0), (2, 1.0)]


def test_different_machines_are_pointed_out() -> None:
    other = made_report(host={"cpu": "Another CPU", "threads": 4, "versions": {"onnxruntime": "1.20"}})
    notes = " ".join(compare_reports(made_report(), other)["notes"])
    assert "different machines: Some CPU and Another CPU" in notes
    assert "different threads: 2 and 4" in notes and "1.31 and 1.20" in notes
    assert compare_reports(made_report(), made_report())["notes"] == []


def test_one_machine_that_is_one_of_the_devices_is_not_called_two() -> None:
    here = made_report(device="host", device_title="This computer", on_target=True)
    assert compare_reports(here, made_report())["notes"] == ["judged for different devices: host and rtx4050"]


def test_formats_of_a_comparison() -> None:
    compared = compare_reports(made_report(), made_report(made_row(measured(40.0))))
    json.dumps(compared)
    for style in ("plain", "markdown"):
        text = format_pairs(compared, style)  # type: ignore[arg-type]
        assert "2.00" in text and "slower" in text and "only in one report" in text
    rows = list(csv.DictReader(io.StringIO(format_pairs(compared, "csv"))))
    assert float(rows[0]["ratio"]) == 2.0 and rows[0]["a_status"] == "measured"


def test_a_run_without_a_report_is_told_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="edgeformer profile mine --device t4"):
        report_of(Location(tmp_path / "mine", None), "t4")


def test_compare_command_takes_two_report_files_or_says_what_is_wrong(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write_json(files[0], made_report(made_row(measured(20.0))))
    write_json(files[1], made_report(made_row(measured(10.0))))
    runner, names = CliRunner(), [str(file) for file in files]
    found = runner.invoke(app, ["compare", *names, "--json"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["rows"][0] | {"ratio": 0.5, "mark": "faster"} == json.loads(found.stdout)["rows"][0]
    for arguments, message in (
        ([names[0]], "two at a time, not 1"),
        ([names[0], "a-run"], "the other argument is not"),
        ([*names, "--device", "t4"], "leave it out"),
        ([names[0], str(tmp_path / "gone.json")], "cannot be read"),
    ):
        error = runner.invoke(app, ["compare", *arguments]).exception
        assert isinstance(error, EdgeformerError) and error.exit_code == 2
        assert message in str(error)
