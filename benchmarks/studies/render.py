"""A study's finding, its table, and the page that shows both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from scipy.stats import ttest_ind_from_stats, ttest_rel

from benchmarks.studies.paired import Paired
from benchmarks.studies.results import Cell, StudyRow, StudyTable
from benchmarks.studies.specification import Study, measure
from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.units import markdown, markdown_line
from edgeformer.report.columns import DASH, Column, TableColumns

_ALPHA = 0.05
"""Two means are called different where a t test gives chance less than this."""
_SAME_ROWS = re.compile(r": the same [\d,]+ rows$")
_CODE = re.compile(r"(`[^`]+`)")
_HEADINGS = {
    "tests": ("model", "set"), "artifacts": ("model", "precision"), "exits": ("model", "exit after loop"),
    "thresholds": ("model", "threshold"), "labels": ("data set", "set"),
}  # fmt: skip
"""Kind of a table's rows → the headings of its first two columns."""
_TIMES = ("ms_per_sample", "latency_ms", "minutes")
"""Figures that are not compared with a paper's, whose device has no name."""
_OF_THESE_WEIGHTS = (
    "Intervals and p-values are of these trained weights on these rows; other seeds differ as well. *p*: exact "
    "sign-flip test of the rows' differences, summed over the seeds (one seed: McNemar's exact test); *p (Holm)*: "
    "adjusted over the table."
)


def prose(text: str) -> str:
    """Escape text of a study for Markdown, but for code between backticks."""
    return "".join(part if number % 2 else markdown(part) for number, part in enumerate(_CODE.split(text)))


def cell_text(row: StudyRow, name: str) -> str:
    """Return a figure as the table shows it: mean ± standard deviation over the seeds, or the range over the rounds."""
    cell, places = row.cell(name), measure(name).places
    if cell.mean is None:
        return DASH
    text = f"{cell.mean:,.{places}f}"
    if cell.low is not None and cell.high is not None:
        return f"{text} ({cell.low:.{places}f}–{cell.high:.{places}f})"
    return text if not cell.sd or not places else f"{text} ± {cell.sd:.{places}f}"


def compared_text(row: StudyRow, name: str) -> str:
    """Return a figure as the table shows it, with the paper's behind it, and how much larger ours is."""
    cell, places = row.cell(name), measure(name).places
    if cell.published is None:
        return cell_text(row, name)
    text = f"paper: {cell.published:,.{places}f}"
    if cell.difference is not None and name not in _TIMES:
        text += f", {round(cell.difference, places) + 0.0:+,.{places}f}"  # + 0.0: no negative zero
    return f"{cell_text(row, name)} ({text})"


def shown_columns(table: StudyTable) -> list[str]:
    """Return the columns of a table; minutes of several machines do not stand in one column."""
    machines = {host.rpartition(", ")[0] for host in table.hosts}
    return [name for name in table.columns if name != "minutes" or len(machines) == 1]


def study_markdown(table: StudyTable) -> str:
    """Return the table, the rows of each group under its name, with the paper's figures in the cells of ours."""
    model, place = _HEADINGS[table.kind]
    parts = []
    for group in dict.fromkeys(row.group for row in table.rows):
        rows = [row for row in table.rows if row.group == group]
        columns: list[Column[StudyRow]] = [Column("run", lambda row: row.label, heading=model)]
        columns.append(Column("at", lambda row: row.at, heading=place))
        for name in shown_columns(table):
            text = partial(compared_text, name=name)
            columns.append(Column(name, text, heading=measure(name).heading, text=text, number=True))
        if any(row.keys for row in table.rows):  # else nothing was trained
            columns.append(Column("seeds", lambda row: len(row.keys), number=True))
        parts.append((f"{markdown_line(group)}\n\n" if group else "") + TableColumns(*columns).markdown(rows))
    return "\n\n".join(parts) + "\n"


def column_legend(table: StudyTable, template: str = "") -> str:
    """Return what the columns of a table mean, and the tests that a finding's ``template`` calls."""
    columns = shown_columns(table)
    lines = [f"- **{measure(name).heading}**: {markdown(measure(name).meaning)}" for name in columns]
    if "minutes" in columns:
        lines[columns.index("minutes")] += f", on {table.hosts[0].rpartition(', ')[0]}"
    cells = [row.cell(name) for row in table.rows for name in columns]
    if any(cell.published is not None for cell in cells):
        lines.append("- **paper**: the published figure, and ours less it; not for times, the paper names no device")
    if any(cell.sd for cell in cells):
        lines.append("- **±**: standard deviation (n − 1) over the seeds")
    if table.pairs:
        lines.append(
            "- **points of accuracy (95%)**: difference in percentage points, with a bootstrap interval over the rows"
        )
    if "clear(" in template:
        lines.append("- Seeds separate two models where Welch's t test over their seeds gives p < 0.05.")
    if "apart(" in template:
        lines.append("- Two rows of one model differ where a paired t test over its seeds gives p < 0.05.")
    return "\n".join(lines)


def pairs_markdown(table: StudyTable) -> str:
    """Return the table of paired comparisons."""
    labels = {row.run: row.label for row in table.rows}
    groups = {row.run: row.group for row in table.rows}

    def counts(values: Sequence[int]) -> str:
        return ", ".join(f"{value:,}" for value in values)

    columns: list[Column[Paired]] = [
        *([Column("group", lambda pair: groups[pair.run])] if any(groups.values()) else []),
        Column("pair", lambda pair: f"{labels[pair.run]} − {labels[pair.against]}", heading="first − second"),
        Column("at", lambda pair: pair.at, heading="set"),
        Column("rows", lambda pair: f"{pair.rows:,}", number=True),
        Column("difference", lambda pair: f"{100 * pair.difference:+.2f} ({100 * pair.low:+.2f} to "
               f"{100 * pair.high:+.2f})", heading="points of accuracy (95%)", number=True),
        Column("won", lambda pair: counts(pair.won), heading="only the first right", number=True),
        Column("lost", lambda pair: counts(pair.lost), heading="only the second right", number=True),
        Column("p", lambda pair: f"{pair.p:.2g}", heading="p", number=True),
        Column("adjusted", lambda pair: f"{pair.adjusted:.2g}", heading="p (Holm)", number=True),
    ]  # fmt: skip
    return TableColumns(*columns).markdown(table.pairs)


def study_body(table: StudyTable, finding: str, pictures: Mapping[str, str]) -> list[str]:
    """Return what a study says, as paragraphs of Markdown; ``pictures``: path as seen from the document → title."""
    sources = "; ".join(dict.fromkeys(row.source for row in table.rows if row.source))
    papers = [f". The paper: {prose(pick.paper)}" if pick.paper else "" for pick in table.picks]
    picks = [f"- **{markdown(pick.title)}**: {markdown(pick.reason)}" for pick in table.picks]
    stand_ins = dict.fromkeys(
        note for notes in table.data.values() for note in notes if "in place of the hub's" in note
    )
    # Without the name of the part: a source is the training set of some rows and a test set of others.
    remarks = [note.partition(": ")[2] for note in stand_ins if not _SAME_ROWS.search(note)]
    remarks = [*dict.fromkeys(remarks), *table.notes]
    for remark in dict.fromkeys(row.remark for row in table.rows if row.remark):
        rows = [row for row in table.rows if row.remark == remark]
        for label in dict.fromkeys(row.label for row in rows):
            remarks.append(f"{label}, {', '.join(row.at for row in rows if row.label == label)}: {remark}")
    parts = [
        study_markdown(table).rstrip("\n"),
        pairs_markdown(table).rstrip("\n") if table.pairs else "",
        _OF_THESE_WEIGHTS if table.pairs else "",
        f"The paper's figures: {markdown(sources)}." if sources else "",
        prose(finding),
        "\n".join(f"{line}{paper}" for line, paper in zip(picks, papers, strict=True)),
        f"{table.minutes:,.0f} minutes of training in all, on: {'; '.join(table.hosts)}." if table.hosts else "",
        f"Times: {table.times}." if table.times else "",
        *(f"![{markdown(title)}]({path})" for path, title in pictures.items()),
        "\n".join(f"- {prose(remark)}" for remark in remarks),
    ]
    return [part for part in parts if part]


def study_page(table: StudyTable, pictures: Mapping[str, str], template: str = "") -> str:
    """Return README.md of a study's folder.

    Args:
        pictures: names of the files in the same folder, and their titles.
        template: of the finding, whose tests are named.
    """
    origins = dict.fromkeys(f"- {markdown(row.run)}: {markdown(row.origin)}" for row in table.rows)
    parts = [f"# {markdown(table.title)}", f"{markdown(table.element)}. {prose(table.protocol)}"]
    parts += [*study_body(table, table.finding, pictures), "## TableColumns", column_legend(table, template)]
    return "\n\n".join([*parts, "## Where the rows are from", "\n".join(origins)]) + "\n"


class _MissingFigure(Exception):
    """The table does not have the figure."""


class Questions:
    """The functions that a finding can call; each names runs, then their row or rows (``at``), then a figure."""

    def __init__(self, rows: Sequence[StudyRow], pairs: Sequence[Paired] = ()) -> None:
        self._rows = {(row.run, row.at): row for row in rows}
        self._pairs = {(pair.run, pair.at): pair for pair in pairs}

    def pair(self, run: str, place: object) -> Paired:
        """Return the paired comparison of a run on a test set."""
        if (run, str(place)) not in self._pairs:
            raise _MissingFigure(f"{run}, {place} has no paired comparison")
        return self._pairs[run, str(place)]

    def _cell(self, run: str, place: object, figure: str) -> Cell:
        row = self._rows.get((run, str(place)))
        if row is None or row.missing or row.cell(figure).mean is None:
            raise _MissingFigure(f"{run}, {place} has no {measure(figure).heading}")
        return row.cell(figure)

    def of(self, run: str, place: object, figure: str) -> float:
        """Return the mean over the seeds, or the median over the rounds."""
        return self._cell(run, place, figure).mean or 0.0

    def said(self, run: str, place: object, figure: str) -> str:
        """Return the figure as the table shows it, with its spread."""
        self._cell(run, place, figure)
        return cell_text(self._rows[run, str(place)], figure)

    def clear(self, first: str, second: str, place: object, figure: str) -> bool:
        """Return whether two runs differ beyond what their seeds explain (Welch's t test); False without seeds."""
        a, b = (self._cell(run, place, figure) for run in (first, second))
        if a.sd is None or b.sd is None:  # one seed, or times in turns
            return False
        if not a.sd and not b.sd:
            return a.mean != b.mean
        return bool(ttest_ind_from_stats(a.mean, a.sd, a.n, b.mean, b.sd, b.n, equal_var=False).pvalue < _ALPHA)

    def apart(self, run: str, first: object, second: object, figure: str) -> bool:
        """Return whether two rows of a run differ, seed by seed, beyond chance (paired t test)."""
        a, b = (self._cell(run, place, figure).values for place in (first, second))
        if len(a) != len(b) or len(a) < 2 or a == b:
            return False
        return bool(ttest_rel(a, b).pvalue < _ALPHA)

    def chance(self, first: str, second: str, place: object, share: str) -> float:
        """Return the standard error of the difference of two shares of a test set's rows, in the share's unit."""
        pairs = [(self.of(run, place, share), self.of(run, place, "rows")) for run in (first, second)]
        return sqrt(sum(mean * (1 - mean) / n for mean, n in pairs))

    def ranked(self, *arguments: object) -> list[str]:
        """Return the labels and figures of several runs, best first."""
        *runs, place, figure = map(str, arguments)
        sign = -1 if measure(figure).higher_is_better else 1
        best = sorted(runs, key=lambda run: sign * self.of(run, place, figure))
        return [f"{self._rows[run, place].label} ({self.said(run, place, figure)})" for run in best]


def finding_of(study: Study, rows: Sequence[StudyRow], pairs: Sequence[Paired] = ()) -> str:
    """Fill the study's template from the rows; where one lacks a figure, say which. Raises RecipeError."""
    questions = Questions(rows, pairs)
    try:
        template = SandboxedEnvironment(autoescape=False).from_string(study.finding)  # Markdown is escaped on writing
        names = ("of", "said", "clear", "apart", "chance", "ranked", "pair")
        return " ".join(template.render({name: getattr(questions, name) for name in names}).split())
    except _MissingFigure as missing:
        return f"Nothing is said yet: {missing}."
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(f"{study.name}: finding: {error}") from None
