"""The pictures of a profile report, each on axes that the caller provides: latency, memory and sizes against budgets.

An estimate is hatched, with a dashed edge, as wide as its range; a measurement is solid. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeformer.formats.report import Report, Row
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


_LONGEST = 32
"""Characters of a name in a picture; more would leave no room for the data."""


def plain(text: str) -> str:
    """Text as it is: between two dollar signs, matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def named(artifact: str) -> str:
    """An artifact's name, cut in the middle where it is too long: exits and precisions stand at the end."""
    if len(artifact) <= _LONGEST:
        return artifact
    half = _LONGEST // 2
    return f"{artifact[: half - 1]}…{artifact[-half:]}"


def colours(report: Report) -> dict[str, str]:
    """Artifact → colour, the same in every picture of a report."""
    names = dict.fromkeys(row.artifact for row in report.rows)
    return {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(names)}


def timed_rows(report: Report, status: str) -> list[Row]:
    """Rows with a time, cold starts left out; as many as a picture can hold.

    Args:
        report: what `profile` found.
        status: ``measured`` or ``estimated``.
    """
    rows = [row for row in report.rows if row.phase != "cold" and row.latency_ms.p50 is not None]
    return [row for row in rows if row.latency_ms.status == status][:MOST_ROWS]


def draw_latency(axis: Any, report: Report) -> None:
    """One line per measured row: its sample as nested bars (all, 5–95 %, the middle half), the median marked.

    Args:
        axis: to draw on.
        report: what `profile` found.
    """
    rows, of = timed_rows(report, "measured"), colours(report)
    ends: list[float] = []
    for y, row in enumerate(rows):
        low, high = _sample(axis, y, row, of[row.artifact])
        text = format_milliseconds(row.latency_ms.p50) + (" unstable" if row.latency_ms.stable is False else "")
        axis.annotate(text, (high, y), (4, 0), **_BESIDE)
        ends += [low, high]
    limits = _budget_line(axis, report, "latency", "ms", ends) if report.on_target else []
    _finish_times(axis, rows, [*ends, *limits], report)
    axis.set(xlabel=f"ms per call, measured on {'this device' if report.on_target else 'this host'}")


def draw_estimates(axis: Any, report: Report) -> None:
    """One hatched bar per estimated row, as wide as its range, against the device's budget.

    Args:
        axis: to draw on.
        report: what `profile` found.
    """
    rows, of = timed_rows(report, "estimated"), colours(report)
    ends: list[float] = []
    for y, row in enumerate(rows):
        middle = row.latency_ms.p50 or 0.0
        low, high = row.latency_ms.low or middle, row.latency_ms.high or middle
        _estimate(axis, y, (low, middle, high), of[row.artifact])
        axis.annotate(f"{ABOUT} {format_milliseconds(middle)}", (high, y), (4, 0), **_BESIDE)
        ends += [low, high]
    _finish_times(axis, rows, [*ends, *_budget_line(axis, report, "latency", "ms", ends)], report)
    axis.set(xlabel=f"ms per call, ESTIMATED for {report.device}, not measured")


def _finish_times(axis: Any, rows: Sequence[Row], ends: Sequence[float], report: Report) -> None:
    _name_rows(axis, [f"{named(row.artifact)}  {shape_words(row, report)}" for row in rows])
    if ends and max(ends) > _SPREAD_FOR_LOG * max(min(ends), 1e-9):
        axis.set_xscale("log")
        close = max(ends) < 60 * min(ends)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if close and f"{value:e}"[0] in "25" else "")
        axis.tick_params(axis="x", which="minor", labelsize=7)
        axis.set_xlim(min(ends) / 1.4, max(ends) * (max(ends) / min(ends)) ** 0.3)
    else:
        _from_zero(axis, ends)


def _from_zero(axis: Any, ends: Sequence[float]) -> None:
    """Room on the right for the figures beside the bars."""
    axis.set_xlim(0, 1.25 * max(ends, default=1.0) or 1.0)


def _sample(axis: Any, y: float, row: Row, colour: str) -> tuple[float, float]:
    latency = row.latency_ms
    quantiles = latency.quantiles_ms
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


def _estimate(axis: Any, y: float, at: tuple[float, float, float], colour: str) -> None:
    low, middle, high = at
    axis.barh(
        y, high - low, 0.56, left=low, facecolor="none", edgecolor=colour, hatch="////", linestyle=(0, (3, 2)),
        linewidth=1,
    )  # fmt: skip
    axis.plot([middle, middle], [y - 0.28, y + 0.28], color=INK, linewidth=1.4, linestyle=(0, (2, 1)))


def _name_rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)


def _budget_line(axis: Any, report: Report, check: str, unit: str, ends: Sequence[float]) -> list[float]:
    """A dashed line per limit; one that is far beyond everything is named at the edge, or all else would be a dot.

    Returns the limits that were drawn.
    """
    drawn: list[float] = []
    scale = _MIB if unit == "MiB" else 1
    largest = max(ends, default=0.0)
    for limit in sorted({c.limit / scale for c in report.verdict.checks if c.name == check}):
        text = f"budget {format_bytes(limit * scale) if unit == 'MiB' else format_milliseconds(limit) + ' ms'}"
        beyond = largest and limit > _FAR * largest
        if beyond:
            text = f"{text}, {limit / largest:.0f}× beyond →"
        else:
            axis.axvline(limit, color=RED, linestyle="--", linewidth=1.2)
            drawn.append(limit)
        at = ((1, 1), "axes fraction") if beyond else ((limit, 1), ("data", "axes fraction"))
        axis.annotate(
            text, at[0], (2, 3), xycoords=at[1], textcoords="offset points", ha="right", va="bottom", fontsize=8,
            color=RED,
        )  # fmt: skip
    return drawn


@dataclass(frozen=True)
class _Peak:
    """The largest memory of an artifact, in bytes."""

    low: float
    middle: float
    high: float
    estimated: bool


def memory_peaks(report: Report) -> dict[str, list[_Peak]]:
    """Artifact → its largest measured and its largest estimated memory, over all shapes."""
    found: dict[str, list[_Peak]] = {}
    for name in dict.fromkeys(row.artifact for row in report.rows):
        for status in ("measured", "estimated"):
            used = [row.memory_bytes for row in report.rows if row.artifact == name]
            used = [m for m in used if m.status == status and m.peak is not None]
            if used:
                top = max(used, key=lambda m: m.peak or 0)
                middle = float(top.peak or 0)
                peak = _Peak(float(top.low or middle), middle, float(top.high or middle), status == "estimated")
                found.setdefault(name, []).append(peak)
    return found


def draw_memory(axis: Any, report: Report) -> None:
    """Peak memory of each artifact against the device's budget.

    Args:
        axis: to draw on.
        report: what `profile` found.
    """
    of, bars = colours(report), [(name, peak) for name, peaks in memory_peaks(report).items() for peak in peaks]
    bars.sort(key=lambda bar: bar[1].estimated)
    for y, (name, peak) in enumerate(bars):
        if peak.estimated:
            _estimate(axis, y, (peak.low / _MIB, peak.middle / _MIB, peak.high / _MIB), of[name])
        else:
            axis.barh(y, peak.middle / _MIB, 0.56, color=of[name])
        text = f"{ABOUT if peak.estimated else ''} {format_bytes(peak.middle)}".strip()
        axis.annotate(text, (peak.high / _MIB, y), (4, 0), **_BESIDE)
    ends = [peak.high / _MIB for _, peak in bars]
    _from_zero(axis, [*ends, *_budget_line(axis, report, "memory", "MiB", ends)])
    _name_rows(axis, [named(name) for name, _ in bars])
    axis.set(xlabel="peak memory (MiB)")


PARTS = ("embeddings", "block", "heads", "other")


def draw_sizes(axis: Any, report: Report) -> None:
    """File size of each artifact, by what its bytes are for where the bundle says so, against the device's budget.

    Args:
        axis: to draw on.
        report: what `profile` found.
    """
    sizes = {row.artifact: row.size_bytes for row in report.rows}
    parts = {part.artifact: part for part in split_sizes(report)}
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
    _from_zero(axis, [*ends, *_budget_line(axis, report, "size", "MiB", ends)])
    _name_rows(axis, [named(name) for name in sizes])
    axis.set(xlabel="size (MiB)" if parts else "size (MiB), not split: the bundle does not say")
    if parts:
        close = {"columnspacing": 1, "handlelength": 1, "borderaxespad": 1.7}
        axis.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), **close)
