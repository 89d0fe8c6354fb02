"""Pages of docs/ with figures are written from their templates and the committed JSON; no figure in them is typed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

import benchmarks.results_page.__main__ as results_page
from benchmarks.estimates import page
from benchmarks.estimates.record import enough, summary
from benchmarks.results_page.facts import facts
from benchmarks.results_page.studies import study_pages
from benchmarks.results_page.tables import TABLES
from edgeformer.estimate import estimate

TEMPLATES = [path.read_text(encoding="utf-8") for path in results_page.TEMPLATES]
PLACEHOLDER = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")


def test_the_pages_are_what_the_json_says() -> None:
    pages = results_page.pages()
    for name, text in pages.items():
        assert (results_page.FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run: make results"
    written = {path.relative_to(results_page.FOLDER).as_posix() for path in results_page.FOLDER.rglob("*.md")}
    assert written - pages.keys() == {"claims.md", "estimates.md", "fidelity.md", *results_page.CLOSED}
    long_tables = {"bundle-tables.md", "speed-targets.md"}  # the pages of their topics link them
    closed = {name: (results_page.FOLDER / name).read_text(encoding="utf-8") for name in results_page.CLOSED}
    for name, text in (pages | closed).items():
        if "/" not in name and name not in {results_page.INDEX, *long_tables}:
            entry = f"| [{results_page.title(text)}]({name}) | {results_page.headline(text)} |"
            assert entry in pages[results_page.INDEX] and "**" not in entry


def narrowest(cell: str) -> float:
    """Return the least width of a cell in px: its longest word, or the longest part of a path, and the padding."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    words = []
    for code, plain in re.findall(r"`([^`]+)`|([^`]+)", text):
        is_path = code.count("/") + code.count("::") > 1 and " " not in code  # docs/hooks.py lets paths break
        words += re.split(r"(?<=[/:])" if is_path else r"(?<=-)|\s+", code)
        words += re.split(r"(?<=[-–])|\s+|<wbr>", plain)
    return 23 + 6.6 * max(map(len, words))


def test_tables_fit_a_screen_of_1280_pixels() -> None:
    """The site's column is 930 px wide there; cells break at spaces, hyphens and the slashes of paths."""
    tables = 0
    for file in sorted(results_page.FOLDER.rglob("*.md")):
        for table in re.findall(r"(?:^\|.*\n)+", file.read_text(encoding="utf-8"), re.MULTILINE):
            lines = [line.strip().strip("|") for line in table.splitlines() if not re.fullmatch(r"[|:\- ]+", line)]
            rows = [[cell.strip() or "–" for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
            width = sum(max(map(narrowest, column)) for column in zip(*rows, strict=True))
            assert width < 930, f"{file.name}: {rows[0]} takes {width:.0f} px"
            tables += 1
    assert tables > 100


def test_every_table_and_figure_is_used() -> None:
    used = " ".join(placeholder for text in TEMPLATES for placeholder in PLACEHOLDER.findall(text))
    assert [name for name in TABLES if f"table.{name} " not in used] == []
    assert [name for name in facts() if f"{{{{ {name} }}}}" not in used] == []


STATED = (
    "on a part of WikiText-2", "WNUT 2017", "of small models (width 128)", "up to 512 tokens", "for an RTX 4050",
    "three shared layers of width 256", "six layers of width 384", "The 92M language model",
)  # fmt: skip
"""Text with a number that is no measurement: of a data set, a setting, a device or the size of a model."""
NAMES = re.compile(r"span F1|SmolLM2-135M|Q8_0|Q4_0|SST-2|FP32|FP16|F16|INT8|INT4|AVX2|float32|fp32|bf16")


def test_no_figure_in_a_sentence_is_typed() -> None:
    """Of all templates, without blocks, placeholders and inline code."""
    kept = " ".join(re.sub(r"```.*?```|\{%.*?%\}", "", text, flags=re.DOTALL) for text in TEMPLATES)
    kept = re.sub(r"`[^`]*`", "`", PLACEHOLDER.sub("", kept))
    text = " ".join(re.sub(r"\]\([^)]*\)", "]", kept).split())
    for existing in STATED:
        assert existing in text, f"docs/results/ does not say: {existing}"
        text = text.replace(existing, "")
    remaining = re.findall(r".{0,40}\d.{0,20}", NAMES.sub("", text))
    assert remaining == [], "figures without a JSON"


def test_what_the_template_names_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "facts", dict)
    with pytest.raises(UndefinedError, match="is undefined"):
        results_page.pages()


def committed(folder: Path, **changes: Any) -> Path:
    """A table of the study table6 with one row."""
    cell = {"mean": 0.91, "sd": None, "n": 1, "low": None, "high": None, "published": 0.9061}
    row = {"run": "baseline", "label": "Baseline", "at": "random-split", "origin": "here"}
    bubble = {"ms_per_sample": {**cell, "published": None}, "megabytes": {**cell, "published": None}}
    row |= {"cells": {"accuracy": cell, **bubble}, "leaks": True, "note": "one seed"}
    table = {"study": "table6", "title": "SST-2", "element": "Table 6", "protocol": "three\nepochs", "minutes": 80.0}
    path = folder / "table6.json"
    path.write_text(json.dumps({**table, "columns": ["accuracy"], "rows": [row], **changes}), encoding="utf-8")
    return path


def test_committed_studies_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    committed(tmp_path)
    pages = study_pages(tmp_path, tmp_path / "pictures")
    assert pages.keys() == {"pictures/table6.md"}
    page, _, protocol = pages["pictures/table6.md"].partition("\n\n## Protocol\n\n")
    displayed, _, columns = page.partition("\n\n## Columns\n\n")
    assert columns.startswith("- **accuracy**: share of right answers\n- **paper**")
    assert displayed.startswith("# SST-2\n\n") and "](table6/figure" in displayed
    assert "0.9100" in displayed and "0.9061" in displayed
    assert displayed.endswith("- Baseline (6 layers, 384), random-split: LEAKS FUTURE TOKENS – scores are void")
    assert protocol.startswith("Table 6. Three architectures, ") and "make study NAME=table6" in protocol


def test_pictures_are_drawn_again_only_where_they_show_something_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = tmp_path / "pictures"
    path = committed(tmp_path)
    start = study_pages(tmp_path, pictures)
    (picture,) = pictures.rglob("*.png")
    assert b"atplotlib" not in picture.read_bytes()
    picture.write_bytes(b"by another version of matplotlib")
    assert study_pages(tmp_path, pictures) == start and picture.read_bytes() == b"by another version of matplotlib"
    path.write_text(path.read_text(encoding="utf-8").replace("0.91,", "0.92,"), encoding="utf-8")
    study_pages(tmp_path, pictures)
    assert picture.read_bytes().startswith(b"\x89PNG")


ORIGIN = re.compile(r"^(Measured|Trained and measured|Counted) |^\d+ threads, 20\d\d-\d\d-\d\d", re.MULTILINE)
SUMMARIES = {"index.md", "claims.md", "fidelity.md", "speed.md", "speed-targets.md", "gpu.md"}
"""Pages without figures, or with figures whose origin is on another page."""


def test_pages_name_the_origin_of_their_figures_and_mark_superseded_ones() -> None:
    """The date, machine and code of the figures, and the changes that supersede them."""
    paths = results_page.FOLDER.rglob("*.md")
    pages = {path.relative_to(results_page.FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert {name for name, text in pages.items() if not ORIGIN.search(text)} == SUMMARIES
    assert len(pages) > 30
    assert "**Superseded** on 2026-11-24 by commit 00807e5" in pages["language-models.md"]
    for study in ("table6", "table9", "table10", "table11"):
        assert f"`python -m benchmarks.studies {study} --data DIR --fresh`" in pages[f"studies/{study}.md"], study


def test_page_and_shipped_record_are_what_the_json_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: make results"
    assert page.EXPLANATION.read_text(encoding="utf-8") == page.explanation(), "run: make results"
    assert estimate.shipped_record() == page.shipped_record(), "run: make results"
    record = estimate.shipped_record()
    assert f"{record.within_15_percent:.0%} of {record.cases} estimated times are within 15%" in page.page()
    assert f"median error is {record.median_error:.1%}" in page.page()
    assert f"cases within ±15%: {record.within_15_percent:.0%} of {record.cases} |" in page.explanation()


def row(model: str, log2: float, **changes: Any) -> dict[str, Any]:
    measured = {"small": 1.0, "middle": 2.0, "large": 8.0}[model]
    estimated = measured * 2**log2
    return {
        "model": model, "family": "f", "theirs": False, "artifact": "onnx-fp32", "precision": "fp32", "threads": 1,
        "phase": "steady", "batch": 1, "seq": 16, "measured_ms": measured, "process_ms": [measured, measured * 1.02],
        "estimated_ms": estimated, "low_ms": estimated / 1.2, "high_ms": estimated * 1.2, "log2": log2,
        "doubts": [], "reason": "calibrated",
        **changes,
    }  # fmt: skip


ROWS = [row("small", 0.05), row("middle", -0.1), row("large", 0.5, phase="decode")]


def test_errors_ranges_and_order_are_counted() -> None:
    figures = summary(ROWS)
    assert (figures["cases"], figures["models"]) == (3, 3)
    assert figures["within_15_percent"] == figures["ranges_held"] == pytest.approx(2 / 3)
    assert figures["median_error"] == pytest.approx(2**0.1 - 1) and figures["worst_error"] == pytest.approx(2**0.5 - 1)
    assert figures["widest"] == pytest.approx(1.44)
    assert figures["repeatability"] == pytest.approx(0.02)
    assert figures["wanted"] == {
        "within_15_percent": False, "median_error": False, "ranges_held": False, "widest": True, "tau": True
    }  # fmt: skip


def test_a_record_of_left_out_models_has_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = summary(ROWS)
    figures["enough"] = enough(ROWS, 0.0)
    figures["wanted"]["enough"] = all(figures["enough"].values())
    unestimated = {**ROWS[0], "model": "lost", "log2": None, "reason": "no estimate, because up to 80% of the time"}
    record: dict[str, Any] = {
        "format": "left-out-models", "measured": "2027-01-02T00", "host": {"cpu": "A 9", "cores": 2},
        "summary": figures, "families": {"encoders": figures}, "precisions": {"fp32": figures},
        "without_kind": summary(ROWS[:2]), "doubted": None, "cases": [*ROWS, unestimated],
        "missing": [{"model": "x", "artifact": "a", "threads": "1", "shape": "8×64", "why": "beyond the 60 s"}],
    }  # fmt: skip
    monkeypatch.setattr(page, "newest", lambda: (page.RESULTS / "here" / "2027-01-02-estimator.json", record))
    text, explanation = page.page(), page.explanation()
    assert text.count("| small ") == 2 and text.count("| large ") == 2 and "1×16 token" in text
    assert "| cases within ±15%: 67% of 3 | 80% | **missed** |" in explanation
    assert "| enough cases, idle machine: not 60 cases, 5 models" in explanation
    assert "without models of the same family" in explanation and "No case has unchecked operators" in explanation
    assert "beyond the 60 s" in text and "no estimate, because up to 80% of the time" in text, (
        "what was left out is listed"
    )
    assert "## Not checked" in explanation
    record["doubted"] = {**summary(ROWS), "cases": 44}
    assert "44 further cases have unchecked operators" in page.explanation()
    assert "they miss 3 of 5 targets" in page.explanation()
