"""What came from data is seen, never obeyed: by terminals, browsers, Markdown and spreadsheets."""

import csv
import io
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeformer.artifacts.units import csv_cell, markdown, markdown_line, visible
from edgeformer.report.columns import Column, TableColumns
from edgeformer.report.context import ReportContext
from edgeformer.report.documents import as_html, as_markdown, badge_svg
from tests.cli.run_cli import edgeformer
from tests.conftest import OLD_FORMAT
from tests.report.made_reports import made_report
from tests.report.test_html import LOADS, Page

ESC, BIDI = "\x1b[2J\x1b]0;owned\x07", "\u202egpj.exe\u2066"
TAGS = "<script>alert(1)</script>\"'><img src=x onerror=y> $\\frac{1} & -->"
HOSTILE = f"=cmd|' /C calc'!A0 {TAGS} | `x` **b** [l](http://e) {ESC}{BIDI}\x9b31m\x00"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    assert not CONTROL.search(visible(text))
    assert visible(visible(text)) == visible(text)
    assert "\n" not in markdown(text) and not re.search(r"(?<!\\)(\\\\)*\|", markdown(text))
    assert "<" not in markdown(text)


@pytest.mark.parametrize(
    ("text", "is_formula"),
    [("-3.5", False), ("-1e-3", False), ("plain", False), ("3 - 2", False), ("=1+1", True), ("+1+cmd|x", True),
     ("-2+3", True), ("@SUM(A1)", True), ("\t=1", True), ("\r=1", True), ("  =1", True), ("＝1", True)],
)  # fmt: skip
def test_formulas_in_csv_are_quoted(text: str, is_formula: bool) -> None:
    assert str(csv_cell(text)).startswith("'") is is_formula and (is_formula or csv_cell(text) == text)
    assert [csv_cell(value) for value in (-3, -1.5, None, True)] == [-3, -1.5, None, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model_fp16.onnx", "model_fp16.onnx"), ("_x_", "\\_x\\_"), ("a|b`c`", "a\\|b\\`c\\`"),
        ("<img src=x>", "&lt;img src=x&gt;"), ("https://evil.example", "https\\://evil.example"),
        ("two\nlines", "two lines"), ("1.23 ms", "1.23 ms"),
    ],
)  # fmt: skip
def test_markdown(text: str, expected: str) -> None:
    assert markdown(text) == expected
    lines = {"# x": "\\# x", "- x": "\\- x", "1. x": "\\1. x", "+ x": "\\+ x", "x # y": "x # y"}
    assert [*map(markdown_line, lines)] == [*lines.values()]


def test_a_hostile_report_in_every_format() -> None:
    """Everything in it that came from elsewhere is hostile."""
    report = made_report()
    artifact = {"artifact": HOSTILE, "precision": HOSTILE}
    rows = tuple(row.model_copy(update=artifact) for row in report.rows)
    checks = tuple(check.model_copy(update={"artifact": HOSTILE, "reason": HOSTILE}) for check in report.verdict.checks)
    verdict, host = report.verdict.model_copy(update={"checks": checks}), {**report.host, "cpu": HOSTILE}
    changes = {"run": HOSTILE, "device": HOSTILE, "device_title": HOSTILE, "notes": (HOSTILE, "# heading")}
    context = ReportContext(report.model_copy(update={**changes, "rows": rows, "verdict": verdict, "host": host}))
    text, page, svg = as_markdown(context), as_html(context), badge_svg(context)
    table = context.columns("csv").csv(context.report.rows)
    assert not any(CONTROL.search(document) for document in (text, page, svg, table))
    assert "<script" not in text and "\n# heading" not in text and "- # heading" not in text
    assert "[l](http" not in text and re.search(r"(?<!\\)`x", text) is None
    parsed = Page(page)
    assert not LOADS.intersection(parsed.tags) and TAGS in "".join(parsed.text)
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(svg).iter()}
    assert tags <= {"svg", "title", "clipPath", "rect", "g", "text"}
    lines = list(csv.DictReader(io.StringIO(table)))
    assert all(line["artifact"].startswith("'=cmd") for line in lines)
    assert any(re.fullmatch(r"[0-9.]+", line["p50_ms"]) for line in lines)
    numbers = TableColumns(Column("x", lambda row: row)).csv([-3.5, "-3.5", "-x"])
    assert numbers.splitlines()[1:] == ["-3.5", "-3.5", "'-x"]


def test_terminal_of_real_commands(tmp_path: Path) -> None:
    """A bundle whose labels, and a text whose characters, are a terminal's commands."""
    folder = tmp_path / "bundle"
    shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", folder)
    manifest = folder / "bundle.json"
    text = manifest.read_text(encoding="utf-8").replace('"positive"', '"\\u001b[2Jpos\\u202e"')
    manifest.write_text(text.replace('"negative"', '"[red]neg\\u001b]0;owned\\u0007"'), encoding="utf-8")
    predicted = edgeformer("predict", str(folder), f"a {ESC} text {BIDI}", cwd=tmp_path)
    assert predicted.code == 0, predicted
    assert not CONTROL.search(predicted.out) and "\ufffd[2J" in predicted.out
    as_json = edgeformer("predict", str(folder), f"a {ESC} text", "--json", cwd=tmp_path)
    assert "\\u001b[2J" in as_json.out and "\ufffd" not in as_json.out
    (tmp_path / "data.tsv").write_text(f"label\ttext\n{ESC}\tx\n", encoding="utf-8")
    refused = edgeformer("evaluate", str(folder), "--data", "data.tsv", cwd=tmp_path)
    assert refused.code == 2 and not CONTROL.search(refused.err) and "[red]neg" in refused.err
    table = edgeformer("compare", str(folder), str(folder), "--format", "markdown", cwd=tmp_path)
    assert table.code == 0 and not CONTROL.search(table.out)
