"""Terminal, Markdown, CSV, badge and files of a report; its sentences, its notes and its published rows."""

import ast
import csv
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Any
from xml.etree import ElementTree

import pytest

import edgeformer
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.report import Candidate, Choice, NotJudged, Report, Verdict
from edgeformer.bundle import Bundle
from edgeformer.report.context import ReportContext, measurement_columns
from edgeformer.report.documents import badge_svg, write_report
from edgeformer.report.publish import COLUMNS, append_published
from edgeformer.report.sentences import NOTES, badge_markdown, estimate_note, verdict_sentence
from edgeformer.run import Location
from tests.conftest import GOLDEN
from tests.report import made_reports
from tests.report.made_reports import SIZE, estimated, made_report, made_row, markdown_of, measured, terminal_of

OPEN_LATENCY = made_reports.LATENCY.model_copy(
    update={"status": "unknown", "value": None, "basis": None, "reason": "absent"}
)
NOT_JUDGED = NotJudged(name="latency", reason="the profile rtx4050 sets no limit")
BOTH = (SIZE, SIZE.model_copy(update={"name": "memory"}))
PARTIAL = Verdict(status="pass", checks=BOTH, judged=("size", "memory"), not_judged=(NOT_JUDGED,))
Renderer = Callable[[Report], str]
every_document = pytest.mark.parametrize("render", [terminal_of, markdown_of, made_reports.html_of])


class TestVerdict:
    def test_sentence_of_each_outcome(self) -> None:
        def sentence(*checks: Any, status: str = "unknown", **changes: Any) -> str:
            return verdict_sentence(made_report(verdict=Verdict(status=status, checks=checks), **changes))

        assert sentence(SIZE, made_reports.LATENCY, status="pass") == "Within budget: size, latency (estimated)."
        assert sentence(SIZE, status="pass") == "Within budget: size."
        assert sentence(SIZE, OPEN_LATENCY) == "Unknown: latency; within budget: size."
        too_large = SIZE.model_copy(update={"status": "fail"})
        failed = sentence(too_large, OPEN_LATENCY, status="fail")
        assert failed == "Over budget: size of onnx-fp32; unknown: latency."
        too_slow = made_reports.LATENCY.model_copy(update={"status": "fail", "low": 6.0, "value": 8.0, "high": 10.0})
        failed = sentence(SIZE, too_slow, status="fail")
        assert failed == "Over budget: latency of onnx-fp32 (estimated); within budget: size."
        reason, not_judged = "latency was not judged: the profile rtx4050 sets no limit.", PARTIAL.not_judged
        partial = Verdict(status="fail", checks=(too_large,), judged=("size",), not_judged=not_judged)
        assert verdict_sentence(made_report(verdict=partial)) == f"Over budget: size of onnx-fp32; {reason}"
        unchecked = Verdict(status="unknown", not_judged=not_judged)
        assert verdict_sentence(made_report(verdict=unchecked)) == f"No limit was checked; {reason}"

    @every_document
    def test_partial_pass_in_every_document(self, render: Renderer) -> None:
        text = render(made_report(made_row(measured()), verdict=PARTIAL))
        assert "pass (size and memory only)" in text
        sentence = "Within budget: size, memory; latency was not judged: the profile rtx4050 sets no limit."
        assert sentence in " ".join(text.split())

    @pytest.mark.parametrize(
        ("verdict", "text", "colour"),
        [
            (Verdict(status="pass", checks=(SIZE,)), "pass", "#2e7d46"),
            (Verdict(status="fail", checks=(SIZE,)), "fail", "#b3372f"),
            (Verdict(status="unknown", checks=(SIZE,)), "unknown", "#69707a"),
            (PARTIAL, "pass (size and memory only)", "#8a6a12"),
        ],
    )
    def test_badge_shows_the_verdict_in_its_colour(self, verdict: Verdict, text: str, colour: str) -> None:
        report = made_report(made_row(measured()), device="a<b", verdict=verdict)
        badge = badge_svg(ReportContext(report))
        texts = [element.text for element in ElementTree.fromstring(badge).iter() if element.tag.endswith("}text")]
        assert texts == ["edgeformer", f"a<b: {text}"] and colour in badge
        assert badge_markdown(report, "reports/x.svg") == f"![edgeformer a&lt;b: {text}](reports/x.svg)"


class TestEstimates:
    @pytest.mark.parametrize("render", [lambda r: terminal_of(r, files=[Path("rtx4050.svg")]), markdown_of])
    def test_text_marks_every_estimate_and_its_evidence(self, render: Renderer) -> None:
        text = render(made_report())
        assert "≈ 1.00 ms (0.500 to 2.00)" in text
        assert "never checked on a GPU" in text
        assert "≈ 20.0 ms" not in text and "20.0 ms" in text
        assert "the model refused 8 × 999" in text
        assert "![edgeformer rtx4050: pass (estimated)](" in text

    def test_csv_separates_ranges_from_measurements(self) -> None:
        report = made_report()
        rows = list(csv.DictReader(io.StringIO(ReportContext(report).columns("csv").csv(report.rows))))
        assert [row["status"] for row in rows] == ["measured", "unavailable", "estimated"]
        assert [row["where"] for row in rows] == ["host", "host", "device"]
        assert (rows[0]["p50_ms"], rows[0]["low_ms"], rows[0]["high_ms"]) == ("20.0", "", "")
        assert (rows[1]["p50_ms"], rows[1]["reason"]) == ("", "the model refused 8 × 999")
        assert (float(rows[2]["low_ms"]), float(rows[2]["high_ms"])) == (0.5, 2.0)
        assert rows[2]["memory_status"] == "estimated"


def test_markdown_has_the_verdict_first_and_marks_synthetic_data() -> None:
    verdict = Verdict(status="unknown", checks=(SIZE, OPEN_LATENCY))
    text = markdown_of(made_report(synthetic=True, verdict=verdict))
    assert text.index("**Verdict: unknown.**") < text.index("## Budget") < text.index("## Measurements")
    assert "**SYNTHETIC data.**" in text and "unavailable" in text and "20.0 ms" in text
    assert "a\\|b c" in markdown_of(made_report(made_row(measured(), artifact="a|b\nc")))
    measurement = made_report(made_row(measured()), verdict=Verdict(status="pass", checks=(SIZE,)))
    text = markdown_of(measurement)
    assert estimate_note(measurement) is None and "≈" not in text and "estimat" not in text


class TestTerminal:
    def test_eleven_artifacts_fit_80_columns(self) -> None:
        text = terminal_of(made_reports.crowded_report(), 80)
        tables = [line for line in text.splitlines() if not line.startswith("note")]
        for name in made_reports.ARTIFACT_NAMES:
            assert sum(line.startswith(f" {name} ") for line in tables) == 2, "measured and estimated, in a line each"
        assert "≈ 10.5 to 98.5 ms" in text, "the range is judged and stays"
        assert "per second" in terminal_of(made_reports.crowded_report(), 180) and "per second" not in text
        assert text.count("threads") == 1, "thread counts of host and device are no comparison of thread counts"

    def test_warnings_of_measurements_and_estimates_are_separate(self) -> None:
        warned = measured(stable=False, warnings=("the calls vary by 9.0%", "drifted: 1 to 2 ms"))
        wider = estimated().model_copy(update={"warnings": ("the range is wider: Conv was never checked",)})
        rows = [made_row(warned, batch=batch) for batch in (1, 8, 16)] + [made_row(measured(), batch=32)]
        rows += [made_row(measured(n=1, warnings=("2 nodes run on the CPU",)), phase="cold")]
        rows += [made_row(wider, "device", batch=batch) for batch in (1, 8, 16, 32)]
        assert ReportContext(made_report(*rows)).terminal_notes(has_files=True) == [
            "3 of 4 rows have a warning, 3 are unstable, e.g. the calls vary by 9.0%; all warnings are in the report",
            "4 of 4 estimates have a warning, e.g. the range is wider: Conv was never checked; "
            "all warnings are in the report",
        ]
        minimum = ReportContext(made_report(*rows[:2], rows[5])).terminal_notes(has_files=True)
        assert len(minimum) == 3 and minimum[2].startswith("estimate of onnx-fp32 1 × 128: the range is wider")

    def test_every_runtime_has_its_own_first_call(self) -> None:
        providers = ("CPUExecutionProvider", "openvino-cpu")
        cold = zip(providers, (30.0, 900.0), strict=True)
        rows = [made_row(measured(p50), phase="cold", provider=name, threads=2) for name, p50 in cold]
        rows += [made_row(measured(5.0), provider=provider, threads=2) for provider in providers]
        report = made_report(*rows)
        table = measurement_columns(report).pick("provider", "phase", "first_call").csv(report.rows)
        first_calls = [line.split(",")[2] for line in table.split()[1:]]
        assert first_calls == ["", "", "30.0", "900.0"]


def candidate(name: str, **changes: Any) -> Candidate:
    facts: dict[str, Any] = {
        "artifact": name, "precision": "fp32", "exit": None, "trimmed": False, "provider": "CPUExecutionProvider",
        "threads": 2, "score": 0.9123, "latency_ms": 4.0, "latency_status": "measured", "size_bytes": 2**20,
        "memory_bytes": 2**21, "feasible": True, "on_front": False,
    }  # fmt: skip
    return Candidate(**{**facts, **changes})


class TestSearch:
    def test_estimates_are_marked_and_reasons_are_no_markup(self) -> None:
        candidates = (
            candidate("guess", latency_status="estimated", low_ms=1.0, high_ms=9.0, latency_ms=3.0, threads=None),
            candidate("timed"),
            candidate("doubtful", unknown=("memory",)),
            candidate("crashed", feasible=False, reason="no time: [red]boom[/]", latency_ms=None, score=None),
        )
        search = Choice(
            candidates=candidates, metric="accuracy", bound=0.9, minimize="latency", pick=None, reason="why",
            basis="host", not_in_bundle=("FP16 graphs: edgeformer export tiny --fp16",),
        )  # fmt: skip
        text = terminal_of(made_report(made_row(measured()), search=search)).partition("Choice: ")[2]
        lines = {c.artifact: next(line for line in text.splitlines() if f" {c.artifact} " in line) for c in candidates}
        assert "≈ 1.00 to 9.00 ms" in lines["guess"] and "3.00" not in lines["guess"] and "≈ 2.0 MiB" in lines["guess"]
        assert "≈" not in lines["timed"] and "unknown: memory" in lines["doubtful"]
        assert "[red]boom[/]" in lines["crashed"] and text.index("doubtful") < text.index("crashed")
        assert "accuracy ≥ 0.9" in text and "THIS HOST" in text and "no pick why" in text
        assert "not in the bundle FP16 graphs: edgeformer export tiny --fp16" in text

    @every_document
    def test_score_has_its_interval_in_every_document(self, render: Renderer) -> None:
        search = made_reports.made_search()
        interval = {"score": 0.9313, "score_rows": 422, "score_low": 0.9028, "score_high": 0.9535, "bound_inside": True}
        pick = search.candidates[0].model_copy(update=interval)
        undecided = search.model_copy(update={"candidates": (pick, *search.candidates[1:]), "bound": 0.93})
        report = made_report(search=undecided)
        text = render(report)
        assert "0.9313 (0.9028 to 0.9535)" in text and "accuracy (95% interval)" in text
        assert "0.9200 (" not in text, "a score without an interval has none"
        sentence = "The search picks onnx-fp32, but 422 rows are too few to decide whether its accuracy is at least "
        assert verdict_sentence(report).startswith(f"{sentence}0.93. ")


def test_files_are_written_and_leftovers_of_killed_processes_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeformer.report.canvas.can_draw", lambda: False)  # drawing takes seconds
    folder, leftover = tmp_path / "reports", ".rtx4050.json.abc.tmp.json"
    kept = {".rtx4050.json.xyz.tmp.json", ".host.json.abc.tmp.json", "rtx4050.tmp.json"}
    folder.mkdir()
    for name in (leftover, *kept):
        age_s = 3500 if "xyz" in name else 3700  # the younger one may be of a running process
        (folder / name).write_text("{", encoding="utf-8")
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    report = made_report()
    paths = write_report(report, Location(run=tmp_path, bundle=None))
    assert [path.name for path in paths] == [f"rtx4050.{kind}" for kind in ("json", "md", "csv", "html", "svg")]
    assert Report.model_validate_json(paths[0].read_bytes(), strict=False) == report
    assert {path.name for path in folder.iterdir()} == kept | {path.name for path in paths}


def test_every_note_has_a_template_with_its_facts() -> None:
    used: set[str] = set()
    for path in Path(edgeformer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "note" or not node.args:
                continue
            parts = [node.args[0]]
            if isinstance(parts[0], ast.IfExp):
                parts = [parts[0].body, parts[0].orelse]
            for part in parts:
                if not isinstance(part, ast.Constant) or part.value not in NOTES:
                    continue
                used.add(part.value)
                needed = {name for _, name, _, _ in Formatter().parse(NOTES[part.value]) if name}
                assert needed <= {keyword.arg for keyword in node.keywords}, (path, node.lineno)
    computed = {"no budget", "memory budget"}  # request.py names these by a variable, verdict.py the next
    computed |= {"no rows", "no limit", "no limit of the profile"}
    assert used | computed == NOTES.keys()


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
