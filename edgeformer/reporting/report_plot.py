"""The picture of a profile report as PNG: latency, and file sizes against the device's budget."""

from __future__ import annotations

from pathlib import Path

from edgeformer.formats.report import Report
from edgeformer.reporting.canvas import drawing
from edgeformer.reporting.caution import cautions
from edgeformer.reporting.report_panels import draw_estimates, draw_latency, draw_sizes, plain, timed_rows
from edgeformer.reporting.report_words import has_estimates
from edgeformer.reporting.trade_panels import draw_search


def draw_report(report: Report, path: Path) -> Path:
    """Write the picture to ``path``: measured times, estimated ones, sizes, and what a search compared."""
    host = f"solid: measured on {report.host.get('cpu')}, not on it"
    where = "measured on this device" if report.on_target else host
    estimated = ["hatched: estimated"] if has_estimates(report) else []
    title = " · ".join((f"{report.run} for {report.device_title}", where, *estimated, *cautions(report)))
    measured, guesses = timed_rows(report, "measured"), timed_rows(report, "estimated")
    panels = [draw_latency] if measured else []
    panels += [draw_estimates] if guesses else []
    panels += [draw_sizes, *([draw_search] if report.search is not None else [])]
    height = max(4.2, 1.4 + 0.27 * max(len(measured), len(guesses)))
    with drawing(path, plain(title), len(panels), (5.8 * len(panels), height)) as axes:
        for axis, draw in zip(axes, panels, strict=True):
            draw(axis, report)
    return path
