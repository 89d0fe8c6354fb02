"""The HTML report: well formed, complete, self-contained, escaped; in a browser nothing is hidden by scroll bars."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import find, read_yaml
from edgeformer.artifacts.report import Latency, Memory, Report
from tests.report.made_reports import estimated, html_of, made_report, made_row, made_search, measured
from tests.web.browser import headless

_VOID = {"meta", "br", "img", "hr", "input", "link"}
LOADS = {"script", "iframe", "img", "link", "object", "embed", "audio", "video", "source", "image", "base", "form"}


class Page(HTMLParser):
    """Tags in order, text, ids, references and table rows of a page; checks that every tag is closed."""

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
        attributes = {name: value or "" for name, value in attrs}
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.references += [v for k, v in attributes.items() if k in ("src", "href", "xlink:href", "srcset", "data")]
        assert not any(name.startswith("on") for name in attributes), f"a handler in <{tag}>"
        if tag == "tr":
            self.rows.append((attributes.get("class", ""), []))
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
def text() -> str:
    return html_of(made_report(search=made_search()))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_page_loads_nothing(text: str, page: Page) -> None:
    assert text.lstrip().startswith("<!DOCTYPE html>")
    assert not LOADS.intersection(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "default-src 'none'" in text, "the browser loads nothing either"
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))
    assert len(page.ids) == len(set(page.ids)) and {reference[1:] for reference in page.references} <= set(page.ids)


def test_unstable_is_in_the_cell_of_its_figure() -> None:
    unstable = made_row(measured(20.0, stable=False))
    cells = next(cells for _, cells in Page(html_of(made_report(unstable))).rows if "steady" in cells)
    assert cells[:4] == ["onnx-fp32", "steady", "1 × 128", "20.0 ms (unstable)"]
    search = made_search()
    first = search.candidates[0].model_copy(update={"latency_status": "measured", "stable": False})
    unsure = search.model_copy(update={"candidates": (first, *search.candidates[1:])})
    searched = Page(html_of(made_report(search=unsure)))
    assert any("1.00 ms (unstable)" in cells for _, cells in searched.rows)


def test_verdict_comes_first_and_an_estimate_never_looks_like_a_measurement(page: Page) -> None:
    text = " ".join(page.text)
    places = [text.index(part) for part in ("pass (estimated)", "Budget", "Pictures", "Environment")]
    assert places == sorted(places)
    assert "the model refused 8 × 999" in text and "no energy counter" in text
    assert "never checked on a GPU" in text and "docs/explanation/estimating.md" in text
    estimates = [cells for kind, cells in page.rows if "estimated" in kind.split()]
    assert estimates and all(any("≈" in cell for cell in cells) for cells in estimates)
    rest = [cells for kind, cells in page.rows if "estimated" not in kind.split()]
    assert not any("≈" in cell for cells in rest for cell in cells)
    times = [cells[3] for _, cells in page.rows if "steady" in cells]
    assert times == ["20.0 ms", "unavailable", "≈ 1.00 ms (0.500 to 2.00)"]


def test_pictures_take_every_colour_from_the_style_sheet(text: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 5
    for svg in pictures:
        colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", svg))
        assert not colours, f"fixed colours would not change in the dark: {colours}"
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", text))
    for block in re.findall(r":root \{(.*?)\n\s*\}", text, flags=re.DOTALL):
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", block))


def test_without_matplotlib_the_page_has_tables_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("canvas", "charts"):
        monkeypatch.delitem(sys.modules, f"edgeformer.report.{module}", raising=False)
        monkeypatch.delattr(sys.modules["edgeformer.report"], module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = html_of(made_report())
    assert "<svg" not in text
    assert text.count("matplotlib is not installed") == 4
    assert any("20.0 ms" in cells for _, cells in Page(text).rows)


def test_page_says_what_is_missing() -> None:
    unchecked: dict[str, object] = {"status": "unknown", "checks": ()}
    unknown = {"artifact": "onnx-fp32", "embeddings": 0, "block": 0, "heads": 0, "other": 20 * 2**20}
    text = html_of(made_report(verdict=unchecked, sizes=(unknown,)))
    assert "No limit was checked" in text and "parts of the size of onnx-fp32" in text
    assert 'id="parts"' not in text, "a table of zeros would say that there are no embeddings"
    empty = html_of(made_report(verdict=unchecked, sizes=(), rows=()))
    Page(empty)
    assert "no time was measured" in empty


def test_a_chart_of_two_runtimes_names_them_and_says_how_many_rows_it_shows() -> None:
    few = "205 calls: p99 needs 662", "283 calls: p99 needs 662"
    rows = [made_row(measured(20.0, reason=few[number % 2]), artifact=f"onnx-{number}") for number in range(15)]
    text = html_of(made_report(*rows, *(row.model_copy(update={"provider": "openvino-cpu"}) for row in rows)))
    assert "1 × 128  OpenVINO</text>" in text and "1 × 128  ONNX Runtime</text>" in text
    assert "24 of 30 rows" in text
    assert text.count("too few calls: p99 needs 662") == 1, "rows of equal needs share a line"


def test_facts_of_the_profile_have_units() -> None:
    text = html_of(made_report(profile=read_yaml(find("profiles", "rtx4050")).content))
    for fact in ("4 µs", "35 to 115 W", "1.605 to 2.37 GHz; 2.055 GHz for the peaks"):
        assert f"<td>{fact}</td>" in text


def wide_report() -> Report:
    """Figures in every column, long artifact names, two runtimes."""
    rows = []
    for artifact in ("onnx-fp32", "onnx-int8-trimmed", "onnx-fp16-exit3"):
        for provider in ("CPUExecutionProvider", "openvino-cpu"):
            common = {"artifact": artifact, "precision": "fp32", "provider": provider, "throughput_per_s": 12345.0}
            rows += [
                made_row(Latency(status="measured", p50=30.1, mean=30.1, n=1), phase="cold", **common),
                made_row(measured(20.0, p99=50.0, n=1662, cv=0.251), **common),
                made_row(measured(320.0, stable=False, n=1662, cv=0.251), batch=16, **common),
            ]
    refused = Latency(status="unavailable", reason="the model refused 8 × 999")
    rows.append(made_row(refused, batch=8, memory_bytes=Memory(status="unavailable", reason="it never ran")))
    rows.append(made_row(estimated(), "device", provider="CUDAExecutionProvider"))
    interval = {"score": 0.9313, "score_rows": 422, "score_low": 0.9028, "score_high": 0.9535, "stable": False}
    timed = {"latency_status": "measured", "threads": 2, **interval}
    search = made_search()
    first, second = (candidate.model_copy(update=timed) for candidate in search.candidates)
    second = second.model_copy(update={"artifact": "onnx-int8-trimmed", "provider": "openvino-cpu"})
    return made_report(*rows, search=search.model_copy(update={"candidates": (first, second)}))


@pytest.mark.slow
def test_no_table_scrolls_at_1200_pixels_and_the_status_is_visible_at_400(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html_of(wide_report()), encoding="utf-8")
    scrolling = "[...document.querySelectorAll('.scroll')].filter(table => table.scrollWidth > table.clientWidth)"
    cells = "[...document.querySelectorAll('#measurements ~ .dense td')]"
    cells += ".filter(cell => /unst|unav/.test(cell.innerText))"
    with headless() as browser:
        tab = browser.new_tab()
        for width in (1200, 400):
            tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            tab.open(page.as_uri())
            assert tab.run("innerWidth") == width
            assert tab.run("document.documentElement.scrollWidth") <= width, "tables scroll, the page does not"
            if width == 1200:
                assert tab.run(f"{scrolling}.map(table => table.innerText.slice(0, 80))") == []
        edges = tab.run(f"{cells}.map(cell => cell.getBoundingClientRect().right)")
    assert len(edges) == 7 and max(edges) <= 400, edges
