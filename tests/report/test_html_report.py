"""The HTML report: well formed, complete, self-contained, escaped; estimates look like estimates."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest

from edgeformer.artifacts.report import Report
from edgeformer.report.html_report import as_html
from edgeformer.report.words import estimate_words
from tests.report.made_reports import (
    CHECKED_ON_CPU,
    estimated,
    made_report,
    made_row,
    made_search,
    measured,
)

_VOID = {"meta", "br", "img", "hr", "input", "link"}
_LOADS = {"script", "iframe", "img", "link", "object", "embed", "audio", "video", "source", "image", "base", "form"}


class Page(HTMLParser):
    """What a page holds: tags in order, text, ids, references, rows of tables; and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.references += [v for k, v in found.items() if k in ("src", "href", "xlink:href", "srcset", "data")]
        assert not any(name.startswith("on") for name in found), f"a handler in <{tag}>"
        if tag == "tr":
            self.rows.append((found.get("class", ""), []))
        if tag in ("td", "th") and self.rows:
            self.rows[-1][1].append("")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open and self.rows and any(tag in self._open for tag in ("td", "th")):
            self.rows[-1][1][-1] += data.strip()


@pytest.fixture(scope="module")
def made() -> Report:
    return made_report(search=made_search())


@pytest.fixture(scope="module")
def text(made: Report) -> str:
    return as_html(made)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_loads_nothing(text: str, page: Page) -> None:
    assert text.lstrip().startswith("<!DOCTYPE html>")
    assert not _LOADS.intersection(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "default-src 'none'" in text, "a browser is told to load nothing, too"
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))


def test_ids_are_unique_and_every_reference_has_its_target(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)


def test_every_row_of_the_report_is_there_with_its_status(made: Report, page: Page) -> None:
    statuses = ("measured", "estimated", "unavailable")
    # The table of checks has rows of these kinds, too, but no column for the phase.
    rows = [cells for kind, cells in page.rows if kind in statuses and "steady" in cells]
    figures = [cells[2] for cells in rows]
    assert figures == ["20.0 ms", "unavailable", "≈ 1.00 ms (0.500 to 2.00)"] and len(made.rows) == 3


def test_unstable_stands_in_the_cell_of_its_figure() -> None:
    """A column of its own lay behind the scroll bar of a window of 1200 pixels."""
    shaky = made_row(measured(20.0, stable=False))
    cells = next(cells for _, cells in Page(as_html(made_report(shaky))).rows if "steady" in cells)
    assert cells[:3] == ["onnx-fp32", "1 × 128", "20.0 ms (unstable)"]
    search = made_search()
    first = search.candidates[0].model_copy(update={"latency_status": "measured", "stable": False})
    found = Page(as_html(made_report(search=search.model_copy(update={"candidates": (first, *search.candidates[1:])}))))
    assert any("1.00 ms (unstable)" in cells for _, cells in found.rows)


def test_why_a_candidate_is_not_feasible_stands_below_the_table(text: str) -> None:
    assert "<li>2 (onnx-fp32-big): size 200 MiB is above 100 MiB</li>" in text


def test_verdict_comes_first_and_gaps_have_reasons(page: Page) -> None:
    text = " ".join(page.text)
    places = [text.index(part) for part in ("pass (estimated)", "Budget", "Pictures", "Environment")]
    assert places == sorted(places)
    assert "the model refused 8 × 999" in text and "no energy counter" in text


def test_an_estimate_never_looks_like_a_measurement(page: Page) -> None:
    text = " ".join(page.text)
    assert "never checked on a GPU" in text and "does not apply: it is of a CPU" in text
    estimates = [cells for kind, cells in page.rows if "estimated" in kind.split()]
    assert estimates and all(any("≈" in cell for cell in cells) for cells in estimates)
    others = [cells for kind, cells in page.rows if "estimated" not in kind.split()]
    assert not any("≈" in cell for cells in others for cell in cells)


def test_error_of_the_same_kind_of_device_is_stated_without_the_caveat() -> None:
    own = CHECKED_ON_CPU.model_copy(update={"applies": True, "why_not": None})
    text = as_html(made_report(estimate_evidence=(own,), estimated_for="cpu"))
    assert "12 cases on Some CPU, 2026-11-21: median error of a time 15.0%, worst 41.0%" in text
    assert "never checked" not in text
    words = estimate_words(made_report(estimate_evidence=(), estimated_for="cpu", device_title="A board"))
    assert words == "estimated, not measured; never checked on A board"


def test_pictures_take_every_colour_from_the_style_sheet(text: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 6
    for svg in pictures:
        colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", svg))
        assert not colours, f"fixed colours would not change in the dark: {colours}"
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", text))
    for block in re.findall(r":root \{(.*?)\n\s*\}", text, flags=re.DOTALL):
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", block))


def test_hostile_names_stay_text() -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=y> $\\frac{1} & -->"
    rows = (made_row(measured(), artifact=evil), made_row(estimated(), "device", artifact=evil))
    page = Page(as_html(made_report(*rows, run=evil, device_title=evil, notes=(evil,), host={"cpu": evil}, sizes=())))
    assert not _LOADS.intersection(page.tags)
    assert evil in page.text


def test_without_matplotlib_the_page_says_so_and_holds_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = ("canvas", "panels", "trade_panels")
    for module in drawing:
        monkeypatch.delitem(sys.modules, f"edgeformer.report.{module}", raising=False)
        monkeypatch.delattr(sys.modules["edgeformer.report"], module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = as_html(made_report())
    assert "<svg" not in text
    assert text.count("matplotlib is not installed") == 5
    assert any("20.0 ms" in cells for _, cells in Page(text).rows)


@pytest.mark.parametrize("empty", ["profile", "rows", "checks"])
def test_what_is_missing_is_said(empty: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "profile": {"profile": {}},
        "rows": {"rows": (), "sizes": (), "verdict": {"status": "unknown", "checks": ()}},
        "checks": {"verdict": {"status": "unknown", "checks": ()}},
    }
    text = as_html(made_report(**changes[empty]))
    Page(text)
    expected = {
        "profile": "does not state its bandwidth",
        "rows": "no time was measured",
        "checks": "Nothing was checked",
    }
    assert expected[empty] in text


def test_a_sweep_over_threads_tells_its_rows_apart() -> None:
    rows = (made_row(measured(20.0), threads=1), made_row(measured(12.0), threads=2))
    cells = [cell for _, row in Page(as_html(made_report(*rows))).rows for cell in row]
    assert "1 × 128, 1 thread" in cells and "1 × 128, 2 threads" in cells


def test_a_size_that_nobody_split_is_not_shown_as_no_embeddings() -> None:
    unknown = {"artifact": "onnx-fp32", "embeddings": 0, "block": 0, "heads": 0, "other": 20 * 2**20}
    text = as_html(made_report(sizes=(unknown,)))
    assert 'id="parts"' not in text, "a table of zeros would say that there are no embeddings"
    assert "what the bytes of onnx-fp32 are for" in text
