"""Two pictures of what a report trades: work against the device's roofline, and score against latency."""

from __future__ import annotations

from typing import Any

from edgeformer.formats.device import Fact, Peaks
from edgeformer.formats.report import Candidate, Report, Row, Search
from edgeformer.reporting.canvas import FAINT, GREY, INK
from edgeformer.reporting.panels import Panel, named, plain
from edgeformer.reporting.words import ABOUT, metric_named, numbered, rate_words, thread_words


def peak_rate(report: Report, precision: str) -> float | None:
    """Operations per second of the device's matrix products, as its profile says.

    Args:
        report: with the profile as it was used.
        precision: of the artifact.

    Returns:
        The surest of the rates that are known; None: none is.
    """
    known = Peaks.model_validate(report.profile.get("peaks") or {}, strict=False).of(precision)
    return known[0].value if known else None


def bandwidth(report: Report) -> float | None:
    """Bytes per second of the device's memory, as its profile says; None: not known."""
    fact = report.profile.get("bandwidth_bytes_per_s")
    return Fact[float].model_validate(fact, strict=False).value if fact is not None else None


def _roofline_rows(report: Report) -> list[Row]:
    """Rows whose work was counted and that have a time."""
    rows = [row for row in report.rows if row.phase != "cold" and row.work is not None]
    return [row for row in rows if row.latency_ms.p50 and row.work and row.work.bytes_moved and row.work.operations]


def no_roofline(report: Report) -> str | None:
    """Why there is no roofline; None when there is one."""
    if not _roofline_rows(report):
        return "the work of no artifact was counted"
    if bandwidth(report) is None:
        return f"the profile of {report.device} does not state its bandwidth"
    if not any(peak_rate(report, row.precision) for row in _roofline_rows(report)):
        return f"the profile of {report.device} states no peak rate for these precisions"
    return None


def drawn_candidates(search: Search) -> list[tuple[int, int, Candidate]]:
    """Those that have a score and a time, numbered as in the tables."""
    return [entry for entry in numbered(search) if entry[2].score is not None and entry[2].latency_ms is not None]


Shape = tuple[int, int]
_MARKS: dict[str, dict[str, Any]] = {
    "measured": {"marker": "D"},
    "on this host": {"marker": "x"},
    "estimated": {"marker": "D", "markerfacecolor": "none"},
}
"""Filled, crossed, hollow: whose time a point has."""


def _shape_marks(rows: list[Row]) -> dict[Shape, str]:
    """(batch, seq) → its mark, small shapes first."""
    shapes = sorted({(row.batch, row.seq) for row in rows}, key=lambda shape: (shape[0] * shape[1], shape))
    marks = "Dos^vPph"
    return {shape: marks[position % len(marks)] for position, shape in enumerate(shapes)}


_NAMED = 2
"""Bubbles that can carry their names without covering each other; more get numbers, and the front is named below."""


def named_below(report: Report) -> list[str]:
    """Lines below the picture of a search: the numbers of the front and the pick, where names would not fit."""
    search = report.search
    candidates = drawn_candidates(search) if search is not None else []
    if search is None or len(candidates) <= _NAMED:
        return []
    shown = [entry for entry in candidates if entry[2].on_front or entry[1] == search.pick]
    return [f"{number}  {_bubble_name(c, position == search.pick)}" for number, position, c in shown]


def _bubble_name(c: Candidate, picked: bool) -> str:
    threads = f", {thread_words(c.threads)}" if c.threads is not None else ""
    about = f" {ABOUT}" if c.latency_status == "estimated" else ""
    return f"{named(c.artifact)}{threads}{about}{'' if c.feasible else ' (not feasible)'}{' ← pick' if picked else ''}"


class TradePanel(Panel):
    """A picture of what a report trades."""

    def roofline(self) -> None:
        """Operations per second over operations per byte; the roofs are the device's. Ask :func:`no_roofline` first.

        Filled: measured on the device. Hollow with a range: estimated for it. Crosses: measured on this host, which is
        another machine and has other roofs.
        """
        axis, rows, rate = self.axis, _roofline_rows(self.report), bandwidth(self.report)
        assert rate is not None
        intensities = [row.work.operations / row.work.bytes_moved for row in rows if row.work]
        left, right = min(intensities) / 4, max(intensities) * 8
        for precision in dict.fromkeys(row.precision for row in rows):
            peak = peak_rate(self.report, precision)
            if peak is None:
                continue
            right = max(right, peak / rate * 3)
            axis.plot([left, peak / rate, right], [left * rate, peak, peak], color=INK, linewidth=1.2)
            text = f"{precision} peak {rate_words(peak)}"
            axis.annotate(text, (right, peak), (0, 3), textcoords="offset points", ha="right", fontsize=8, color=INK)
        marks = _shape_marks(rows)
        for row in rows:
            self._point(row, marks[row.batch, row.seq])
        self._key(rows, marks)
        text = f"{rate / 1e9:.4g} GB/s"
        axis.annotate(text, (left * 1.6, left * 1.6 * rate), (6, -9), textcoords="offset points", fontsize=8, color=INK)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(left, right)
        axis.grid(color=FAINT, linewidth=0.8)
        at = "" if len(marks) > 1 else f"\nall at {next(iter(marks))[0]} × {next(iter(marks))[1]}"
        label = plain(f"operations per byte moved; roofs: {self.report.device}{at}")
        axis.set(xlabel=label, ylabel="operations per second")

    def _key(self, rows: list[Row], marks: dict[Shape, str]) -> None:
        """Above the picture: a colour per artifact, and a mark per shape where there are several.

        Beside the points, eleven artifacts' names and shapes would lie on each other.
        """
        from matplotlib.lines import Line2D

        facts: dict[str, Any] = {"linestyle": "", "markersize": 6}
        keys = [
            Line2D([], [], marker="s", color=self.colours[name], label=plain(named(name)), **facts)
            for name in dict.fromkeys(row.artifact for row in rows)
        ]
        kinds = dict.fromkeys(self._kind(row) for row in rows)
        keys += [Line2D([], [], color=GREY, label=kind, **facts, **_MARKS[kind]) for kind in kinds]
        if len(marks) > 1:
            keys += [
                Line2D([], [], marker=mark, color=GREY, label=f"{batch} × {seq}", **facts)
                for (batch, seq), mark in marks.items()
            ]
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.01), "borderaxespad": 0}
        self.axis.legend(handles=keys, frameon=False, fontsize=8, ncols=2, handletextpad=0.2, **place)

    def _kind(self, row: Row) -> str:
        """Whose time it is."""
        here = "measured" if self.report.on_target else "on this host"
        return "estimated" if row.latency_ms.status == "estimated" else here

    def _point(self, row: Row, mark: str) -> None:
        """The mark of a row."""
        axis, latency, work, colour = self.axis, row.latency_ms, row.work, self.colours[row.artifact]
        assert work is not None
        per_ms = work.operations * 1e3
        x, y = work.operations / work.bytes_moved, per_ms / (latency.p50 or 1.0)
        kind = self._kind(row)
        if kind == "on this host":
            axis.plot([x], [y], "x", color=colour, markersize=4, linestyle="")
            return
        if kind == "estimated":
            low, high = latency.low or latency.p50 or 1.0, latency.high or latency.p50 or 1.0
            axis.plot([x, x], [per_ms / high, per_ms / low], color=colour, linewidth=1.2, linestyle=(0, (3, 2)))
        filled = "none" if kind == "estimated" else colour
        axis.plot([x], [y], mark, markerfacecolor=filled, markeredgecolor=colour, markersize=6, linestyle="")

    def search(self) -> None:
        """Score over latency, one bubble per candidate as large as its file; the front is drawn, the pick has a ring.

        Hollow and dashed: the latency is an estimate. Pale: not feasible. Up is always better: a perplexity falls
        upwards.
        """
        axis, search = self.axis, self.report.search
        assert search is not None
        candidates = drawn_candidates(search)
        few = len(candidates) <= _NAMED
        for rank, (number, position, c) in enumerate(candidates):
            picked = position == search.pick
            area = self._bubble(c, search, picked)
            if not (few or c.on_front or picked):
                continue
            # Above and below in turn, further out every second time: neighbours are often close.
            lift = (area**0.5 / 2 + 6 + 11 * (rank % 4 // 2)) * (-1 if rank % 2 else 1)
            axis.annotate(
                plain(_bubble_name(c, picked) if few else str(number)), (c.latency_ms, c.score), (0, lift),
                textcoords="offset points", ha="center", va="top" if lift < 0 else "bottom", fontsize=8, color=INK,
            )  # fmt: skip
        front = sorted((c.latency_ms or 0.0, c.score or 0.0) for _, _, c in candidates if c.on_front)
        axis.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=1, linestyle=":", zorder=0)
        if search.bound is not None:
            axis.axhline(search.bound, color=GREY, linewidth=1, linestyle="--")
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axis.annotate(f"asked for: {search.bound:g}", (0, search.bound), (3, 3), fontsize=8, color=GREY, **place)
        metric = metric_named(search.metric)
        better = metric.found_on if metric.higher_is_better else "lower is better, upwards"
        label = "\n".join(("ms per call (p50)", *named_below(self.report)))
        axis.set(xlabel=plain(label), ylabel=f"{search.metric} ({better})")
        axis.grid(color=FAINT, linewidth=0.8)
        axis.margins(0.2)
        if not metric.higher_is_better:
            axis.invert_yaxis()

    def _bubble(self, c: Candidate, search: Search, picked: bool) -> float:
        """Returns the bubble's area in square points."""
        colour = self.colours.get(c.artifact, GREY)
        largest = max(other.size_bytes for other in search.candidates) or 1
        area = 40 + (700 if len(search.candidates) <= _NAMED else 260) * c.size_bytes / largest
        at, pale = ([c.latency_ms], [c.score]), 0.75 if c.feasible else 0.25
        if c.latency_status == "estimated":
            dashed: Any = (0, (3, 2))
            self.axis.scatter(
                *at, s=area, facecolor="none", edgecolor=colour, linewidth=1.5, linestyle=dashed, alpha=pale
            )
        else:
            self.axis.scatter(*at, s=area, facecolor=colour, edgecolor=colour, linewidth=1, alpha=pale)
        if picked:
            self.axis.scatter(*at, s=area + 220, facecolor="none", edgecolor=INK, linewidth=1.4)
        return area
