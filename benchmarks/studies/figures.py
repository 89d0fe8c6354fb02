"""Figures of a study: its rows as bubbles, bars or lines, and the curves of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.studies.results import StudyRow, StudyTable
from benchmarks.studies.specification import FigureSpec, measure
from edgeformer.report.canvas import GREY, INK, PALETTE, PAPER, can_draw, drawing

Curves = Mapping[str, Sequence[Sequence[dict[str, Any]]]]
"""Name of a run → the records of each of its seeds, see metrics.jsonl."""
_MOST_NAMED = 4
"""Bubbles that can carry their names without covering each other."""
_APART = 0.12, 0.04
"""Shares of the axes by which the named points of a line are apart."""
LEAKS = " (leaks: void)"


def draw_study(folder: Path, table: StudyTable, figures: Sequence[FigureSpec], curves: Curves) -> list[str]:
    """Write ``figure1.png``… into a folder and return their names; without those for which there are no values."""
    names: list[str] = []
    for number, figure in enumerate(figures, 1):
        path = folder / f"figure{number}.png"
        path.unlink(missing_ok=True)
        if not can_draw():
            continue
        if figure.kind == "curves":
            subset = {
                run: seeds
                for run, seeds in curves.items()
                if any(name in record for records in seeds for record in records for name in figure.y)
            }
            counts = sorted({len(seeds) for seeds in subset.values()})
            title = "one seed" if counts == [1] else f"a line for each of {max(counts, default=0)} seeds"
            width, height, rows = 6.0 if len(figure.y) < 3 else 3.6, 4.2, table.rows
        else:
            needed = [name for name in (*figure.y, figure.x, figure.size) if name]
            rows = tuple(row for row in table.rows if figure.at is None or str(figure.at) == row.at)
            rows = tuple(row for row in rows if all(row.cell(name).mean is not None for name in needed))
            subset, title = {}, describe_seeds(rows, figure.y) if rows else ""
            height = max(4.4, 1.2 + 0.45 * len(rows)) if figure.kind == "bars" else 4.4
            width = 10.2 if figure.kind == "bubbles" and len(rows) > _MOST_NAMED else 7.2
        if not subset and (figure.kind == "curves" or not rows):
            continue
        with drawing(path, f"{figure.title} ({title})", len(figure.y), (width * len(figure.y), height)) as axes:
            for axis, y in zip(axes, figure.y, strict=True):
                if figure.kind == "curves":
                    _curves(axis, subset, rows, y)
                else:
                    {"bubbles": _bubbles, "bars": _bars, "lines": _lines}[figure.kind](axis, rows, figure, y)
                _mark_cut_axes(axis)
        names.append(path.name)
    return names


def describe_seeds(rows: Sequence[StudyRow], names: Sequence[str]) -> str:
    """Return how many seeds rows are of and what the whiskers of some figures show, for a title."""
    counts = sorted({max(len(row.keys), 1) for row in rows})
    cells = [row.cells[name] for row in rows for name in names]
    if all(cell.sd is None and cell.low is not None for cell in cells):
        number = "one seed" if counts == [1] else f"{counts[-1]} seeds"
        return f"{number}, whiskers: least and most of the rounds"
    if counts == [1]:
        return "one seed"
    if counts[0] == 1:
        return f"one seed, or up to {counts[-1]} with whiskers of ± standard deviation"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seeds, whiskers: ± standard deviation"


def _mark_cut_axes(axis: Any) -> None:
    """Write on the label of an axis that it does not start at zero; cut margins below zero: no figure is negative."""
    for name in ("x", "y"):
        low, high = getattr(axis, f"get_{name}lim")()
        if low < 0 < high and getattr(axis.dataLim, f"{name}0") >= 0:
            getattr(axis, f"set_{name}lim")(0, high)
        label = getattr(axis, f"get_{name}label")()
        if label and min(low, high) > 0:
            getattr(axis, f"set_{name}label")(f"{label}\n(axis does not start at 0)")


def _value(row: StudyRow, name: str) -> float:
    return row.cell(name).mean or 0.0


def _whiskers(rows: Sequence[StudyRow], name: str) -> Any:
    """Return the lengths of the whiskers below and above each value, [2, rows]; None where no row has any.

    The standard deviation over the seeds, or where there is none, as for ratios of times, the range.
    """
    lengths = []
    for row in rows:
        cell = row.cells[name]
        below = above = cell.sd or 0.0
        if cell.sd is None and cell.low is not None and cell.high is not None and cell.mean is not None:
            below, above = max(0.0, cell.mean - cell.low), max(0.0, cell.high - cell.mean)
        lengths.append((below, above))
    return [list(ends) for ends in zip(*lengths, strict=True)] if any(map(any, lengths)) else None


def _label(row: StudyRow, rows: Sequence[StudyRow]) -> str:
    """Return a row's label, with its part and its group where other rows differ in nothing else."""
    name = f"{row.label}, {row.at}" if len({other.at for other in rows}) > 1 else row.label
    name = f"{name}{LEAKS}" if row.leaks else name
    same = any(other.label == row.label and other.group != row.group for other in rows)
    return f"{name}\n({fill(row.group, 40)})" if same and row.group else name


def _colours(rows: Sequence[StudyRow]) -> dict[str, str]:
    return {run: PALETTE[n % len(PALETTE)] for n, run in enumerate(dict.fromkeys(row.run for row in rows))}


def _bubbles(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """Draw ``y`` against ``x``; the area of a bubble is its ``size``, and published points are crosses.

    Few bubbles carry their names, above and below in turn; more carry numbers, whose names are in the legend.
    """
    colours, many = _colours(rows), len(rows) > _MOST_NAMED
    largest = max((_value(row, figure.size) for row in rows), default=1.0) if figure.size else 1.0
    for row in sorted(rows, key=lambda row: _value(row, figure.size), reverse=True):  # small ones on top
        point, colour = (_value(row, figure.x), _value(row, y)), colours[row.run]
        area = 1500 * _value(row, figure.size) / largest + 20 if figure.size else 90
        whiskers = {"xerr": _whiskers([row], figure.x), "yerr": _whiskers([row], y)}
        axis.errorbar(*point, **whiskers, color=colour, capsize=3, linewidth=1)
        axis.scatter(*point, s=area, color=colour, alpha=0.35, linewidth=0)
        axis.scatter(*point, s=9, color=colour)
    for number, row in enumerate(sorted(rows, key=lambda row: (_value(row, figure.x), _value(row, y))), 1):
        size = f"\n{_value(row, figure.size):,.1f} {measure(figure.size).heading}" if figure.size else ""
        name, point = _label(row, rows) + size, (_value(row, figure.x), _value(row, y))
        if many:
            axis.annotate(str(number), point, (5, 4), textcoords="offset points", fontsize=8, color=INK)
            axis.plot([], [], "o", color=colours[row.run], label=f"{number}  {name}")
            continue
        offset, va = (20, "bottom") if number % 2 == 1 else (-20, "top")
        look: dict[str, Any] = {"ha": "center", "va": va, "fontsize": 8, "color": INK}
        axis.annotate(name, point, (0, offset), textcoords="offset points", **look)
    printed = [(row, row.cell(figure.x).published, row.cell(y).published) for row in rows]
    printed = [point for point in printed if None not in point]
    for row, x_printed, y_printed in printed:
        axis.plot(x_printed, y_printed, "x", color=colours[row.run], markersize=7)
    if printed:
        axis.plot([], [], "x", color=GREY, label="published")
    if printed or many:
        legend: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "labelspacing": 0.8}
        axis.legend(frameon=False, fontsize=8, **(legend if many else {"loc": "lower right"}))
    axis.margins(0.28)
    best = "higher is better" if measure(y).higher_is_better else "lower is better"
    axis.set(xlabel=f"{measure(figure.x).heading} (lower is better)", ylabel=f"{measure(y).heading} ({best})")
    axis.grid(axis="x", alpha=0.3)


def _bars(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """Draw a bar per row, in one colour per model in all groups, with the published value as a tick across."""
    values, models = [_value(row, y) for row in rows], [*dict.fromkeys(row.label for row in rows)]
    look: dict[str, Any] = {"color": [PALETTE[models.index(row.label) % len(PALETTE)] for row in rows], "height": 0.62}
    look["error_kw"] = {"ecolor": GREY, "capsize": 3, "elinewidth": 1.2}
    positions = range(len(rows))  # names alone would put rows of one name onto each other
    bars = axis.barh(positions, values, xerr=_whiskers(rows, y), **look)
    paper: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.0}  # over a published tick
    axis.bar_label(bars, [f"{value:,.{measure(y).places}f}" for value in values], fontsize=8, padding=5, bbox=paper)
    printed = [(n, row.cells[y].published) for n, row in enumerate(rows) if row.cells[y].published is not None]
    for number, value in printed:
        axis.plot([value, value], [number - 0.36, number + 0.36], color=INK, linewidth=1.6)
    if printed:
        axis.plot([], [], color=INK, linewidth=1.6, label="published")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_yticks(positions, [_label(row, rows) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.16)
    axis.set(xlabel=measure(y).heading)
    if max(values, default=0.0) >= 1e5:  # bytes, parameters: 20 M, not 0.2 and an exponent in a corner
        from matplotlib.ticker import EngFormatter

        axis.xaxis.set_major_formatter(EngFormatter())
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", alpha=0.4)


def _lines(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """Draw a line per run and rule (the words before a number: ``cosine 0.9``) over ``x``, its points named."""
    colours = _colours(rows)
    for run, rule in dict.fromkeys((row.run, row.at.rpartition(" ")[0]) for row in rows):
        series = [row for row in rows if (row.run, row.at.rpartition(" ")[0]) == (run, rule)]
        series.sort(key=lambda row: _value(row, figure.x))
        label = series[0].label + (f", {rule}" if rule else "") + (LEAKS if series[0].leaks else "")
        look: dict[str, Any] = {"fmt": "o:" if rule else "o-", "color": colours[run], "capsize": 3, "elinewidth": 0.8}
        look |= {"xerr": _whiskers(series, figure.x), "yerr": _whiskers(series, y), "label": label}
        axis.errorbar([_value(row, figure.x) for row in series], [_value(row, y) for row in series], **look)
    axis.set(xlabel=measure(figure.x).heading, ylabel=measure(y).heading)
    axis.margins(0.1)
    axis.legend(frameon=False, fontsize=8)
    axis.autoscale_view()
    labelled: list[Any] = []
    for row in sorted(rows, key=lambda row: _value(row, y)):
        point = (_value(row, figure.x), _value(row, y))
        across, up = axis.transLimits.transform(point)  # as shares of the axes
        if any(abs(across - x) < _APART[0] and abs(up - y_) < _APART[1] for x, y_ in labelled):
            continue
        labelled.append((across, up))
        look = {"ha": "left", "fontsize": 7, "color": colours[row.run]}
        axis.annotate(row.at, point, xytext=(5, 5), textcoords="offset points", **look)  # beside the whiskers


def _curves(axis: Any, curves: Curves, rows: Sequence[StudyRow], y: str) -> None:
    """Draw a figure of metrics.jsonl over epochs, a thin line for every seed of a run."""
    from matplotlib.ticker import MaxNLocator

    first_rows = {run: next((row for row in rows if row.run == run), None) for run in curves}
    labels = [row.label for row in first_rows.values() if row is not None]
    for number, (run, seeds) in enumerate(curves.items()):
        row = first_rows[run]
        name = run if row is None else row.label
        if row is not None and labels.count(row.label) > 1:
            name += f" ({row.group or run})"
        if row is not None and row.leaks:
            name += LEAKS
        for place, records in enumerate(seeds):
            points = [(record["epoch"], record[y]) for record in records if y in record]
            if not points:
                continue
            mark = "o-" if len(points) < 15 else "-"  # scores of epochs have marks, losses of steps do not
            look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "linewidth": 1.2, "markersize": 4}
            axis.plot(*zip(*points, strict=True), mark, label=name if place == 0 else None, alpha=0.75, **look)
    axis.set(xlabel="epoch", ylabel=y.replace("_", " "), xlim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=8)
