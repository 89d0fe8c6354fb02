"""The pictures of a profile report, each on axes that the caller provides: latency, memory and sizes against budgets.

An estimate is hatched, with a dashed edge, as wide as its range; a measurement is solid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeformer.artifacts.device import Fact, Peaks
from edgeformer.artifacts.report import Candidate, Latency, Memory, Report, Row, Search
from edgeformer.artifacts.units import format_bytes, format_milliseconds, visible
from edgeformer.report.canvas import FAINT, GREY, INK, PALETTE, PAPER, RED
from edgeformer.report.words import ABOUT, metric_named, numbered, rate_words, shape_words, split_sizes, thread_words

MOST_ROWS = 24
"""More rows than a reader can compare: the tables hold the rest."""

_SPREAD_FOR_LOG = 12.0
_FAR = 4.0
_MIB = 2**20
_BOX = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": _BOX}
"""A figure beside its bar. The line that marks a budget does not run through it."""

PARTS = ("embeddings", "block", "heads", "other")
_LONGEST = 32
"""Characters of a name in a picture; more would leave no room for the data."""


def plain(text: str) -> str:
    """Text as it is: between two dollar signs, matplotlib would read mathematics."""
    return visible(text).replace("$", r"\$")


def named(artifact: str) -> str:
    """An artifact's name, cut in the middle where it is too long: exits and precisions stand at the end."""
    if len(artifact) <= _LONGEST:
        return artifact
    half = _LONGEST // 2
    return f"{artifact[: half - 1]}…{artifact[-half:]}"


def timed_rows(report: Report, status: str) -> list[Row]:
    """Rows with a time, cold starts left out; as many as a picture can hold.

    Args:
        report: what `profile` found.
        status: ``measured`` or ``estimated``.
    """
    rows = [row for row in report.rows if row.phase != "cold" and row.latency_ms.p50 is not None]
    return [row for row in rows if row.latency_ms.status == status][:MOST_ROWS]


def memory_peaks(report: Report) -> list[tuple[str, Memory]]:
    """Artifact and its largest memory over all shapes: first those that were measured, then those estimated."""
    found = []
    for status in ("measured", "estimated"):
        for name in dict.fromkeys(row.artifact for row in report.rows):
            used = [row.memory_bytes for row in report.rows if row.artifact == name]
            if known := [memory for memory in used if memory.status == status and memory.peak is not None]:
                found.append((name, max(known, key=lambda memory: memory.peak or 0)))
    return found


class Panel:
    """A picture of a profile report.

    Attributes:
        axis: to draw on.
        report: what `profile` found.
        colours: of each artifact, the same in every picture of a report.
    """

    def __init__(self, axis: Any, report: Report) -> None:
        self.axis, self.report = axis, report
        names = dict.fromkeys(row.artifact for row in report.rows)
        self.colours = {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(names)}

    def times(self, status: str) -> None:
        """One line per ``measured`` row: its sample; or one hatched bar per ``estimated`` row, as wide as its range."""
        axis, report, rows = self.axis, self.report, timed_rows(self.report, status)
        ends: list[float] = []
        for y, row in enumerate(rows):
            latency, colour, text = row.latency_ms, self.colours[row.artifact], format_milliseconds(row.latency_ms.p50)
            if status == "estimated":
                middle = latency.p50 or 0.0
                low, high = latency.low or middle, latency.high or middle
                self._estimate(y, (low, middle, high), colour)
                text = f"{ABOUT} {text}"
            else:
                low, high = self._sample(y, latency, colour)
                text += " unstable" if latency.stable is False else ""
            axis.annotate(text, (high, y), (4, 0), **_BESIDE)
            ends += [low, high]
        if status == "estimated" or report.on_target:
            ends += self._budget_lines("latency", ends)
        self._name_rows([f"{named(row.artifact)}  {shape_words(row, report)}" for row in rows])
        if ends and max(ends) > _SPREAD_FOR_LOG * max(min(ends), 1e-9):
            axis.set_xscale("log")
            close = max(ends) < 60 * min(ends)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if close and f"{value:e}"[0] in "25" else "")
            axis.tick_params(axis="x", which="minor", labelsize=7)
            axis.set_xlim(min(ends) / 1.4, max(ends) * (max(ends) / min(ends)) ** 0.3)
        else:
            self._from_zero(ends)
        guess, here = plain(f"ESTIMATED for {report.device}, not measured"), "device" if report.on_target else "host"
        axis.set(xlabel=f"ms per call, {guess if status == 'estimated' else f'measured on this {here}'}")

    def memory(self) -> None:
        """Peak memory of each artifact against the device's budget."""
        peaks, ends = memory_peaks(self.report), []
        for y, (name, memory) in enumerate(peaks):
            low, middle, high = ((end or memory.peak or 0) / _MIB for end in (memory.low, memory.peak, memory.high))
            estimated = memory.status == "estimated"
            if estimated:
                self._estimate(y, (low, middle, high), self.colours[name])
            else:
                self.axis.barh(y, middle, 0.56, color=self.colours[name])
            text = f"{ABOUT if estimated else ''} {format_bytes(memory.peak)}".strip()
            self.axis.annotate(text, (high, y), (4, 0), **_BESIDE)
            ends.append(high)
        self._from_zero([*ends, *self._budget_lines("memory", ends)])
        self._name_rows([named(name) for name, _ in peaks])
        self.axis.set(xlabel="peak memory (MiB)")

    def sizes(self) -> None:
        """File size of each artifact, by what its bytes are for where the bundle says so, against the budget."""
        axis, sizes = self.axis, {row.artifact: row.size_bytes for row in self.report.rows}
        parts = {part.artifact: part for part in split_sizes(self.report)}
        labelled: set[str] = set()
        for y, (name, size) in enumerate(sizes.items()):
            left = 0.0
            split = {p: getattr(parts[name], p) for p in PARTS} if name in parts else {"not split": size}
            for part, value in split.items():
                colour = GREY if part in ("other", "not split") else PALETTE[PARTS.index(part)]
                label = part if part not in labelled and value else None
                labelled.update((part,) if value else ())
                axis.barh(y, value / _MIB, 0.56, left=left, color=colour, label=label)
                left += value / _MIB
            axis.annotate(format_bytes(size), (left, y), (4, 0), **_BESIDE)
        ends = [size / _MIB for size in sizes.values()]
        self._from_zero([*ends, *self._budget_lines("size", ends)])
        self._name_rows([named(name) for name in sizes])
        axis.set(xlabel="size (MiB)" if parts else "size (MiB), not split: the bundle does not say")
        if parts:
            close = {"columnspacing": 1, "handlelength": 1, "borderaxespad": 1.7}
            axis.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), **close)

    def _from_zero(self, ends: Sequence[float]) -> None:
        """Room on the right for the figures beside the bars."""
        self.axis.set_xlim(0, 1.25 * max(ends, default=1.0) or 1.0)

    def _sample(self, y: float, latency: Latency, colour: str) -> tuple[float, float]:
        """Nested bars: all calls, 5 to 95 %, the middle half; the median is marked. Returns its ends."""
        axis, quantiles = self.axis, latency.quantiles_ms
        if len(quantiles) < 3:
            low, high = latency.p50 or 0.0, latency.p90 or latency.p50 or 0.0
            axis.plot([low, high], [y, y], color=colour, linewidth=2)
            axis.plot([low], [y], "o", color=colour, markersize=5)
            return low, high
        last = len(quantiles) - 1
        at = [quantiles[round(last * share)] for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)]
        axis.plot([at[0], at[6]], [y, y], color=colour, linewidth=1)
        axis.barh(y, at[5] - at[1], 0.34, left=at[1], color=colour, alpha=0.45)
        axis.barh(y, at[4] - at[2], 0.62, left=at[2], color=colour)
        axis.plot([at[3], at[3]], [y - 0.31, y + 0.31], color=PAPER, linewidth=1.6)
        return at[0], at[6]

    def _estimate(self, y: float, at: tuple[float, float, float], colour: str) -> None:
        low, middle, high = at
        self.axis.barh(
            y, high - low, 0.56, left=low, facecolor="none", edgecolor=colour, hatch="////", linestyle=(0, (3, 2)),
            linewidth=1,
        )  # fmt: skip
        self.axis.plot([middle, middle], [y - 0.28, y + 0.28], color=INK, linewidth=1.4, linestyle=(0, (2, 1)))

    def _name_rows(self, names: Sequence[str]) -> None:
        self.axis.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=8)
        self.axis.set_ylim(len(names) - 0.4, -0.6)
        self.axis.tick_params(axis="y", length=0)
        self.axis.grid(axis="y", visible=False)
        self.axis.grid(axis="x", color=FAINT, linewidth=0.8)

    def _budget_lines(self, check: str, ends: Sequence[float]) -> list[float]:
        """A dashed line per limit; one that is far beyond everything is named at the edge, or all else would be a dot.

        Returns the limits that were drawn.
        """
        drawn: list[float] = []
        scale, largest = 1 if check == "latency" else _MIB, max(ends, default=0.0)
        for limit in sorted({c.limit / scale for c in self.report.verdict.checks if c.name == check}):
            text = f"budget {format_milliseconds(limit) + ' ms' if check == 'latency' else format_bytes(limit * scale)}"
            beyond = largest and limit > _FAR * largest
            if beyond:
                text = f"{text}, {limit / largest:.0f}× beyond →"
            else:
                self.axis.axvline(limit, color=RED, linestyle="--", linewidth=1.2)
                drawn.append(limit)
            at = ((1, 1), "axes fraction") if beyond else ((limit, 1), ("data", "axes fraction"))
            self.axis.annotate(
                text, at[0], (2, 3), xycoords=at[1], textcoords="offset points", ha="right", va="bottom", fontsize=8,
                color=RED,
            )  # fmt: skip
        return drawn


# Two pictures of what a report trades: work against the device's roofline, and score against latency.


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
