"""Pictures of a study: what its rows trade, and the curves of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from edgeformer.formats.study import FigureSpec, measure
from edgeformer.formats.study_result import StudyRow, StudyTable
from edgeformer.reporting.canvas import GREY, INK, PALETTE, PAPER, can_draw, drawing

Curves = Mapping[str, Sequence[Sequence[dict[str, Any]]]]
"""Name of a run → the records of each of its seeds, see metrics.jsonl."""


_NAMED = 4
"""Bubbles that can carry their names without covering each other."""
_APART = 0.12, 0.04
"""Shares of the axes by which named points of a line are apart; the names of others would cover them."""
_MARKED = 15
"""Points from which on a curve is a line without marks: scores of epochs have them, losses of steps do not."""
LEAKS = " (leaks: void)"
"""Beside the name of a run that sees what it predicts."""
_WHISKERS: dict[str, Any] = {"ecolor": GREY, "capsize": 3, "elinewidth": 1.2}


def draw_study(folder: Path, table: StudyTable, figures: Sequence[FigureSpec], curves: Curves) -> list[str]:
    """Write ``figure1.png``… into a study's folder.

    Returns:
        Their names; without those for which there is no figure of ours. Empty where matplotlib is not installed.
    """
    names: list[str] = []
    for number, figure in enumerate(figures, 1):
        name = f"figure{number}.png"
        (folder / name).unlink(missing_ok=True)
        if can_draw() and _draw(folder / name, table, figure, curves):
            names.append(name)
    return names


def _draw(path: Path, table: StudyTable, figure: FigureSpec, curves: Curves) -> bool:
    if figure.kind == "curves":
        return _draw_curves(path, table, figure, curves)
    rows = [row for row in table.rows if figure.at is None or str(figure.at) == row.at]
    asked = [*figure.y, *([figure.x] if figure.kind != "bars" else []), *([figure.size] if figure.size else [])]
    rows = [row for row in rows if all(_value(row, name) is not None for name in asked if name)]
    if not rows:
        return False
    draw = {"bubbles": _bubbles, "bars": _bars, "lines": _lines}[figure.kind]
    height = max(4.4, 1.2 + 0.45 * len(rows)) if figure.kind == "bars" else 4.4
    width = 10.2 if figure.kind == "bubbles" and len(rows) > _NAMED else 7.2
    title = f"{figure.title} ({seeds_of(rows, figure.y)})"
    with drawing(path, title, len(figure.y), (width * len(figure.y), height)) as axes:
        for axis, y in zip(axes, figure.y, strict=True):
            draw(axis, rows, figure, y)
            _name_cut_axes(axis)
    return True


def seeds_of(rows: Sequence[StudyRow], names: Sequence[str]) -> str:
    """Return how many seeds rows are of and what the whiskers of some figures show, for a picture's title."""
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


def _name_cut_axes(axis: Any) -> None:
    """Write below the label of an axis that it does not start at zero, where it does not.

    Margins below zero are cut: no figure of a study is negative.
    """
    for name in ("x", "y"):
        low, high = getattr(axis, f"get_{name}lim")()
        if low < 0 < high and getattr(axis.dataLim, f"{name}0") >= 0:
            getattr(axis, f"set_{name}lim")(0, high)
        label = getattr(axis, f"get_{name}label")()
        if label and min(low, high) > 0:
            getattr(axis, f"set_{name}label")(f"{label}\n(axis does not start at 0)")


def _value(row: StudyRow, name: str) -> float | None:
    cell = row.cells.get(name)
    return cell.mean if cell is not None else None


def _numbers(rows: Sequence[StudyRow], name: str) -> list[float]:
    return [value for row in rows if (value := _value(row, name)) is not None]


def _whiskers(rows: Sequence[StudyRow], name: str) -> Any:
    """Lengths of the whiskers below and above each value, [2, rows]; None where no row has any.

    The standard deviation over the seeds; of what has none, such as ratios of times, the range.
    """
    lengths = []
    for row in rows:
        cell = row.cells[name]
        below = above = cell.sd or 0.0
        if cell.sd is None and cell.low is not None and cell.high is not None and cell.mean is not None:
            below, above = max(0.0, cell.mean - cell.low), max(0.0, cell.high - cell.mean)
        lengths.append((below, above))
    return [list(ends) for ends in zip(*lengths, strict=True)] if any(map(any, lengths)) else None


def _named(row: StudyRow, rows: Sequence[StudyRow]) -> str:
    """A row's name: with its part where the rows differ in that, and its group where another one has such a row."""
    name = f"{row.label}, {row.at}" if len({other.at for other in rows}) > 1 else row.label
    name = f"{name}{LEAKS}" if row.leaks else name
    same = any(other.label == row.label and other.group != row.group for other in rows)
    return f"{name}\n({fill(row.group, 40)})" if same and row.group else name


def _colours(rows: Sequence[StudyRow]) -> dict[str, str]:
    runs = list(dict.fromkeys(row.run for row in rows))
    return {run: PALETTE[number % len(PALETTE)] for number, run in enumerate(runs)}


def _bubbles(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """``y`` against ``x``; the area of a bubble is its ``size``, and the paper's own points are crosses."""
    colours, most = _colours(rows), max(_numbers(rows, figure.size), default=1.0) if figure.size else 1.0
    for row in sorted(rows, key=lambda row: _value(row, figure.size) or 0.0, reverse=True):  # small ones on top
        at, colour = (_value(row, figure.x), _value(row, y)), colours[row.run]
        area = 1500 * (_value(row, figure.size) or 0.0) / most + 20 if figure.size else 90
        whiskers = {"xerr": _whiskers([row], figure.x), "yerr": _whiskers([row], y)}
        axis.errorbar(*at, **whiskers, color=colour, capsize=3, linewidth=1)
        axis.scatter(*at, s=area, color=colour, alpha=0.35, linewidth=0)
        axis.scatter(*at, s=9, color=colour)
    _name_bubbles(axis, rows, figure, y)
    known = 0
    for row in rows:
        printed = (_printed(row, figure.x), _printed(row, y))
        if None not in printed:
            known += 1
            axis.plot(*printed, "x", color=colours[row.run], markersize=7)
    if known:
        axis.plot([], [], "x", color=GREY, label="published")
    if known or len(rows) > _NAMED:
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "labelspacing": 0.8}
        axis.legend(frameon=False, fontsize=8, **(beside if len(rows) > _NAMED else {"loc": "lower right"}))
    axis.margins(0.28)
    best = "higher is better" if measure(y).higher_is_better else "lower is better"
    axis.set(xlabel=f"{measure(figure.x).heading} (lower is better)", ylabel=f"{measure(y).heading} ({best})")
    axis.grid(axis="x", alpha=0.3)


def _printed(row: StudyRow, name: str) -> float | None:
    cell = row.cells.get(name)
    return cell.published if cell is not None else None


def _name_bubbles(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """Few bubbles carry their names, above and below in turn; more carry numbers, which are named beside the axes."""
    ordered = sorted(rows, key=lambda row: (_value(row, figure.x) or 0.0, _value(row, y) or 0.0))
    many, colours = len(rows) > _NAMED, _colours(rows)
    for number, row in enumerate(ordered, 1):
        size = f"\n{_value(row, figure.size):,.1f} {measure(figure.size).heading}" if figure.size else ""
        name, at = _named(row, rows) + size, (_value(row, figure.x), _value(row, y))
        if many:
            axis.annotate(str(number), at, (5, 4), textcoords="offset points", fontsize=8, color=INK)
            axis.plot([], [], "o", color=colours[row.run], label=f"{number}  {name}")
            continue
        above = number % 2 == 1
        look: dict[str, Any] = {"ha": "center", "va": "bottom" if above else "top", "fontsize": 8, "color": INK}
        axis.annotate(name, at, (0, 20 if above else -20), textcoords="offset points", **look)


def _bars(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """A bar per row, with what was published as a tick across."""
    places, models = measure(y).places, [*dict.fromkeys(row.label for row in rows)]
    names = [_named(row, rows) for row in rows]
    values = _numbers(rows, y)
    # One colour for a model in all groups: that is what the eye compares.
    own: dict[str, Any] = {"color": [PALETTE[models.index(row.label) % len(PALETTE)] for row in rows], "height": 0.62}
    places_of = range(len(rows))  # names alone would put rows of one name onto each other
    bars = axis.barh(places_of, values, xerr=_whiskers(rows, y), error_kw=_WHISKERS, **own)
    paper: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.0}  # a published tick may lie there
    axis.bar_label(bars, [f"{value:,.{places}f}" for value in values], fontsize=8, padding=5, bbox=paper)
    printed = [
        (number, row.cells[y].published) for number, row in enumerate(rows) if row.cells[y].published is not None
    ]
    for number, value in printed:
        axis.plot([value, value], [number - 0.36, number + 0.36], color=INK, linewidth=1.6)
    if printed:
        axis.plot([], [], color=INK, linewidth=1.6, label="published")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_yticks(places_of, names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.16)
    axis.set(xlabel=measure(y).heading)
    if max(values, default=0.0) >= 1e5:  # bytes, parameters: 20 M, not 0.2 and an exponent in a corner
        from matplotlib.ticker import EngFormatter

        axis.xaxis.set_major_formatter(EngFormatter())
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", alpha=0.4)


def _kind(row: StudyRow) -> str:
    """The words before a number: ``cosine 0.9`` and ``cosine 0.95`` make one line, ``0.9`` belongs to another."""
    return row.at.rpartition(" ")[0]


def _lines(axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, y: str) -> None:
    """A line per run and kind of row over ``x``, its points named by what they are."""
    colours = _colours(rows)
    series = dict.fromkeys((row.run, _kind(row)) for row in rows)
    for run, kind in series:
        colour, told = colours[run], f", {kind}" if kind else ""
        own = [row for row in rows if (row.run, _kind(row)) == (run, kind)]
        own.sort(key=lambda row: _value(row, figure.x) or 0.0)
        line = "o:" if kind else "o-"
        label = own[0].label + told + (LEAKS if own[0].leaks else "")
        whiskers = {"xerr": _whiskers(own, figure.x), "yerr": _whiskers(own, y)}
        points = _numbers(own, figure.x), _numbers(own, y)
        axis.errorbar(*points, **whiskers, fmt=line, color=colour, label=label, capsize=3, elinewidth=0.8)
    axis.set(xlabel=measure(figure.x).heading, ylabel=measure(y).heading)
    axis.margins(0.1)
    axis.legend(frameon=False, fontsize=8)
    axis.autoscale_view()
    taken: list[Any] = []
    for row in sorted(rows, key=lambda row: _value(row, y) or 0.0):
        at = (_value(row, figure.x), _value(row, y))
        across, up = place = axis.transLimits.transform(at)  # as shares of the axes
        if any(abs(across - x) < _APART[0] and abs(up - y_) < _APART[1] for x, y_ in taken):
            continue
        taken.append(place)
        look: dict[str, Any] = {"ha": "left", "fontsize": 7, "color": colours[row.run]}
        axis.annotate(row.at, at, xytext=(5, 5), textcoords="offset points", **look)  # beside the whiskers


def _draw_curves(path: Path, table: StudyTable, figure: FigureSpec, curves: Curves) -> bool:
    """Draw figures of metrics.jsonl over epochs, a thin line for every seed of a run: per step where there are such."""
    drawn = {
        run: seeds
        for run, seeds in curves.items()
        if any(name in record for records in seeds for record in records for name in figure.y)
    }
    if not drawn:
        return False
    from matplotlib.ticker import MaxNLocator

    width = 6.0 if len(figure.y) < 3 else 3.6
    seeds = sorted({len(own) for own in drawn.values()})
    title = f"{figure.title} ({'one seed' if seeds == [1] else f'a line for each of {seeds[-1]} seeds'})"
    with drawing(path, title, len(figure.y), (width * len(figure.y), 4.2)) as axes:
        for axis, y in zip(axes, figure.y, strict=True):
            for number, (run, own) in enumerate(drawn.items()):
                for place, records in enumerate(own):
                    points = [(record["epoch"], record[y]) for record in records if y in record]
                    if not points:
                        continue
                    mark = "o-" if len(points) < _MARKED else "-"
                    look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "linewidth": 1.2, "markersize": 4}
                    label = _curve_name(run, drawn, table) if place == 0 else None
                    axis.plot(*zip(*points, strict=True), mark, label=label, alpha=0.75, **look)
            axis.set(xlabel="epoch", ylabel=y.replace("_", " "), xlim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.legend(frameon=False, fontsize=8)
            _name_cut_axes(axis)
    return True


def _curve_name(run: str, others: Curves, table: StudyTable) -> str:
    """Label of a run, with its group where another run has the same label, and the mark of one that leaks."""
    rows = {name: next((row for row in table.rows if row.run == name), None) for name in others}
    own = rows[run]
    if own is None:
        return run
    several = sum(row is not None and row.label == own.label for row in rows.values()) > 1
    return f"{own.label}{f' ({own.group or run})' if several else ''}{LEAKS if own.leaks else ''}"
