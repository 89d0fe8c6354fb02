"""The HTML report in a browser: no status, and at 1200 pixels no figure, lies behind a scroll bar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeformer.artifacts.report import Latency, Memory, Report
from edgeformer.report.html_report import as_html
from tests.report.made_reports import estimated, made_report, made_row, made_search, measured
from tests.web.browser import Tab, headless


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with headless() as browser:
        yield browser.new_tab()


def wide_report() -> Report:
    """Every column has figures, artifacts have long names, and two runtimes measured them."""
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
    measured_there = {"latency_status": "measured", "threads": 2, **interval}
    search = made_search()
    first, second = (candidate.model_copy(update=measured_there) for candidate in search.candidates)
    second = second.model_copy(update={"artifact": "onnx-int8-trimmed", "provider": "openvino-cpu"})
    return made_report(*rows, search=search.model_copy(update={"candidates": (first, second)}))


def show(tab: Tab, folder: Path, width: int) -> None:
    page = folder / "report.html"
    page.write_text(as_html(wide_report()), encoding="utf-8")
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    tab.open(page.as_uri())
    assert tab.run("innerWidth") == width


def test_at_1200_pixels_no_table_needs_its_scroll_bar(tab: Tab, tmp_path: Path) -> None:
    show(tab, tmp_path, 1200)
    scrolling = "[...document.querySelectorAll('.scroll')].filter(table => table.scrollWidth > table.clientWidth)"
    assert tab.run(f"{scrolling}.map(table => table.innerText.slice(0, 80))") == []
    assert tab.run("document.documentElement.scrollWidth") <= 1200


def test_at_400_pixels_the_status_is_in_sight(tab: Tab, tmp_path: Path) -> None:
    show(tab, tmp_path, 400)
    table = "document.querySelector('#measurements ~ .dense')"
    cells = f"[...{table}.querySelectorAll('td')].filter(cell => /unstable|unavailable/.test(cell.innerText))"
    edges = tab.run(f"{cells}.map(cell => cell.getBoundingClientRect().right)")
    assert len(edges) == 7 and max(edges) <= 400, edges
    assert tab.run("document.documentElement.scrollWidth") <= 400, "tables scroll, the page does not"
