"""Columns of a table, rendered for the terminal (rich), Markdown, HTML and CSV from the same rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgeformer.artifacts import units
from edgeformer.artifacts.report import Figure
from edgeformer.artifacts.units import format_bytes, format_milliseconds

R = TypeVar("R")  # type of a row
Record = dict[str, Any]  # a row whose figures have names only

DASH = "–"
ABOUT = "≈"  # prefix of every estimated figure
_STATUS_COLOURS = {
    **dict.fromkeys(("pass", "built", "available", "verified", "yes", "finished", "exported", "confirmed"), "green"),
    **dict.fromkeys(("fail", "rejected", "failed", "damaged", "contradicted"), "red"),
}

Unit = Literal["", "ms", "bytes", "mj", "per_s", "share", "error"]
CHECK_UNITS: dict[str, Unit] = {"bytes": "bytes", "ms": "ms", "mJ": "mj"}
"""Unit of a check of a report or a gate → that of a column."""


def format_value(value: Any, unit: Unit = "") -> str:
    """Format a value for people; None is a dash. Without a unit: yes or no, thousands separators, four decimals."""
    if value is None:
        return DASH
    if unit in ("ms", "mj"):
        return f"{format_milliseconds(value)} {'ms' if unit == 'ms' else 'mJ'}"
    if unit == "bytes":
        return format_bytes(value)
    if unit:
        return format(value, {"per_s": ",.0f", "share": ".1%", "error": ".1e"}[unit])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def figure_text(figure: Figure, unit: Unit, *, range_only: bool = False) -> Text:
    """Format a figure for people: ``1.23 ms``, an estimate with its ends ``≈ 1.23 ms (0.80 to 1.90)`` in italics."""
    if figure.value is None or figure.basis != "estimated":
        return Text(format_value(figure.value, unit))
    if figure.low is None or figure.high is None:
        return Text(f"{ABOUT} {format_value(figure.value, unit)}", "italic")
    first, middle, last = (format_value(value, unit) for value in (figure.low, figure.value, figure.high))
    if first.rpartition(" ")[2] == last.rpartition(" ")[2]:  # the same unit
        first = first.rpartition(" ")[0]
        if not range_only:
            last = last.rpartition(" ")[0]
    return Text(f"{ABOUT} {first} to {last}" if range_only else f"{ABOUT} {middle} ({first} to {last})", "italic")


def coloured(status: str) -> Text:
    """Return a status word in its colour."""
    return Text(status, _STATUS_COLOURS.get(status, "yellow"))


@dataclass(frozen=True)
class Column(Generic[R]):
    """One figure of every row. In order, a text for people is of ``figure``, ``text``, or the value with its unit."""

    name: str  # in scripts, without the unit
    cell: Callable[[R], object] | str = ""  # row → bare value, or a key or path of attributes; empty: `name`
    unit: Unit = ""  # of the value; a suffix of the column's name in CSV, except for shares and errors
    heading: str | None = None  # for people; None: the name
    text: Callable[[R], str | Text] | None = None  # only the terminal shows the colours of a `Text`
    layout: str = ""  # format string of the value for people, e.g. {:.2f}
    number: bool = False  # align right, as columns with a unit or a layout are
    mark: bool = False  # a status word, shown in its colour
    narrow: Callable[[R], str | Text] | None = None  # shorter text for a terminal that is too narrow for `text`
    figure: Callable[[R], Figure] | None = None  # in a narrow terminal, an estimate is its range alone
    flows: bool = False  # long text that the terminal and HTML may break between words
    leaves: int = 0  # order in which the terminal drops columns that do not fit: 1 first; 0 never
    dash: str = DASH  # text of a missing value

    @property
    def title(self) -> str:
        """Heading for people."""
        return self.name.replace("_", " ") if self.heading is None else self.heading

    @property
    def is_numeric(self) -> bool:
        """Whether the column is aligned right."""
        return self.number or bool(self.unit or self.layout)

    def value(self, row: R) -> Any:
        """Return a row's bare value."""
        if callable(self.cell):
            return self.cell(row)
        if isinstance(row, dict):
            return row.get(self.cell or self.name)
        value: Any = row
        for name in (self.cell or self.name).split("."):
            value = getattr(value, name) if value is not None else None
        return value

    def render(self, row: R, *, narrow: bool = False) -> Text:
        """Return a row's cell for people; with ``narrow`` the shorter text."""
        if self.figure is not None:
            return figure_text(self.figure(row), self.unit, range_only=narrow)
        render_text = self.narrow if narrow and self.narrow is not None else self.text
        if render_text is not None:
            text = render_text(row)
            return text if isinstance(text, Text) else Text(text)
        value = self.value(row)
        if value is None:
            return Text(self.dash)
        if self.layout:
            return Text(self.layout.format(value))
        return coloured(str(value)) if self.mark else Text(format_value(value, self.unit))


@dataclass(frozen=True)
class TerminalTable(Generic[R]):
    """Table for rich. In a narrow terminal it shortens cells and drops columns before it breaks words.

    ``title`` is not read as markup.
    """

    columns: Sequence[Column[R]]
    rows: Sequence[R]
    title: str
    caption: Text | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ranks = sorted({0, *(column.leaves for column in self.columns)})
        for rank in (None, *ranks):  # None: neither cells nor columns change
            narrow = rank is not None
            columns = [column for column in self.columns if not 0 < column.leaves <= (rank or 0)]
            table = Table(
                title=escape(self.title), caption=self.caption, caption_justify="left", title_justify="left",
                title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
            )  # fmt: skip
            width, cells = 0, [[column.render(row, narrow=narrow) for column in columns] for row in self.rows]
            for index, column in enumerate(columns):
                heading = re.sub(r" (?=[\w(])", "\n", column.title) if narrow else column.title
                justify: Literal["left", "right"] = "right" if column.is_numeric else "left"
                table.add_column(escape(heading), justify=justify, overflow="fold", no_wrap=not column.flows)
                texts = [heading, *(line[index].plain for line in cells)]
                pieces = [piece for text in texts for piece in (text.split() if column.flows else text.splitlines())]
                width += 3 + max(map(cell_len, pieces), default=0)  # in which no word breaks
            for line in cells:
                table.add_row(*line)
            if width <= options.max_width:
                break
        else:  # now break words, of all columns
            for table_column in table.columns:
                table_column.no_wrap = False
        yield table


class HtmlTable(NamedTuple):
    """Table for the HTML template; each row has its CSS class and its cells."""

    columns: tuple[Column[Any], ...]
    rows: list[tuple[str, list[str]]]


class TableColumns(Generic[R]):
    """Columns of one kind of row, in order."""

    def __init__(self, *columns: Column[R]) -> None:
        self._columns = columns

    def pick(self, *names: str) -> TableColumns[R]:
        """Return the named columns, in this order."""
        by_name = {column.name: column for column in self._columns}
        return TableColumns(*(by_name[name] for name in names))

    def omit(self, *names: str) -> TableColumns[R]:
        """Return the columns without the named ones."""
        return TableColumns(*(column for column in self._columns if column.name not in names))

    def drop_empty(self, rows: Sequence[R], *optional: str) -> TableColumns[R]:
        """Drop the columns in ``optional`` that have no value in any row."""
        empty = {c.name for c in self._columns if c.name in optional and all(c.value(row) is None for row in rows)}
        return self.omit(*empty)

    def terminal(self, title: str, rows: Iterable[R], caption: Text | None = None) -> TerminalTable[R]:
        """Return a table for rich; nothing in the title or in the rows is read as markup."""
        return TerminalTable(self._columns, [*rows], title, caption)

    def plain(self, rows: Iterable[R]) -> str:
        """Return a plain-text table for a terminal of any width."""
        return units.visible(self._tabulate(rows, "simple", str))

    def markdown(self, rows: Iterable[R], bold: Callable[[R], bool] | None = None) -> str:
        """Return a table in GitHub-flavoured Markdown; ``bold`` selects rows in bold type. All text is escaped."""
        return self._tabulate(rows, "pipe", units.markdown, bold)

    def _tabulate(
        self, rows: Iterable[R], style: str, escape_text: Callable[[str], str], bold: Callable[[R], bool] | None = None
    ) -> str:
        from tabulate import tabulate

        lines = []
        for row in rows:
            cells = [escape_text(column.render(row).plain) for column in self._columns]
            lines.append([f"**{cell}**" if cell else cell for cell in cells] if bold and bold(row) else cells)
        headings = [escape_text(column.title) for column in self._columns]
        align = ["right" if column.is_numeric else "left" for column in self._columns]
        return tabulate(lines, headings, tablefmt=style, disable_numparse=True, colalign=align if lines else None)

    def csv(self, rows: Iterable[R]) -> str:
        """Return CSV: bare values, units in the headings, missing values empty; no text is read as a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        keys = [
            f"{column.name}_{column.unit}" if column.unit not in ("", "share", "error") else column.name
            for column in self._columns
        ]
        writer.writerow([units.csv_cell(key) for key in keys])
        writer.writerows([units.csv_cell(column.value(row)) for column in self._columns] for row in rows)
        return text.getvalue()

    def html(self, rows: Sequence[R], css_classes: Iterable[str] | None = None) -> HtmlTable:
        """Return a table for the HTML template; ``css_classes``: a class per row."""
        texts = [[column.render(row).plain for column in self._columns] for row in rows]
        return HtmlTable(self._columns, [*zip(css_classes or [""] * len(texts), texts, strict=True)])
