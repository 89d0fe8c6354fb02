"""The pictures of a profile report: as SVG that stands inside a page, and as one PNG. Without matplotlib: none.

The SVG has no file beside it, needs no network, and takes its colours from the page's style sheet.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.report import Report
from edgeformer.report.canvas import FAINT, INK, NO_PICTURE, PALETTE, PAPER, RED, bare, can_draw, drawing
from edgeformer.report.panels import TradePanel, drawn_candidates, memory_peaks, named_below, no_roofline, timed_rows
from edgeformer.report.words import has_estimates


@dataclass(frozen=True)
class Picture:
    """One picture of the page.

    Attributes:
        name: for ids in the page.
        svg: the drawing; None where there is none.
        caption: what it shows and how to read it.
        missing: why there is no drawing.
    """

    name: str
    title: str
    caption: str
    svg: str | None = None
    missing: str | None = None


_CAPTIONS = {
    "latency": (
        "Latency",
        "Every timed call of a sample: the line spans all of them, the pale bar 5 to 95 %, the solid bar the middle "
        "half, the gap is the median.",
    ),
    "estimates": (
        "Estimated latency",
        "Not measured: every bar is the range that the estimator gives, its middle marked.",
    ),
    "roofline": (
        "Roofline",
        "How many operations per second an artifact does, against what the device's arithmetic and memory allow.",
    ),
    "memory": (
        "Memory against the budget",
        "The peak that an artifact adds to a process, at its largest shape. Solid: measured here; hatched: estimated "
        "for the device.",
    ),
    "sizes": ("What the files are made of", "Bytes of embeddings, layers (a shared block once), heads and the rest."),
    "search": ("Score against latency", "Bubbles are as large as the file; the dotted line is the Pareto front."),
}
_DRAW: dict[str, Callable[[TradePanel], None]] = {
    "latency": lambda panel: panel.times("measured"),
    "estimates": lambda panel: panel.times("estimated"),
    "roofline": TradePanel.roofline,
    "memory": TradePanel.memory,
    "sizes": TradePanel.sizes,
    "search": TradePanel.search,
}
_WIDTH = 4.7
"""Inches, not wider: the page scales pictures to its columns, and on a phone their text must stay readable."""


def draw_pictures(report: Report) -> list[Picture]:
    """The pictures of a report, in order; one that cannot be drawn says why."""
    wanted = {"search": report.search is not None, "estimates": not report.on_target}
    names = [name for name in _CAPTIONS if wanted.get(name, True)]
    if not can_draw():
        return [
            Picture(name, *_CAPTIONS[name], missing=f"{NO_PICTURE}; the tables hold the same figures") for name in names
        ]
    rows, guesses = len(timed_rows(report, "measured")), len(timed_rows(report, "estimated"))
    artifacts, peaks = len({row.artifact for row in report.rows}), len(memory_peaks(report))
    candidates = drawn_candidates(report.search) if report.search is not None else []
    below = 0.14 * len(named_below(report))
    heights_and_gaps = {
        "latency": (0.9 + 0.27 * rows, None if rows else "no time was measured"),
        "estimates": (1.0 + 0.27 * guesses, None if guesses else "nothing was estimated"),
        "roofline": (4.3, no_roofline(report)),
        "memory": (1.1 + 0.3 * peaks, None if peaks else "no memory is known"),
        "sizes": (1.1 + 0.3 * artifacts, None if artifacts else "there are no artifacts"),
        "search": (3.7 + below, None if candidates else "no candidate has a score and a time"),
    }
    pictures = []
    for name in names:
        height, missing = heights_and_gaps[name]
        svg = None if missing else _svg(name, report, height)
        pictures.append(Picture(name, *_CAPTIONS[name], svg=svg, missing=missing))
    return pictures


def draw_report(report: Report, path: Path) -> Path | None:
    """Write the PNG: measured times, estimated ones, sizes, and what a search compared.

    Args:
        report: what `profile` found.
        path: of the PNG.

    Returns:
        ``path``; None where matplotlib is not installed.
    """
    if not can_draw():
        return None
    host = f"solid: measured on {report.host.get('cpu')}, not on it"
    where = "measured on this device" if report.on_target else host
    estimated = ["hatched: estimated"] if has_estimates(report) else []
    title = " · ".join((f"{report.run} for {report.device_title}", where, *estimated, *cautions(report)))
    measured, guesses = len(timed_rows(report, "measured")), len(timed_rows(report, "estimated"))
    shown = {"latency": measured, "estimates": guesses, "sizes": True, "search": report.search is not None}
    names = [name for name, wanted in shown.items() if wanted]
    height = max(4.2, 1.4 + 0.27 * max(measured, guesses))
    with drawing(path, title, len(names), (5.8 * len(names), height)) as axes:
        for axis, name in zip(axes, names, strict=True):
            _DRAW[name](TradePanel(axis, report))
    return path


def _svg(name: str, report: Report, height: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.edgecolor": INK, "grid.color": FAINT, "font.size": 9, "axes.labelsize": 8.5,
        "xtick.labelsize": 8, "hatch.linewidth": 0.7,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        _DRAW[name](TradePanel(bare(figure.subplots()), report))
        text = io.StringIO()
        nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _for_page(text.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Make matplotlib's SVG a part of a page, in which the picture's name is unique.

    Its declarations and references to other addresses go, its ids get the picture's name, its size is the page's
    business, and its colours become the variables ``--c0``…, ``--ink``, ``--faint``, ``--paper`` and ``--limit``.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-labelledby="t-{name}">', svg
    )
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    # A presentation attribute takes no variable; a style does.
    svg = re.sub(r'\b(fill|stroke)="(#[0-9a-fA-F]{6})"', r'style="\1: \2"', svg)
    names = {colour: f"c{index}" for index, colour in enumerate(PALETTE)}
    names |= {INK: "ink", FAINT: "faint", PAPER: "paper", RED: "limit"}
    for colour, variable in names.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # matplotlib's own font would be looked for on the reader's machine.
    return re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
