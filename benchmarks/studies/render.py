"""A study's table as Markdown and CSV, and the page that says how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.studies.results import StudyRow, StudyTable
from benchmarks.studies.specification import measure
from edgeformer.artifacts.units import markdown, markdown_line
from edgeformer.report.columns import DASH, Column, Columns


def cell_text(row: StudyRow, name: str, attribute: str = "mean") -> str:
    """Return a figure as the table shows it: mean ± standard deviation over the seeds, or the range over the rounds."""
    cell, places = row.cell(name), measure(name).places
    value = getattr(cell, attribute)
    if value is None:
        return DASH
    text = f"{value:{'+' if attribute == 'difference' else ''},.{places}f}"
    if attribute != "mean":
        return text
    if cell.low is not None and cell.high is not None:
        return f"{text} ({cell.low:.{places}f}–{cell.high:.{places}f})"
    return text if not cell.sd or not places else f"{text} ± {cell.sd:.{places}f}"


def _value(row: StudyRow, name: str, attribute: str) -> float | None:
    value: float | None = getattr(row.cell(name), attribute)
    return value


def study_markdown(table: StudyTable) -> str:
    """Return the table, the rows of each group under its name; above it, how it differs from the study's file."""
    columns: list[Column[StudyRow]] = [Column("run", lambda row: row.label, heading="")]
    columns.append(Column("at", lambda row: row.at, heading=""))
    for name in table.columns:
        headings = {"mean": measure(name).heading}
        if any(row.cell(name).published is not None for row in table.rows):
            headings |= {"published": "paper", "difference": "Δ"}
        for attribute, heading in headings.items():
            text = partial(cell_text, name=name, attribute=attribute)
            cell = partial(_value, name=name, attribute=attribute)
            columns.append(Column(f"{name}_{attribute}", cell, heading=heading, text=text, number=True))
    if any(row.keys for row in table.rows):  # else nothing was trained
        columns.append(Column("seeds", lambda row: len(row.keys), number=True))
    only = f"Not the study as it is written: there are only the rows {', '.join(table.only)}."
    parts = [f"**{markdown(only)}**"] if table.only else []
    for group in dict.fromkeys(row.group for row in table.rows):
        rows = [row for row in table.rows if row.group == group]
        parts.append((f"{markdown_line(group)}\n\n" if group else "") + Columns(columns).markdown(rows))
    return "\n\n".join(parts) + "\n"


def study_csv(table: StudyTable) -> str:
    """Return bare values with standard deviations, sources, and where each row's results are from."""
    columns: list[Column[StudyRow]] = [Column("run", lambda row: row.run), Column("at", lambda row: row.at)]
    for name in dict.fromkeys((*table.columns, *(name for row in table.rows for name in row.cells))):
        for end, attribute in {"": "mean", "_sd": "sd", "_published": "published", "_difference": "difference"}.items():
            columns.append(Column(f"{name}{end}", partial(_value, name=name, attribute=attribute)))
    columns += [Column("seeds", lambda row: len(row.keys)), Column("source", lambda row: row.source)]
    columns += [Column("origin", lambda row: row.origin), Column("note", lambda row: row.remark or None)]
    return Columns(columns).csv(table.rows)


def study_page(table: StudyTable, figures: Sequence[str]) -> str:
    """Return README.md of a study's folder; ``figures``: names of the files in the same folder."""
    legend = [f"- **{markdown(measure(name).heading)}**: {markdown(measure(name).meaning)}" for name in table.columns]
    if any(row.keys for row in table.rows):
        legend.append("- Ours: mean ± standard deviation (n − 1) over the seeds; *times as fast*: median (least–most)")
    if sources := study_sources(table):
        legend.append(f"- **paper**: {markdown(sources)}; **Δ**: ours − paper")
    legend += [f"- Times: {markdown(table.times)}"] if table.times else []
    hosts = markdown("; ".join(table.hosts))
    legend += [f"- Training: {table.minutes:,.1f} minutes in all ({hosts})"] if hosts else []
    data: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # rows that read the same share an entry
    for run, notes in table.data.items():
        sizes = ", ".join(f"{name} {count:,}" for name, count in table.sets.get(run, {}).items()) or "not read here"
        data.setdefault((sizes, notes), []).append(run)
    data_lines = [
        "\n".join([f"- {markdown(', '.join(runs))}: {sizes} rows", *(f"  - {markdown(note)}" for note in notes)])
        for (sizes, notes), runs in data.items()
    ]
    origins = []
    for row in {row.run: row for row in table.rows}.values():
        keys = ", ".join(f"`{key[:12]}`" for key in row.keys)
        minutes = row.cell("minutes").mean
        trained = f", {minutes:.1f} minutes" if minutes is not None else ""
        origins.append(f"- {markdown(row.run)}: {markdown(row.origin)}{f' ({keys})' if keys else ''}{trained}")
    sections = {
        "What the figures say": markdown(table.finding),
        "Recommended, by these figures": "\n".join(study_picks(table)),
        "Notes": "\n".join(f"- {markdown(note)}" for note in study_remarks(table)),
        "Data": "\n".join(data_lines),
        "Where the rows are from": "\n".join(origins),
    }
    parts = [f"# {markdown(table.title)}", f"{markdown(table.element)}. {markdown_line(table.protocol)}"]
    parts += [study_markdown(table).rstrip("\n"), "\n".join(legend), *(f"![{name}]({name})" for name in figures)]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def study_sources(table: StudyTable) -> str:
    """Return where the published values are from; empty: there are none."""
    return "; ".join(dict.fromkeys(row.source for row in table.rows if row.source))


def study_picks(table: StudyTable) -> list[str]:
    """Return a line of Markdown for each recommendation, with the paper's."""
    papers = [f". The paper: {markdown(pick.paper)}" if pick.paper else "" for pick in table.picks]
    lines = zip(table.picks, papers, strict=True)
    return [f"- **{markdown(pick.title)}**: {markdown(pick.reason)}{paper}" for pick, paper in lines]


def study_remarks(table: StudyTable) -> list[str]:
    """Return the study's notes, and what is missing from rows or makes their scores void."""
    rows = [f"{row.label}, {row.at}: {row.remark}" for row in table.rows if row.remark]
    return [*table.notes, *dict.fromkeys(rows)]
