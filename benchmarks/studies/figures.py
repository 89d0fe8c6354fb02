"""Figures of a study: its rows as bubbles, bars or lines, and the curves of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.results import StudyRow, StudyTable
from benchmarks.studies.specification import FigureSpec, measure
from edgeformer.report.canvas import INK, PALETTE, can_draw, drawing

Curves = Mapping[str, Sequence[Sequence[dict[str, Any]]]]
"""Name of a run → the records of each of its seeds, see metrics.jsonl."""


def draw_study(folder: Path, table: StudyTable, figures: Sequence[FigureSpec], curves: Curves) -> list[str]:
    """Write ``figure1.png``… into a folder and return their names; without those for which there are no values."""
    names: list[str] = []
    for number, figure in enumerate(figures, 1):
        path = folder / f"figure{number}.png"
        path.unlink(missing_ok=True)
        needed, width, height = [name for name in (*figure.y, figure.x, figure.size) if name], 7.2, 4.4
        rows = [row for row in table.rows if figure.at is None or str(figure.at) == row.at]
        rows = [row for row in rows if all(row.cell(name).mean is not None for name in needed)]
        series = {
            run: seeds
            for run, seeds in curves.items()
            if any(name in record for records in seeds for record in records for name in figure.y)
        }
        if not can_draw() or not (series if figure.kind == "curves" else rows):
            continue
        counts = sorted({len(seeds) for seeds in series.values()})
        title = "one seed" if counts == [1] else f"a line for each of {max(counts, default=0)} seeds"
        if figure.kind != "curves":
            title = describe_seeds(rows, figure.y)
        elif len(figure.y) > 2:
            width = 3.6
        if figure.kind == "bars":
            height = max(height, 1.2 + 0.45 * len(rows))
        with drawing(path, f"{figure.title} ({title})", len(figure.y), (width * len(figure.y), height)) as axes:
            for axis, y in zip(axes, figure.y, strict=True):
                if figure.kind == "curves":
                    _draw_curves(axis, series, table.rows, y)
                elif figure.kind == "bars":
                    _draw_bars(axis, rows, y)
                else:
                    _draw_points(axis, rows, figure, y)
                for name in ("x", "y"):  # no figure is negative, and an axis that is cut says so
                    low, high = getattr(axis, f"get_{name}lim")()
                    label = getattr(axis, f"get_{name}label")()
                    if low < 0 < high and getattr(axis.dataLim, f"{name}0") >= 0:
                        getattr(axis, f"set_{name}lim")(0, high)
                    elif label and min(low, high) > 0:
                        getattr(axis, f"set_{name}label")(f"{label}\n(axis does not start at 0)")
        names.append(path.name)
    return names


def describe_seeds(rows: Sequence[StudyRow], names: Sequence[str]) -> str:
    """Return how many seeds rows are of and what the whiskers of some figures show, for a title."""
    counts = sorted({max(len(row.keys), 1) for row in rows})
    number = "one seed" if counts[-1] == 1 else f"{'' if len(counts) == 1 else f'{counts[0]} to '}{counts[-1]} seeds"
    if all(row.cells[name].sd is None and row.cells[name].low is not None for row in rows for name in names):
        return f"{number}, whiskers: least and most of the rounds"
    return number if counts[-1] == 1 else f"{number}, whiskers: ± standard deviation"


def _whiskers(row: StudyRow, name: str) -> tuple[tuple[float], tuple[float]] | None:
    """Return the lengths below and above a value: the standard deviation over the seeds, else the range over rounds."""
    cell = row.cells[name]
    if cell.sd is None and cell.low is not None and cell.high is not None and cell.mean is not None:
        return (max(0.0, cell.mean - cell.low),), (max(0.0, cell.high - cell.mean),)
    return ((cell.sd,), (cell.sd,)) if cell.sd else None


def _label(row: StudyRow, text: str = "") -> str:
    parts = [row.label, text, row.group]
    return ", ".join(filter(None, parts)) + (" (leaks: void)" if row.leaks else "")


def _draw_bars(axis: Any, rows: Sequence[StudyRow], y: str) -> None:
    """Draw a bar per row, in one colour per model, with the published value as a tick across."""
    models, has_places = [*dict.fromkeys(row.label for row in rows)], len({row.at for row in rows}) > 1
    for number, row in enumerate(rows):
        cell, colour = row.cells[y], PALETTE[models.index(row.label) % len(PALETTE)]
        bar = axis.barh(number, cell.mean, xerr=_whiskers(row, y), color=colour, height=0.62, error_kw={"capsize": 3})
        axis.bar_label(bar, [f"{cell.mean:,.{measure(y).places}f}"], fontsize=8, padding=5)
        if cell.published is not None:
            axis.plot([cell.published] * 2, [number - 0.36, number + 0.36], color=INK, linewidth=1.6)
    if any(row.cells[y].published is not None for row in rows):
        axis.plot([], [], color=INK, label="published")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_yticks(range(len(rows)), [_label(row, row.at if has_places else "") for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.16)
    axis.set(xlabel=measure(y).heading)


def _draw_points(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """Draw ``y`` against ``x``: a line per run and rule, or a bubble per row whose area is its ``size``."""
    largest = max((row.cell(figure.size).mean or 0.0 for row in rows), default=0.0) if figure.size else 0.0
    runs, labels = [*dict.fromkeys(row.run for row in rows)], set[str]()
    for row in sorted(rows, key=lambda row: row.cells[figure.x].mean or 0.0):
        point, colour = (row.cells[figure.x].mean, row.cells[y].mean), PALETTE[runs.index(row.run) % len(PALETTE)]
        label = _label(row, row.at.rpartition(" ")[0])  # before a threshold the rule of early exit: ``cosine 0.9``
        whiskers = {"xerr": _whiskers(row, figure.x), "yerr": _whiskers(row, y)}
        axis.errorbar(*point, **whiskers, fmt="o", color=colour, capsize=3, label=None if label in labels else label)
        labels.add(label)
        if largest:
            area = 1500 * (row.cell(figure.size).mean or 0.0) / largest + 20
            axis.scatter(*point, s=area, color=colour, alpha=0.35, linewidth=0)
        axis.annotate(row.at, point, xytext=(5, 5), textcoords="offset points", fontsize=7, color=colour)
        if None not in (printed := (row.cell(figure.x).published, row.cell(y).published)):
            axis.plot(*printed, "x", color=colour, markersize=7, label=None if "published" in labels else "published")
            labels.add("published")
    axis.margins(0.2)
    axis.set(xlabel=measure(figure.x).heading, ylabel=measure(y).heading)
    axis.legend(frameon=False, fontsize=8)


def _draw_curves(axis: Any, curves: Curves, rows: Sequence[StudyRow], y: str) -> None:
    """Draw a figure of metrics.jsonl over epochs, a thin line for every seed of a run."""
    for number, (run, seeds) in enumerate(curves.items()):
        label = next((_label(row) for row in rows if row.run == run), run)
        for seed, records in enumerate(seeds):
            points = [(record["epoch"], record[y]) for record in records if y in record]
            look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "linewidth": 1.2, "alpha": 0.75}
            mark = "o-" if len(points) < 15 else "-"  # scores of epochs have marks, losses of steps do not
            if points:
                axis.plot(*zip(*points, strict=True), mark, label=None if seed else label, **look)
    axis.set(xlabel="epoch", ylabel=y.replace("_", " "), xlim=(0, None))
    axis.legend(frameon=False, fontsize=8)
