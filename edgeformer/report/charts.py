"""Charts of a profile report: SVG inside the HTML page, and one PNG. Without matplotlib there are none.

An estimate is hatched or hollow, with a dashed edge, and as wide as its range; a measurement is solid. The SVG needs no
other file and no network, and takes its colours from the page's style sheet.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.artifacts.device import Fact, Peaks
from edgeformer.artifacts.manifest import cautions
from edgeformer.artifacts.report import Candidate, Latency, Memory, Report, Row
from edgeformer.artifacts.units import format_bytes, format_milliseconds
from edgeformer.report.canvas import (
    FAINT,
    GREY,
    INK,
    NO_PICTURE,
    PALETTE,
    PAPER,
    RED,
    bare,
    can_draw,
    drawing,
    literal,
    shorten_name,
)  # fmt: skip
from edgeformer.report.context import (
    ABOUT,
    RankedCandidate,
    has_estimates,
    metric_named,
    ranked_candidates,
    rate_text,
    shape_text,
    split_sizes,
    thread_text,
)  # fmt: skip

MAX_ROWS = 24
"""Rows of a chart; the tables hold the others."""
MAX_LABELLED_BUBBLES = 2
"""A search with more candidates gets numbers on its bubbles, and the names of the front below the chart."""
_LOG_SCALE_SPREAD = 12.0
"""Ratio of the longest to the shortest time from which the time axis is logarithmic."""
_FAR_LIMIT = 4.0
"""A limit this many times beyond the largest value is named at the edge instead of drawn."""
_MIB = 2**20
_WIDTH = 4.7
"""Inches. The page scales charts to its columns; on a phone their text must stay readable."""
_DASHED: Any = (0, (3, 2))
_VALUE_LABEL: dict[str, Any] = {
    "textcoords": "offset points", "va": "center", "fontsize": 8,
    "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
}  # fmt: skip
"""A figure at the end of its bar; the line of a budget does not cross it."""
_PARTS = ("embeddings", "block", "heads", "other")
_MARKERS: dict[str, dict[str, Any]] = {
    "measured": {"marker": "D"},
    "on this host": {"marker": "x"},
    "estimated": {"marker": "D", "markerfacecolor": "none"},
}
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


@dataclass(frozen=True)
class Picture:
    """One chart of the page; ``name`` is unique in the page, ``missing`` says why there is no ``svg``."""

    name: str
    title: str
    caption: str
    svg: str | None = None
    missing: str | None = None


def draw_pictures(report: Report) -> list[Picture]:
    """Return the charts of a report in order; a chart that cannot be drawn says why."""
    absent = {"search": report.search is None, "estimates": report.on_target}
    names = [name for name in _CAPTIONS if not absent.get(name)]
    if not can_draw():
        reason = f"{NO_PICTURE}; the tables hold the same figures"
        return [Picture(name, *_CAPTIONS[name], missing=reason) for name in names]
    pictures, chart = [], ReportChart(report)
    for name in names:
        height, missing = chart.plan(name)
        svg = None if missing else _svg(name, chart, height)
        pictures.append(Picture(name, *_CAPTIONS[name], svg=svg, missing=missing))
    return pictures


def draw_report(report: Report, path: Path) -> Path | None:
    """Write a PNG of measured times, estimated times, sizes and the candidates of a search.

    Returns:
        ``path``; None if matplotlib is not installed.
    """
    if not can_draw():
        return None
    host = f"solid: measured on {report.host.get('cpu')}, not on it"
    where = "measured on this device" if report.on_target else host
    estimated = ["hatched: estimated"] if has_estimates(report) else []
    title = " · ".join((f"{report.run} for {report.device_title}", where, *estimated, *cautions(report)))
    chart = ReportChart(report)
    measured, estimates = len(timed_rows(report, "measured")), len(timed_rows(report, "estimated"))
    drawn = {"latency": measured, "estimates": estimates, "sizes": True, "search": report.search is not None}
    names = [name for name, is_drawn in drawn.items() if is_drawn]
    height = max(4.2, 1.4 + 0.27 * max(measured, estimates))
    with drawing(path, title, len(names), (5.8 * len(names), height)) as axes:
        for axis, name in zip(axes, names, strict=True):
            chart.draw(name, axis)
    return path


def _svg(name: str, chart: ReportChart, height: float) -> str:
    """Draw a chart as SVG for a page: unique ids, no metadata, colours from the style sheet's variables."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.edgecolor": INK, "grid.color": FAINT, "font.size": 9, "axes.labelsize": 8.5,
        "xtick.labelsize": 8, "hatch.linewidth": 0.7,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        chart.draw(name, bare(figure.subplots()))
        text = io.StringIO()
        metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    root = rf'<svg viewBox="\1" role="img" aria-labelledby="t-{name}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', root, svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    # A presentation attribute cannot hold a CSS variable; a style can.
    svg = re.sub(r'\b(fill|stroke)="(#[0-9a-fA-F]{6})"', r'style="\1: \2"', svg)
    variables = {colour: f"c{index}" for index, colour in enumerate(PALETTE)}
    variables |= {INK: "ink", FAINT: "faint", PAPER: "paper", RED: "limit"}
    for colour, variable in variables.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # The reader's machine may not have matplotlib's font.
    return re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)


# Data of the charts


def timed_rows(report: Report, status: str) -> list[Row]:
    """Return the steady rows whose time has ``status`` (``measured`` or ``estimated``), at most :data:`MAX_ROWS`."""
    rows = [row for row in report.rows if row.phase != "cold" and row.latency_ms.p50 is not None]
    return [row for row in rows if row.latency_ms.status == status][:MAX_ROWS]


def _memory_peaks(report: Report) -> list[tuple[str, Memory]]:
    """Return each artifact's largest memory over all shapes: measured ones first, then estimated ones."""
    peaks = []
    for status in ("measured", "estimated"):
        for name in dict.fromkeys(row.artifact for row in report.rows):
            memories = [row.memory_bytes for row in report.rows if row.artifact == name]
            if of_status := [memory for memory in memories if memory.status == status and memory.peak is not None]:
                peaks.append((name, max(of_status, key=lambda memory: memory.peak or 0)))
    return peaks


def _roofline_rows(report: Report) -> list[Row]:
    rows = [row for row in report.rows if row.phase != "cold" and row.latency_ms.p50]
    return [row for row in rows if row.work and row.work.bytes_moved and row.work.operations]


def _bandwidth(report: Report) -> float | None:
    """Return the bytes per second of the device's memory; None if its profile does not say."""
    fact = report.profile.get("bandwidth_bytes_per_s")
    return Fact[float].model_validate(fact, strict=False).value if fact is not None else None


def _peak_rate(report: Report, precision: str) -> float | None:
    """Return the operations per second of the device's matrix products, from the surest fact of its profile."""
    facts = Peaks.model_validate(report.profile.get("peaks") or {}, strict=False).of(precision)
    return facts[0].value if facts else None


def _drawn_candidates(report: Report) -> list[RankedCandidate]:
    """Return the candidates that have a score and a time, numbered as in the tables."""
    ranked = ranked_candidates(report.search) if report.search is not None else []
    return [row for row in ranked if row.candidate.score is not None and row.candidate.latency_ms is not None]


def _candidate_label(row: RankedCandidate) -> str:
    c = row.candidate
    threads = f", {thread_text(c.threads)}" if c.threads is not None else ""
    about = f" {ABOUT}" if c.latency_status == "estimated" else ""
    feasible, pick = "" if c.feasible else " (not feasible)", " ← pick" if row.is_pick else ""
    return f"{shorten_name(c.artifact)}{threads}{about}{feasible}{pick}"


def bubble_legend(report: Report) -> list[str]:
    """Return lines below the chart of a search: numbers and names of the front and the pick, if names do not fit."""
    candidates = _drawn_candidates(report)
    if len(candidates) <= MAX_LABELLED_BUBBLES:
        return []
    listed = [row for row in candidates if row.candidate.on_front or row.is_pick]
    return [f"{row.number}  {_candidate_label(row)}" for row in listed]


class ReportChart:
    """Charts of a report, drawn on matplotlib axes. An artifact has the same colour in every chart."""

    def __init__(self, report: Report) -> None:
        self.report = report
        names = dict.fromkeys(row.artifact for row in report.rows)
        self.colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}

    def plan(self, name: str) -> tuple[float, str | None]:
        """Return the height of a chart in inches, and why it cannot be drawn; None if it can."""
        report = self.report
        if name == "roofline":
            rows = _roofline_rows(report)
            missing: str | None = None
            if not rows:
                missing = "the work of no artifact was counted"
            elif _bandwidth(report) is None:
                missing = f"the profile of {report.device} does not state its bandwidth"
            elif not any(_peak_rate(report, row.precision) for row in rows):
                missing = f"the profile of {report.device} states no peak rate for these precisions"
            return 4.3, missing
        measured, estimates = len(timed_rows(report, "measured")), len(timed_rows(report, "estimated"))
        peaks, artifacts = len(_memory_peaks(report)), len(self.colours)
        search_height = 3.7 + 0.14 * len(bubble_legend(report))
        height, count, reason = {
            "latency": (0.9 + 0.27 * measured, measured, "no time was measured"),
            "estimates": (1.0 + 0.27 * estimates, estimates, "nothing was estimated"),
            "memory": (1.1 + 0.3 * peaks, peaks, "no memory is known"),
            "sizes": (1.1 + 0.3 * artifacts, artifacts, "there are no artifacts"),
            "search": (search_height, len(_drawn_candidates(report)), "no candidate has a score and a time"),
        }[name]
        return height, None if count else reason

    def draw(self, name: str, axis: Any) -> None:
        """Draw a chart that :meth:`plan` finds possible."""
        if name in ("latency", "estimates"):
            self._times(axis, "measured" if name == "latency" else "estimated")
            return
        charts = {"roofline": self._roofline, "memory": self._memory, "sizes": self._sizes, "search": self._search}
        charts[name](axis)

    def _times(self, axis: Any, status: str) -> None:
        """Draw a line per row: the sample of a measured row, or the range of an estimated row."""
        report, rows = self.report, timed_rows(self.report, status)
        ends: list[float] = []
        for y, row in enumerate(rows):
            latency, colour, text = row.latency_ms, self.colours[row.artifact], format_milliseconds(row.latency_ms.p50)
            if status == "estimated":
                low, high = _draw_estimate(axis, y, latency.low, latency.p50 or 0.0, latency.high, colour)
                text = f"{ABOUT} {text}"
            else:
                low, high = _draw_sample(axis, y, latency, colour)
                text += " unstable" if latency.stable is False else ""
            axis.annotate(text, (high, y), (4, 0), **_VALUE_LABEL)
            ends += [low, high]
        if status == "estimated" or report.on_target:
            ends += self._draw_limits(axis, "latency", ends)
        _label_rows(axis, [f"{shorten_name(row.artifact)}  {shape_text(row, report)}" for row in rows])
        if ends and max(ends) > _LOG_SCALE_SPREAD * max(min(ends), 1e-9):
            axis.set_xscale("log")
            close = max(ends) < 60 * min(ends)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if close and f"{value:e}"[0] in "25" else "")
            axis.tick_params(axis="x", which="minor", labelsize=7)
            axis.set_xlim(min(ends) / 1.4, max(ends) * (max(ends) / min(ends)) ** 0.3)
        else:
            _start_at_zero(axis, ends)
        source = f"measured on this {'device' if report.on_target else 'host'}"
        if status == "estimated":
            source = literal(f"ESTIMATED for {report.device}, not measured")
        axis.set(xlabel=f"ms per call, {source}")

    def _memory(self, axis: Any) -> None:
        """Draw the peak memory of each artifact and the device's budget."""
        peaks, ends = _memory_peaks(self.report), []
        for y, (name, memory) in enumerate(peaks):
            middle, text = (memory.peak or 0) / _MIB, format_bytes(memory.peak)
            high = middle
            if memory.status == "estimated":
                low_mib, high_mib = ((end or memory.peak or 0) / _MIB for end in (memory.low, memory.high))
                _, high = _draw_estimate(axis, y, low_mib, middle, high_mib, self.colours[name])
                text = f"{ABOUT} {text}"
            else:
                axis.barh(y, middle, 0.56, color=self.colours[name])
            axis.annotate(text, (high, y), (4, 0), **_VALUE_LABEL)
            ends.append(high)
        _start_at_zero(axis, [*ends, *self._draw_limits(axis, "memory", ends)])
        _label_rows(axis, [shorten_name(name) for name, _ in peaks])
        axis.set(xlabel="peak memory (MiB)")

    def _sizes(self, axis: Any) -> None:
        """Draw the file size of each artifact, split by what its bytes are for if the bundle says so."""
        sizes = {row.artifact: row.size_bytes for row in self.report.rows}
        parts = {part.artifact: part for part in split_sizes(self.report)}
        in_legend: set[str] = set()
        for y, (name, size) in enumerate(sizes.items()):
            offset = 0.0
            split = {p: getattr(parts[name], p) for p in _PARTS} if name in parts else {"not split": size}
            for part, value in split.items():
                colour = GREY if part in ("other", "not split") else PALETTE[_PARTS.index(part)]
                label = part if part not in in_legend and value else None
                in_legend.update((part,) if value else ())
                axis.barh(y, value / _MIB, 0.56, left=offset, color=colour, label=label)
                offset += value / _MIB
            axis.annotate(format_bytes(size), (offset, y), (4, 0), **_VALUE_LABEL)
        ends = [size / _MIB for size in sizes.values()]
        _start_at_zero(axis, [*ends, *self._draw_limits(axis, "size", ends)])
        _label_rows(axis, [shorten_name(name) for name in sizes])
        axis.set(xlabel="size (MiB)" if parts else "size (MiB), not split: the bundle does not say")
        if parts:
            spacing = {"columnspacing": 1, "handlelength": 1, "borderaxespad": 1.7}
            axis.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), **spacing)

    def _draw_limits(self, axis: Any, check: str, ends: Sequence[float]) -> list[float]:
        """Draw a dashed line per limit of ``check`` and return the drawn limits; a far limit is only named."""
        drawn: list[float] = []
        scale, largest = 1 if check == "latency" else _MIB, max(ends, default=0.0)
        for limit in sorted({c.limit / scale for c in self.report.verdict.checks if c.name == check}):
            text = f"budget {format_milliseconds(limit) + ' ms' if check == 'latency' else format_bytes(limit * scale)}"
            is_far = largest and limit > _FAR_LIMIT * largest
            if is_far:
                text = f"{text}, {limit / largest:.0f}× beyond →"
            else:
                axis.axvline(limit, color=RED, linestyle="--", linewidth=1.2)
                drawn.append(limit)
            place, coordinates = ((1, 1), "axes fraction") if is_far else ((limit, 1), ("data", "axes fraction"))
            axis.annotate(
                text, place, (2, 3), xycoords=coordinates, textcoords="offset points", ha="right", va="bottom",
                fontsize=8, color=RED,
            )  # fmt: skip
        return drawn

    def _roofline(self, axis: Any) -> None:
        """Draw operations per second over operations per byte, and the roofs of the device.

        Filled: measured on the device. Hollow with a range: estimated for it. Crosses: measured on this host, whose
        roofs are different.
        """
        rows, rate = _roofline_rows(self.report), _bandwidth(self.report)
        assert rate is not None
        intensities = [row.work.operations / row.work.bytes_moved for row in rows if row.work]
        x_min, x_max = min(intensities) / 4, max(intensities) * 8
        for precision in dict.fromkeys(row.precision for row in rows):
            peak = _peak_rate(self.report, precision)
            if peak is None:
                continue
            x_max = max(x_max, peak / rate * 3)
            axis.plot([x_min, peak / rate, x_max], [x_min * rate, peak, peak], color=INK, linewidth=1.2)
            text = f"{precision} peak {rate_text(peak)}"
            axis.annotate(text, (x_max, peak), (0, 3), textcoords="offset points", ha="right", fontsize=8, color=INK)
        shapes = sorted({(row.batch, row.seq) for row in rows}, key=lambda shape: (shape[0] * shape[1], shape))
        markers = {shape: "Dos^vPph"[index % 8] for index, shape in enumerate(shapes)}
        sources = {
            id(row): "estimated" if row.latency_ms.status == "estimated"
            else "measured" if self.report.on_target else "on this host"
            for row in rows
        }  # fmt: skip
        for row in rows:
            latency, work, colour, source = row.latency_ms, row.work, self.colours[row.artifact], sources[id(row)]
            assert work is not None
            per_ms = work.operations * 1e3
            x, y = work.operations / work.bytes_moved, per_ms / (latency.p50 or 1.0)
            if source == "on this host":
                axis.plot([x], [y], "x", color=colour, markersize=4, linestyle="")
                continue
            if source == "estimated":
                low, high = latency.low or latency.p50 or 1.0, latency.high or latency.p50 or 1.0
                axis.plot([x, x], [per_ms / high, per_ms / low], color=colour, linewidth=1.2, linestyle=_DASHED)
            fill = "none" if source == "estimated" else colour
            style = {"markerfacecolor": fill, "markeredgecolor": colour, "markersize": 6, "linestyle": ""}
            axis.plot([x], [y], markers[row.batch, row.seq], **style)
        self._roofline_legend(axis, rows, markers, [*dict.fromkeys(sources.values())])
        text = f"{rate / 1e9:.4g} GB/s"
        axis.annotate(
            text, (x_min * 1.6, x_min * 1.6 * rate), (6, -9), textcoords="offset points", fontsize=8, color=INK
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(x_min, x_max)
        axis.grid(color=FAINT, linewidth=0.8)
        shape = "" if len(shapes) > 1 else f"\nall at {shapes[0][0]} × {shapes[0][1]}"
        label = literal(f"operations per byte moved; roofs: {self.report.device}{shape}")
        axis.set(xlabel=label, ylabel="operations per second")

    def _roofline_legend(
        self, axis: Any, rows: Sequence[Row], markers: dict[tuple[int, int], str], sources: Sequence[str]
    ) -> None:
        """Draw a legend above the chart, since the names of many artifacts at their points would overlap."""
        from matplotlib.lines import Line2D

        style: dict[str, Any] = {"linestyle": "", "markersize": 6}
        handles = [
            Line2D([], [], marker="s", color=self.colours[name], label=literal(shorten_name(name)), **style)
            for name in dict.fromkeys(row.artifact for row in rows)
        ]
        handles += [Line2D([], [], color=GREY, label=source, **style, **_MARKERS[source]) for source in sources]
        if len(markers) > 1:
            handles += [
                Line2D([], [], marker=marker, color=GREY, label=f"{batch} × {seq}", **style)
                for (batch, seq), marker in markers.items()
            ]
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.01), "borderaxespad": 0}
        axis.legend(handles=handles, frameon=False, fontsize=8, ncols=2, handletextpad=0.2, **place)

    def _search(self, axis: Any) -> None:
        """Draw score over latency: a bubble per candidate, as large as its file; the front and the pick are marked.

        Hollow and dashed: the latency is an estimate. Pale: not feasible. A lower perplexity is drawn higher.
        """
        search, candidates = self.report.search, _drawn_candidates(self.report)
        assert search is not None
        is_labelled = len(candidates) <= MAX_LABELLED_BUBBLES
        largest = max(c.size_bytes for c in search.candidates) or 1
        scale = (700 if len(search.candidates) <= MAX_LABELLED_BUBBLES else 260) / largest
        for rank, row in enumerate(candidates):
            area = 40 + scale * row.candidate.size_bytes
            self._draw_bubble(axis, row.candidate, area, is_pick=row.is_pick)
            if not (is_labelled or row.candidate.on_front or row.is_pick):
                continue
            # Alternate above and below, and near and far: neighbours are often close.
            lift = (area**0.5 / 2 + 6 + 11 * (rank % 4 // 2)) * (-1 if rank % 2 else 1)
            axis.annotate(
                literal(_candidate_label(row) if is_labelled else str(row.number)),
                (row.candidate.latency_ms, row.candidate.score), (0, lift), textcoords="offset points", ha="center",
                va="top" if lift < 0 else "bottom", fontsize=8, color=INK,
            )  # fmt: skip
        front = sorted(
            (r.candidate.latency_ms or 0, r.candidate.score or 0) for r in candidates if r.candidate.on_front
        )
        axis.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=1, linestyle=":", zorder=0)
        if search.bound is not None:
            axis.axhline(search.bound, color=GREY, linewidth=1, linestyle="--")
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axis.annotate(f"bound: {search.bound:g}", (0, search.bound), (3, 3), fontsize=8, color=GREY, **place)
        metric = metric_named(search.metric)
        direction = metric.evaluated_on if metric.higher_is_better else "lower is better, upwards"
        label = "\n".join(("ms per call (p50)", *bubble_legend(self.report)))
        axis.set(xlabel=literal(label), ylabel=f"{search.metric} ({direction})")
        axis.grid(color=FAINT, linewidth=0.8)
        axis.margins(0.2)
        if not metric.higher_is_better:
            axis.invert_yaxis()

    def _draw_bubble(self, axis: Any, candidate: Candidate, area: float, *, is_pick: bool) -> None:
        """Draw a bubble of ``area`` square points."""
        colour, alpha = self.colours.get(candidate.artifact, GREY), 0.75 if candidate.feasible else 0.25
        point = ([candidate.latency_ms], [candidate.score])
        if candidate.latency_status == "estimated":
            style = {"facecolor": "none", "linewidth": 1.5, "linestyle": _DASHED}
        else:
            style = {"facecolor": colour, "linewidth": 1}
        axis.scatter(*point, s=area, edgecolor=colour, alpha=alpha, **style)
        if is_pick:
            axis.scatter(*point, s=area + 220, facecolor="none", edgecolor=INK, linewidth=1.4)


def _draw_sample(axis: Any, y: float, latency: Latency, colour: str) -> tuple[float, float]:
    """Draw nested bars: all calls, 5 to 95 %, the middle half, the median. Return the ends."""
    quantiles = latency.quantiles_ms
    if len(quantiles) < 3:
        low, high = latency.p50 or 0.0, latency.p90 or latency.p50 or 0.0
        axis.plot([low, high], [y, y], color=colour, linewidth=2)
        axis.plot([low], [y], "o", color=colour, markersize=5)
        return low, high
    last = len(quantiles) - 1
    p0, p5, p25, p50, p75, p95, p100 = (quantiles[round(last * q)] for q in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0))
    axis.plot([p0, p100], [y, y], color=colour, linewidth=1)
    axis.barh(y, p95 - p5, 0.34, left=p5, color=colour, alpha=0.45)
    axis.barh(y, p75 - p25, 0.62, left=p25, color=colour)
    axis.plot([p50, p50], [y - 0.31, y + 0.31], color=PAPER, linewidth=1.6)
    return p0, p100


def _draw_estimate(
    axis: Any, y: float, low: float | None, middle: float, high: float | None, colour: str
) -> tuple[float, float]:
    """Draw a hatched bar over the range and mark its middle. Return the ends."""
    low, high = low or middle, high or middle
    style: dict[str, Any] = {"facecolor": "none", "hatch": "////", "linestyle": _DASHED, "linewidth": 1}
    axis.barh(y, high - low, 0.56, left=low, edgecolor=colour, **style)
    axis.plot([middle, middle], [y - 0.28, y + 0.28], color=INK, linewidth=1.4, linestyle=(0, (2, 1)))
    return low, high


def _start_at_zero(axis: Any, ends: Sequence[float]) -> None:
    """Start the axis at 0 and leave space on the right for the labels of the bars."""
    axis.set_xlim(0, 1.25 * max(ends, default=1.0) or 1.0)


def _label_rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [literal(name) for name in names], fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)
