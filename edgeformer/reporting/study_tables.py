"""A study's table for the terminal, Markdown and CSV, and the page that says how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.table import Table
from rich.text import Text

from edgeformer.formats.escaping import markdown, markdown_line
from edgeformer.formats.study import measure
from edgeformer.formats.study_result import Cell, StudyRow, StudyTable
from edgeformer.reporting.columns import DASH, Column, Columns

_NO_CELL = Cell()
_ASIDE = ("parameters", "megabytes", "rows", "minutes")
"""Figures that a narrow terminal does without before any score."""


def ours(row: StudyRow, name: str) -> str:
    """A figure for people: mean ± standard deviation over the seeds, or the range over the rounds."""
    cell, places = row.cells.get(name, _NO_CELL), measure(name).places
    if cell.mean is None:
        return DASH
    text = f"{cell.mean:,.{places}f}"
    if cell.low is not None and cell.high is not None:
        return f"{text} ({cell.low:.{places}f}–{cell.high:.{places}f})"
    return text if not cell.sd or not places else f"{text} ± {cell.sd:.{places}f}"


def _mean(row: StudyRow, name: str) -> str:
    """Ours without its spread."""
    mean = row.cells.get(name, _NO_CELL).mean
    return DASH if mean is None else f"{mean:,.{measure(name).places}f}"


def _published(row: StudyRow, name: str) -> str:
    value = row.cells.get(name, _NO_CELL).published
    return DASH if value is None else f"{value:,.{measure(name).places}f}"


def _difference(row: StudyRow, name: str) -> str:
    value = row.cells.get(name, _NO_CELL).difference
    return DASH if value is None else f"{value:+,.{measure(name).places}f}"


def _of(row: StudyRow, name: str, what: str) -> float | None:
    found: float | None = getattr(row.cells.get(name, _NO_CELL), what)
    return found


def _seeds(row: StudyRow) -> int:
    return len(row.keys)


def study_columns(table: StudyTable) -> Columns[StudyRow]:
    """Labels, then each figure: ours, and where anything was published also that and the difference.

    A narrow terminal does first without differences, then seeds and spreads, then what follows the first two figures.
    """
    columns: list[Column[StudyRow]] = [Column("run", lambda row: row.label, heading="", flows=True)]
    columns.append(Column("at", lambda row: row.at, heading=""))
    scores = [name for name in table.columns if name not in _ASIDE]
    for name in table.columns:
        heading, rest = measure(name).heading, 0 if name in scores[:2] else 3
        cell, text, mean = partial(_of, name=name, what="mean"), partial(ours, name=name), partial(_mean, name=name)
        columns.append(
            Column(name, cell, heading=heading, text=text, number=True, narrow=mean, leaves=rest + (rest > 0))
        )
        if any(row.cells.get(name, _NO_CELL).published is not None for row in table.rows):
            of_paper, change = partial(_of, name=name, what="published"), partial(_of, name=name, what="difference")
            columns.append(Column(f"{name}_published", of_paper, heading="paper",
                                  text=partial(_published, name=name), number=True, leaves=rest))  # fmt: skip
            columns.append(Column(f"{name}_difference", change, heading="Δ",
                                  text=partial(_difference, name=name), number=True, leaves=1))  # fmt: skip
    if any(row.keys for row in table.rows):  # where nothing was trained there are none
        columns.append(Column("seeds", _seeds, number=True, leaves=2))
    return Columns(columns)


def study_csv(table: StudyTable) -> str:
    """Bare values, with the standard deviations, the sources and where each row's results are from."""
    columns: list[Column[StudyRow]] = [Column("run", lambda row: row.run), Column("at", lambda row: row.at)]
    for name in dict.fromkeys((*table.columns, *(name for row in table.rows for name in row.cells))):
        parts = {"": "mean", "_sd": "sd", "_published": "published", "_difference": "difference"}
        columns += [Column(f"{name}{end}", partial(_of, name=name, what=what)) for end, what in parts.items()]
    columns += [Column("seeds", _seeds), Column("source", lambda row: row.source)]
    columns += [Column("origin", lambda row: row.origin), Column("note", lambda row: row.said or None)]
    return Columns(columns).csv(table.rows)


def study_terminal(table: StudyTable) -> Table:
    """The table as a terminal shows it."""
    caption = ["ours: mean ± standard deviation over seeds; Δ: ours − paper", *_changes(table)]
    drawn = study_columns(table).terminal(f"{table.title} ({table.element})", table.rows, Text("\n".join(caption)))
    for index in _last_of_groups(table.rows):
        drawn.rows[index].end_section = True
    return drawn


def _last_of_groups(rows: Sequence[StudyRow]) -> list[int]:
    return [index for index, row in enumerate(rows[:-1]) if rows[index + 1].group != row.group]


def _changes(table: StudyTable) -> list[str]:
    return [f"Not the study as it is written: {'; '.join(table.changes)}."] if table.changes else []


def study_markdown(table: StudyTable) -> str:
    """The table, rows of each group under the group's name; above it, what makes it another than the study's own."""
    columns, parts = study_columns(table), [f"**{markdown(change)}**" for change in _changes(table)]
    for group in dict.fromkeys(row.group for row in table.rows):
        own = [row for row in table.rows if row.group == group]
        parts.append((f"{markdown_line(group)}\n\n" if group else "") + columns.markdown(own))
    return "\n\n".join(parts) + "\n"


def study_page(table: StudyTable, figures: Sequence[str]) -> str:
    """README.md of a study's folder: the table, how it came about, what was read, and what is missing.

    Args:
        table: of the study.
        figures: names of pictures beside it.
    """
    parts = [f"# {markdown(table.title)}", f"{markdown(table.element)}. {markdown_line(table.protocol)}"]
    parts.append(study_markdown(table).rstrip("\n"))
    parts.append(_legend(table))
    parts += [f"![{name}]({name})" for name in figures]
    if table.finding:
        parts.append(f"## What the figures say\n\n{markdown(table.finding)}")
    if table.picks:
        parts.append("## Recommended, by these figures\n\n" + "\n".join(study_picks(table)))
    notes = [f"- {markdown(note)}" for note in study_remarks(table)]
    parts += ["## Notes\n\n" + "\n".join(notes)] if notes else []
    parts.append("## Data\n\n" + "\n".join(_data(table)))
    parts.append("## Where the rows are from\n\n" + "\n".join(_origins(table)))
    return "\n\n".join(parts) + "\n"


def _legend(table: StudyTable) -> str:
    lines = [f"- **{markdown(measure(name).heading)}**: {markdown(measure(name).meaning)}" for name in table.columns]
    if any(row.keys for row in table.rows):
        lines.append("- Ours: mean ± standard deviation (n − 1) over the seeds; *times as fast*: median (least–most)")
    if sources := study_sources(table):
        lines.append(f"- **paper**: {markdown(sources)}; **Δ**: ours − paper")
    lines += [f"- Times: {markdown(table.times)}"] if table.times else []
    hosts = "; ".join(table.hosts)
    lines += [f"- Training: {table.minutes:,.1f} minutes in all ({markdown(hosts)})"] if hosts else []
    return "\n".join(lines)


def study_sources(table: StudyTable) -> str:
    """Where the published values are from; empty: there are none."""
    return "; ".join(dict.fromkeys(row.source for row in table.rows if row.source))


def study_picks(table: StudyTable) -> list[str]:
    """A line of Markdown for each recommendation, with the paper's."""
    return [
        f"- **{markdown(pick.title)}**: {markdown(pick.reason)}"
        + (f". The paper: {markdown(pick.paper)}" if pick.paper else "")
        for pick in table.picks
    ]


def study_remarks(table: StudyTable) -> list[str]:
    """What must stand below the table: the study's notes, and what is missing from rows or makes their scores void."""
    rows = [f"{row.label}, {row.at}: {said}" for row in table.rows if (said := row.said)]
    return [*table.notes, *dict.fromkeys(rows)]


def _data(table: StudyTable) -> list[str]:
    """What was read: rows that read the same are told together."""
    told: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row, notes in table.data.items():
        sizes = tuple(f"{name} {count:,}" for name, count in table.sets.get(row, {}).items())
        told.setdefault((notes, sizes), []).append(row)
    lines = []
    for (notes, sizes), rows in told.items():
        lines.append(f"- {markdown(', '.join(rows))}: {', '.join(sizes) or 'not read here'} rows")
        lines += [f"  - {markdown(note)}" for note in notes]
    return lines


def _origins(table: StudyTable) -> list[str]:
    lines = []
    for row in {row.run: row for row in table.rows}.values():
        keys = ", ".join(f"`{key[:12]}`" for key in row.keys)
        minutes = row.cells.get("minutes", _NO_CELL).mean
        lines.append(
            f"- {markdown(row.run)}: {markdown(row.origin)}{f' ({keys})' if keys else ''}"
            + (f", {minutes:.1f} minutes" if minutes is not None else "")
        )
    return lines
