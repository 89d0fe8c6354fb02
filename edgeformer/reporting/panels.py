"""The pictures of a profile report, each on axes that the caller provides: latency, memory and sizes against budgets.

An estimate is hatched, with a dashed edge, as wide as its range; a measurement is solid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeformer.formats.escaping import visible
from edgeformer.formats.report import Latency, Memory, Report, Row
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.canvas import FAINT, GREY, INK, PALETTE, PAPER, RED
from edgeformer.reporting.words import ABOUT, shape_words, split_sizes

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
