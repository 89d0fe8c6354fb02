"""Figures of a study: its rows as dots, bubbles or lines, and the curves of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from scipy.stats import binomtest

from benchmarks.studies.render import cell_text
from benchmarks.studies.results import StudyRow, StudyTable
from benchmarks.studies.specification import FigureSpec, measure
from edgeformer.report.canvas import FAINT, GREY, INK, PALETTE, PAPER, can_draw, drawing

Curves = Mapping[str, Sequence[Sequence[dict[str, Any]]]]
"""Name of a run → the records of each of its seeds, see metrics.jsonl."""
Blocks = Mapping[str, Mapping[str, StudyRow]]
"""Heading → name → row."""
Label = tuple[str, tuple[float, float], float]
"""Text, the point that it names, and the radius of the mark there in points."""
_CURVES = {
    "loss": "training loss", "loss_final": "training loss after all loops", "val_loss": "validation loss",
    "val_accuracy": "validation accuracy",
    "early_exit_loss": "loss with early exit", "early_exit_mean_loops": "mean loops per token",
}  # fmt: skip
"""Figure of metrics.jsonl → its name; the loss of an exit is named by its loop."""


def figure_titles(figures: Sequence[FigureSpec]) -> dict[str, str]:
    """Return the title of each figure by the name of its file."""
    return {f"figure{number}.png": figure.title for number, figure in enumerate(figures, 1)}


def draw_study(folder: Path, table: StudyTable, figures: Sequence[FigureSpec], curves: Curves) -> list[str]:
    """Write ``figure1.png``… into a folder and return their names; without those for which there are no values."""
    names: list[str] = []
    for number, figure in enumerate(figures, 1):
        path = folder / f"figure{number}.png"
        path.unlink(missing_ok=True)
        needed = [name for name in (*figure.y, figure.x, figure.size) if name]
        rows = [row for row in table.rows if figure.at is None or str(figure.at) == row.at]
        if figure.kind == "curves":
            first_rows = {row.run: row for row in reversed(rows) if any(_lines(curves, row, y) for y in figure.y)}
            rows = [row for row in rows if first_rows.get(row.run) is row]
        else:
            rows = [row for row in rows if all(row.cell(name).mean is not None for name in needed)]
        if not can_draw() or not rows:
            continue
        parts: dict[str, list[StudyRow]] = {}
        for row in rows:
            parts.setdefault(getattr(row, figure.panels) if figure.panels else "", []).append(row)
        panels = [(part, figure.y) for part in parts.values()] if figure.panels else [(rows, (y,)) for y in figure.y]
        colours = {
            label: PALETTE[n % len(PALETTE)] for n, label in enumerate(dict.fromkeys(r.label for r in table.rows))
        }
        width, height = (7.2 if len(panels) == 1 else 4.8 * len(panels)), 4.8
        blocks = [_blocks(part, table) for part, _ in panels]
        if figure.kind == "dots":
            height = 1.5 + 0.25 * max(len(part) + len(heads) for (part, _), heads in zip(panels, blocks, strict=True))
            width = 2.6 + 3.6 * len(panels)
        labels: dict[Any, list[Label]] = {}
        is_shared = figure.panels and not any(row.leaks for row in rows)  # void scores have a scale of their own
        with drawing(path, f"{figure.title} ({_describe(rows, figure, curves)})", len(panels), (width, height)) as axes:
            for axis in axes[1:] if is_shared else ():
                axis.sharex(axes[0])
                if figure.kind != "dots":
                    axis.sharey(axes[0])
            for axis, (part, ys), heads in zip(axes, panels, blocks, strict=True):
                if figure.panels:
                    axis.set_title(fill(part[0].group if figure.panels == "group" else _label(part[0]), 44), fontsize=9)
                if figure.kind == "curves":
                    _draw_curves(axis, part, figure, ys, curves, colours)
                elif figure.kind == "dots":
                    _draw_dots(axis, heads, ys[0], colours)
                    is_same = [[*block] for block in heads.values()] == [[*block] for block in blocks[0].values()]
                    axis.tick_params(labelleft=axis is axes[0] or not is_same)
                else:
                    labels[axis] = _draw_points(axis, heads, figure, ys[0], table, colours)
            for axis in axes[1:] if is_shared and figure.kind != "dots" else ():
                axis.label_outer()
            _finish(axes, ncols=max(1, int(width / 2.8)))
            axes[0].figure.draw_without_rendering()
            for axis, texts in labels.items():
                place_labels(axis, texts, on_lines=figure.kind == "lines")
        names.append(path.name)
    return names


def _finish(axes: Sequence[Any], ncols: int) -> None:
    """Write large numbers with a prefix, say which axes do not start at 0, and put one legend below the panels."""
    from matplotlib.ticker import EngFormatter

    legend: dict[str, Any] = {}
    for axis in axes:
        for name, line in (("x", axis.xaxis), ("y", axis.yaxis)):
            low, high = line.get_view_interval()
            label = line.get_label().get_text()
            if label == "epoch" or (low < 0 < high and getattr(axis.dataLim, f"{name}0") >= 0):  # no figure is negative
                getattr(axis, f"set_{name}lim")(0, high)
            elif label and min(low, high) > 0:
                line.set_label_text(f"{label}\n(axis does not start at 0)")
            if label and high >= 1e5:
                line.set_major_formatter(EngFormatter())
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    if legend:
        look: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 8, "ncols": ncols}
        axes[0].figure.legend(legend.values(), legend.keys(), **look)


def _describe(rows: Sequence[StudyRow], figure: FigureSpec, curves: Curves) -> str:
    """Return how many seeds a figure shows."""
    counts = sorted({len(curves[row.run]) if figure.kind == "curves" else max(len(row.keys), 1) for row in rows})
    seeds = "one seed" if counts[-1] == 1 else f"{'' if len(counts) == 1 else f'{counts[0]} to '}{counts[-1]} seeds"
    return f"a line for each of {seeds}" if figure.kind == "curves" and counts[-1] > 1 else seeds


def _whiskers(row: StudyRow, name: str) -> tuple[float, float, str] | None:
    """Return the lengths below and above a value, and what they show; None: there is no spread."""
    cell, count = row.cells[name], row.cell("rows").mean
    value = cell.mean or 0.0
    if name == "accuracy" and count:
        interval = binomtest(round(value * count), round(count)).proportion_ci(method="wilson")
        return max(0.0, value - interval.low), max(0.0, interval.high - value), "95% interval over the rows of the set"
    if cell.sd is None and cell.low is not None and cell.high is not None:
        return max(0.0, value - cell.low), max(0.0, cell.high - value), "least and most of the rounds"
    return (cell.sd, cell.sd, "± standard deviation over the seeds") if cell.sd else None


def _lengths(row: StudyRow, name: str) -> list[list[float]] | None:
    whiskers = _whiskers(row, name)
    return [[whiskers[0]], [whiskers[1]]] if whiskers is not None else None


def _axis_label(name: str, rows: Sequence[StudyRow]) -> str:
    """Return the label of an axis: the figure with its unit, and what the whiskers are."""
    texts = dict.fromkeys(whiskers[2] for row in rows if (whiskers := _whiskers(row, name)) is not None)
    return "\n".join([measure(name).axis or measure(name).heading, *(f"whiskers: {text}" for text in texts)])


def _label(row: StudyRow) -> str:
    return row.label + (" (leaks: void)" if row.leaks else "")


def _place(row: StudyRow, table: StudyTable) -> str:
    return f"loop {row.at}" if table.kind == "exits" else row.at.upper() if table.kind == "artifacts" else row.at


def _blocks(rows: Sequence[StudyRow], table: StudyTable) -> Blocks:
    """Name the rows of a panel: those of a group, of a test set or of a model stand under a heading."""
    several = {name for name in ("group", "label", "at") if len({getattr(row, name) for row in rows}) > 1}
    heading = "at" if table.kind == "tests" else "label"
    heading = "group" if "group" in several else heading if {"label", "at"} <= several else ""
    blocks: dict[str, dict[str, StudyRow]] = {}
    for row in rows:
        parts = [_label(row)] if heading != "label" and ("label" in several or "at" not in several) else []
        parts += [_place(row, table)] if heading != "at" and "at" in several else []
        title = _label(row) if heading == "label" else getattr(row, heading) if heading else ""
        blocks.setdefault(title, {})[", ".join(parts)] = row
    return blocks


def _draw_dots(axis: Any, blocks: Blocks, y: str, colours: Mapping[str, str]) -> None:
    """Draw a dot with its whiskers for each row, one below the other; the value stands in the right margin."""
    ticks: dict[int, str] = {}
    line, across = -1, axis.get_yaxis_transform()
    for heading, block in blocks.items():
        if heading:
            line += 1
            axis.text(0.01, line, heading, transform=across, fontsize=8, fontweight="bold", va="center")
        for name, row in block.items():
            line, cell = line + 1, row.cells[y]
            ticks[line] = name
            if cell.values:
                axis.plot(cell.values, [line + 0.3] * len(cell.values), ".", color=GREY, markersize=4, label="a seed")
            look: dict[str, Any] = {"fmt": "o", "color": colours[row.label], "capsize": 3, "markersize": 5}
            axis.errorbar(cell.mean, line, xerr=_lengths(row, y), **look)
            if cell.published is not None:
                axis.plot(cell.published, line, "D", color=INK, fillstyle="none", markersize=6, label="paper")
            axis.text(1.02, line, cell_text(row, y), transform=across, fontsize=8, va="center")
    axis.set_yticks([*ticks], [*ticks.values()], fontsize=8)
    axis.set_ylim(line + 0.5, -0.5)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)
    axis.margins(x=0.08)
    axis.set_xlabel(_axis_label(y, [row for block in blocks.values() for row in block.values()]))


def _draw_points(
    axis: Any, blocks: Blocks, figure: FigureSpec, y: str, table: StudyTable, colours: Mapping[str, str]
) -> list[Label]:
    """Draw ``y`` against ``x``: a line per run and rule, or a bubble per row whose area is its ``size``."""
    names = {(row.run, row.at): name for block in blocks.values() for name, row in block.items()}
    rows = [row for block in blocks.values() for row in block.values()]
    largest = max(row.cell(figure.size).mean or 0.0 for row in rows)
    series: dict[str, tuple[dict[str, str], list[tuple[float, float]]]] = {}
    labels: list[Label] = []
    for row in sorted(rows, key=lambda row: row.cells[figure.x].mean or 0.0):
        point, colour = (row.cells[figure.x].mean or 0.0, row.cells[y].mean or 0.0), colours[row.label]
        lengths = {"xerr": _lengths(row, figure.x), "yerr": _lengths(row, y)}
        axis.errorbar(*point, **lengths, fmt="o", color=colour, capsize=3, markersize=4, elinewidth=0.8)
        if figure.kind == "lines":
            rule = row.at.rpartition(" ")[0]  # before a threshold the rule of early exit: ``cosine 0.9``
            name, look = ", ".join(filter(None, (_label(row), rule))), {"fmt": ":" if rule else "-", "color": colour}
            series.setdefault(name, (look, []))[1].append(point)
            labels.append((_place(row, table), point, 2.0))
            continue
        area = 1500 * (row.cell(figure.size).mean or 0.0) / largest if largest else 40
        axis.scatter(*point, s=area, color=colour, alpha=0.35, linewidth=0)
        size = f"\n{cell_text(row, figure.size)} {measure(figure.size).heading}" if figure.size else ""
        labels.append((names[row.run, row.at] + size, point, area**0.5 / 2))
    for name, (look, points) in series.items():
        axis.errorbar(*zip(*points, strict=True), **look, label=name)
    axis.margins(*((0.35, 0.25) if figure.kind == "bubbles" else (0.1, 0.1)))
    axis.set(xlabel=_axis_label(figure.x, rows), ylabel=_axis_label(y, rows))
    return labels


def place_labels(axis: Any, labels: Sequence[Label], *, on_lines: bool = False) -> None:
    """Write each label on the first side of its mark where it covers no other label and, if possible, no mark.

    Beside lines, labels stand above them only, and one without space is left out. Call it after
    ``draw_without_rendering``: positions must be final.
    """
    from matplotlib.transforms import Bbox

    marks, placed = list[Bbox](), list[Bbox]()
    for _, point, radius in labels:
        (x, y), length = axis.transData.transform(point), radius * axis.figure.dpi / 72
        marks.append(Bbox.from_extents(x - length, y - length, x + length, y + length))
    look = {"textcoords": "offset points", "fontsize": 8, "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}}
    for text, point, radius in labels:
        away = radius + 3
        sides = [(away, 0, "left", "center"), (-away, 0, "right", "center"), (0, away, "center", "bottom")]
        sides = [(4, 4, "left", "bottom")] if on_lines else [*sides, (0, -away, "center", "top")]
        places = [(marks, side) for side in sides] + ([] if on_lines else [([], side) for side in sides[::-1]])
        for avoided, (x, y, ha, va) in places:
            label = axis.annotate(text, point, (x, y), ha=ha, va=va, zorder=4, **look)
            box = label.get_window_extent().padded(2)
            if not box.count_overlaps([*avoided, *placed]) and box.x0 > axis.bbox.x0 and box.x1 < axis.bbox.x1:
                placed.append(box)
                break
            label.remove()


def _lines(curves: Curves, row: StudyRow, y: str) -> list[list[tuple[float, float]]]:
    """Return the points of each seed of a run over epochs; a single point is no line."""
    lines = [[(record["epoch"], record[y]) for record in records if y in record] for records in curves.get(row.run, ())]
    return [points for points in lines if len(points) > 1]


def _curve_name(y: str) -> str:
    kind, _, loop = y.partition("_exit")
    return f"{_CURVES[kind]} after loop {loop}" if loop.isdigit() else _CURVES.get(y, y.replace("_", " "))


def _draw_curves(
    axis: Any, rows: Sequence[StudyRow], figure: FigureSpec, ys: Sequence[str], curves: Curves, colours: Any
) -> None:
    """Draw figures of metrics.jsonl over epochs, a thin line for every seed of a run."""
    for row in rows:
        for number, y in enumerate(ys):
            for points in _lines(curves, row, y):
                colour = colours[row.label] if len(ys) == 1 else PALETTE[number]
                mark = "o-" if len(points) < 15 else "-"  # scores of epochs have marks, losses of steps do not
                look: dict[str, Any] = {"color": colour, "linewidth": 1.2, "markersize": 4, "alpha": 0.75}
                axis.plot(
                    *zip(*points, strict=True), mark, label=_label(row) if len(ys) == 1 else _curve_name(y), **look
                )
    name = _curve_name(ys[0]) if len(ys) == 1 else "loss"
    axis.set(xlabel="epoch", ylabel=f"{name}, {figure.unit}" if "loss" in name else name)
