"""Early exit of scored artifacts: what each threshold costs in loss and saves in loops, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

from edgeformer.formats.guarantee import ExitGuarantee
from edgeformer.formats.scores import EarlyExitRow, EvaluationRow
from edgeformer.reporting.canvas import PALETTE, can_draw, drawing
from edgeformer.reporting.columns import Column, Columns
from edgeformer.run import read_run
from edgeformer.tasks.early_exit import SWEEP


def early_exit_table(name: str, rows: Sequence[EarlyExitRow]) -> Table:
    """A line per artifact and threshold; thresholds that let the same ones leave are one line.

    Args:
        name: the run's.
        rows: of one task.
    """
    metric = "accuracy" if any(row.accuracy is not None for row in rows) else "perplexity"
    decimals = 4 if metric == "accuracy" else 2

    def leaving(alike: list[EarlyExitRow]) -> str:
        return ", ".join(f"{loop}: {share:.1%}" for loop, share in alike[0].share.items() if share)

    by: Column[list[EarlyExitRow]] = Column("computed by", lambda alike: alike[0].provider)
    columns: list[Column[list[EarlyExitRow]]] = [
        Column("artifact", lambda alike: alike[0].artifact),
        *([by] if len({(row.artifact, row.provider) for row in rows}) > len({row.artifact for row in rows}) else []),
        Column("set", lambda alike: alike[0].split),
        Column("threshold", _thresholds, number=True),
        Column("mean_loops", lambda alike: f"{alike[0].mean_loops:.2f}", number=True),
        Column(metric, lambda alike: f"{getattr(alike[0], metric):,.{decimals}f}", number=True),
        Column("loss", lambda alike: alike[0].loss, number=True),
        Column("leave_after_loop", leaving),
    ]
    groups = [list(alike) for _, alike in groupby(rows, key=_kind)]
    return Columns(columns).terminal(f"{name}: early exit (loops are a mean, and no time)", groups)


def guarantee_table(name: str, found: Mapping[str, ExitGuarantee]) -> Table:
    """A line per step artifact: what early exit is promised to cost, was seen to cost, and saves.

    Args:
        name: the run's.
        found: artifact's id → what is promised of it.
    """

    def milliseconds(of: str) -> Callable[[tuple[str, ExitGuarantee]], float | None]:
        return lambda one: getattr(one[1].time, of).get("mean")

    columns: list[Column[tuple[str, ExitGuarantee]]] = [
        Column("artifact", lambda one: one[0]),
        Column("held-out", lambda one: f"{one[1].rows:,} of {one[1].split}"),
        Column("thresholds", lambda one: ", ".join(f"{loop}: {value:g}" for loop, value in one[1].thresholds.items())),
        Column("may lose", lambda one: f"{100 * one[1].max_drop:g} points", number=True),
        Column("lost here", lambda one: f"{100 * one[1].drop:.2f}", number=True),
        Column("p", lambda one: f"{one[1].p_value:.3f}", number=True),
        Column("mean loops", lambda one: f"{one[1].mean_loops:.2f}", number=True),
        Column("one text", milliseconds("early_ms"), "ms"),
        Column("all loops", milliseconds("full_ms"), "ms"),
        Column("full graph", milliseconds("full_graph_ms"), "ms"),
    ]
    return Columns(columns).terminal(f"{name}: early exit with a guarantee", [*found.items()])


def _kind(row: EarlyExitRow) -> tuple[object, ...]:
    """The same for rows that one line tells: what was asked for beside the sweep has a line of its own."""
    asked = None if row.threshold in SWEEP else row.threshold
    return row.artifact, row.provider, row.split, row.rule, row.threshold is None, asked, row.share


def _thresholds(rows: Sequence[EarlyExitRow]) -> str:
    first, last = rows[0].threshold, rows[-1].threshold
    if first is None:
        steps = list(dict.fromkeys(f"{value:.2f}" for value in rows[0].thresholds.values()))
        return f"paper: {steps[0]}…{steps[-1]}" if len(steps) > 1 else f"paper: {steps[0]}"
    told = f"{first:g}" if first == last else f"{first:g}…{last:g}"
    return told if rows[0].rule == "confidence" else f"{rows[0].rule} {told}"


def draw_early_exit(run: Path, rows: Sequence[EvaluationRow], early_exit: Sequence[EarlyExitRow]) -> Path | None:
    """Write ``plots/early_exit.png``: the loss, and the task's figure, over the mean number of loops.

    Args:
        run: the run's folder.
        rows: scores of the exits themselves: everyone leaves there.
        early_exit: of the same artifacts and set; not empty.

    Returns:
        The picture's path; None where matplotlib is not installed.
    """
    if not can_draw():
        return None
    metric = "accuracy" if early_exit[0].accuracy is not None else "perplexity"
    artifacts = list(dict.fromkeys(row.artifact for row in early_exit))
    path, leaks = run / "plots" / "early_exit.png", " · LEAKS FUTURE TOKENS" if early_exit[0].leaks else ""
    title = f"{read_run(run).run} · early exit on {early_exit[0].split} ({early_exit[0].n:,}){leaks}"
    with drawing(path, title, 2, (10.5, 4.2)) as axes:
        for artifact, colour in zip(artifacts, PALETTE * len(artifacts), strict=False):
            cosine = [row for row in early_exit if row.artifact == artifact and row.rule == "cosine"]
            swept = [row for row in early_exit if row.artifact == artifact and row.threshold is not None
                     and row.rule == "confidence"]  # fmt: skip
            paper = [row for row in early_exit if row.artifact == artifact and row.threshold is None]
            last = max(map(int, (swept or paper)[0].share))
            exits = sorted((row for row in rows if row.artifact == artifact), key=lambda row: row.exit or last)
            for axis, key in zip(axes, ("loss", metric), strict=True):
                axis.plot([row.mean_loops for row in swept], [getattr(row, key) for row in swept], ".-", color=colour,
                          linewidth=1, label=f"{artifact}: one threshold")  # fmt: skip
                axis.plot([row.mean_loops for row in cosine], [getattr(row, key) for row in cosine], ".:", color=colour,
                          linewidth=1, label=f"{artifact}: by cosine" if cosine else None)  # fmt: skip
                axis.plot([row.exit or last for row in exits], [getattr(row, key) for row in exits], "s", color=colour,
                          markerfacecolor="none", label=f"{artifact}: all leave there")  # fmt: skip
                axis.plot([row.mean_loops for row in paper], [getattr(row, key) for row in paper], "*", color=colour,
                          markersize=13, label=f"{artifact}: the paper's schedule" if paper else None)  # fmt: skip
        for axis, label in zip(axes, ("loss (nats)", metric), strict=True):
            axis.set(xlabel="mean loops", ylabel=label)
        axes[0].legend(frameon=False, fontsize=8)
    return path
