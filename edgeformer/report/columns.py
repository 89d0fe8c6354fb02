"""Columns of a table, rendered for the terminal (rich), Markdown, HTML and CSV from the same rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgeformer.artifacts import units
from edgeformer.artifacts.units import format_bytes, format_milliseconds

R = TypeVar("R")
"""Type of a row."""

DASH = "–"
_STATUS_COLOURS = {
    **dict.fromkeys(("pass", "built", "available", "verified", "yes", "finished", "exported", "confirmed"), "green"),
    **dict.fromkeys(("fail", "rejected", "failed", "damaged", "contradicted"), "red"),
}

Unit = Literal["", "ms", "bytes", "mj", "per_s", "share", "error"]


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


def coloured(status: str) -> Text:
    """Return a status word in its colour."""
    return Text(status, _STATUS_COLOURS.get(status, "yellow"))


@dataclass(frozen=True)
class Column(Generic[R]):
    """One figure of every row.

    Attributes:
        name: name in scripts, without the unit.
        cell: row → bare value in ``unit``; None if the row has no value.
        unit: unit of the value; the suffix of the column's name in CSV.
        heading: heading for people; None: the name.
        text: row → text for people, where it differs from the value with its unit. Only the terminal shows the
            colours of a ``Text``.
        number: align right.
        mark: a status word, shown in its colour.
        narrow: row → shorter text for a terminal that is too narrow for ``text``.
        flows: long text that the terminal and HTML may break between words.
        leaves: order in which the terminal drops columns that do not fit: 1 first; 0 never.
    """

    name: str
    cell: Callable[[R], object]
    unit: Unit = ""
    heading: str | None = None
    text: Callable[[R], str | Text] | None = None
    number: bool = False
    mark: bool = False
    narrow: Callable[[R], str | Text] | None = None
    flows: bool = False
    leaves: int = 0

    @property
    def title(self) -> str:
        """Heading for people."""
        return self.name.replace("_", " ") if self.heading is None else self.heading

    @property
    def key(self) -> str:
        """Name in CSV, with the unit; shares and errors have none."""
        return f"{self.name}_{self.unit}" if self.unit not in ("", "share", "error") else self.name

    @property
    def is_numeric(self) -> bool:
        """Whether the column is aligned right."""
        return self.number or bool(self.unit)

    def render(self, row: R) -> Text:
        """Return a row's cell for people."""
        if self.text is not None:
            text = self.text(row)
            return text if isinstance(text, Text) else Text(text)
        value = self.cell(row)
        return coloured(str(value)) if self.mark and value is not None else Text(format_value(value, self.unit))


class _FittingTable(Table):
    """Table with narrower variants: in a narrow terminal it drops columns before it breaks words.

    Attributes:
        required_width: characters that the table needs to break no word.
        flowing: for each column, whether its text may be broken between words.
        narrower: variants with less content, widest first.
    """

    def __init__(
        self, columns: Sequence[Column[R]], rows: Sequence[R], title: str, caption: Text | None, *, narrow: bool
    ) -> None:
        """Add columns and rows; ``narrow`` puts each word of a heading on a line of its own."""
        super().__init__(
            title=escape(title), caption=caption, caption_justify="left", title_justify="left", title_style="bold",
            box=box.SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        self.required_width = 0
        self.flowing = [column.flows for column in columns]
        self.narrower: list[_FittingTable] = []
        cells = [[column.render(row) for column in columns] for row in rows]
        for index, column in enumerate(columns):
            heading = re.sub(r" (?=[\w(])", "\n", column.title) if narrow else column.title
            self.add_column(escape(heading), justify="right" if column.is_numeric else "left", overflow="fold")
            texts = [heading, *(line[index].plain for line in cells)]
            pieces = [piece for text in texts for piece in (text.split() if column.flows else text.splitlines())]
            self.required_width += 3 + max(map(cell_len, pieces), default=0)
        for line in cells:
            self.add_row(*line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        variants = (self, *self.narrower)
        table = next((table for table in variants if table.required_width <= options.max_width), variants[-1])
        if table.required_width <= options.max_width:  # else rich would shrink all columns but the widest
            for column, flows in zip(table.columns, table.flowing, strict=True):
                column.no_wrap = not flows
        if table is self:
            yield from super().__rich_console__(console, options)
        else:
            table.title, table.caption = self.title, self.caption  # callers may have changed them
            yield table


class HtmlTable(NamedTuple):
    """Table for the HTML template; each row has its CSS class and its cells."""

    columns: tuple[Column[Any], ...]
    rows: list[tuple[str, list[str]]]


class Columns(Generic[R]):
    """Columns of one kind of row, in order."""

    def __init__(self, columns: Iterable[Column[R]]) -> None:
        self._columns = tuple(columns)

    @classmethod
    def of_records(cls, names: Iterable[str]) -> Columns[dict[str, Any]]:
        """Return columns for dicts; a missing key is an empty cell."""
        return Columns(Column(name, methodcaller("get", name)) for name in names)

    def pick(self, *names: str) -> Columns[R]:
        """Return the named columns, in this order."""
        by_name = {column.name: column for column in self._columns}
        return Columns(by_name[name] for name in names)

    def drop_empty(self, rows: Sequence[R], *optional: str) -> Columns[R]:
        """Drop the columns in ``optional`` that have no value in any row."""
        return Columns(
            column
            for column in self._columns
            if column.name not in optional or any(column.cell(row) is not None for row in rows)
        )

    def terminal(self, title: str, rows: Iterable[R], caption: Text | None = None) -> Table:
        """Return a rich table; nothing in the title or in the rows is read as markup."""
        row_list = list(rows)
        table = _FittingTable(self._columns, row_list, title, caption, narrow=False)
        short = [replace(column, text=column.narrow or column.text) for column in self._columns]
        for rank in sorted({0, *(column.leaves for column in self._columns)}):
            columns = [column for column in short if not 0 < column.leaves <= rank]
            table.narrower.append(_FittingTable(columns, row_list, title, caption, narrow=True))
        return table

    def plain(self, rows: Iterable[R]) -> str:
        """Return a plain-text table for a terminal of any width."""
        return units.visible(self._tabulate([self._texts(row) for row in rows], "simple", str))

    def markdown(self, rows: Iterable[R], bold: Callable[[R], bool] | None = None) -> str:
        """Return a table in GitHub-flavoured Markdown; ``bold`` selects rows in bold type. All text is escaped."""
        lines = []
        for row in rows:
            cells = [units.markdown(text) for text in self._texts(row)]
            lines.append([f"**{cell}**" if cell else cell for cell in cells] if bold and bold(row) else cells)
        return self._tabulate(lines, "pipe", units.markdown)

    def _tabulate(self, lines: list[list[str]], style: str, escape_heading: Callable[[str], str]) -> str:
        from tabulate import tabulate

        headings = [escape_heading(column.title) for column in self._columns]
        align = ["right" if column.is_numeric else "left" for column in self._columns]
        return tabulate(lines, headings, tablefmt=style, disable_numparse=True, colalign=align if lines else None)

    def csv(self, rows: Iterable[R]) -> str:
        """Return CSV: bare values, units in the headings, missing values empty; no text is read as a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([units.csv_cell(column.key) for column in self._columns])
        writer.writerows([units.csv_cell(column.cell(row)) for column in self._columns] for row in rows)
        return text.getvalue()

    def html(self, rows: Sequence[R], css_class: Callable[[R], str] | None = None) -> HtmlTable:
        """Return a table for the HTML template; ``css_class`` gives a row's class."""
        return HtmlTable(self._columns, [(css_class(row) if css_class else "", self._texts(row)) for row in rows])

    def _texts(self, row: R) -> list[str]:
        return [column.render(row).plain for column in self._columns]
