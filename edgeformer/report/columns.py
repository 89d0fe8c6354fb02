"""One table of columns per kind of row; terminal, Markdown, HTML and CSV are four renderings of it."""

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
"""What a row is made of."""

DASH = "–"
_COLOURS = {
    **dict.fromkeys(("pass", "built", "available", "verified", "yes", "finished", "exported", "confirmed"), "green"),
    **dict.fromkeys(("fail", "rejected", "failed", "damaged", "contradicted"), "red"),
}

Unit = Literal["", "ms", "bytes", "mj", "per_s", "share", "error"]
_WRITTEN: dict[Unit, Callable[[Any], str]] = {
    "ms": lambda value: f"{format_milliseconds(value)} ms",
    "bytes": format_bytes,
    "mj": lambda value: f"{format_milliseconds(value)} mJ",
    "per_s": lambda value: f"{value:,.0f}",
    "share": lambda value: f"{value:.1%}",
    "error": lambda value: f"{value:.1e}",
    "": lambda value: written(value),
}
"""How people read a value of each unit."""


def written(value: object) -> str:
    """A bare value for people: yes and no, thousands apart, four decimals; a dash where there is none."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def coloured(status: str) -> Text:
    """A status word in its colour."""
    return Text(status, _COLOURS.get(status, "yellow"))


@dataclass(frozen=True)
class Column(Generic[R]):
    """One figure of every row.

    Attributes:
        name: as scripts know it, without its unit.
        cell: row → the bare value, in ``unit``; None: there is none.
        unit: of the value; it ends the column's name in CSV.
        heading: what people read above it; None: the name.
        text: row → what people read, where that is more than the value in its unit. Only the terminal shows the
            colours of a ``Text``.
        number: stands on the right of its column.
        wraps: long text, which HTML breaks into lines.
        mark: a status word, in its colour.
        narrow: row → what people read where the terminal is too narrow for ``text``.
        flows: in the terminal its words may stand below each other.
        leaves: the terminal's table does without it where it is too narrow: 1 goes first, then 2…; 0 stays.
    """

    name: str
    cell: Callable[[R], object]
    unit: Unit = ""
    heading: str | None = None
    text: Callable[[R], str | Text] | None = None
    number: bool = False
    wraps: bool = False
    mark: bool = False
    narrow: Callable[[R], str | Text] | None = None
    flows: bool = False
    leaves: int = 0

    @property
    def title(self) -> str:
        """What people read above the column."""
        return self.name.replace("_", " ") if self.heading is None else self.heading

    @property
    def key(self) -> str:
        """The column's name in CSV; shares and errors have no unit."""
        return f"{self.name}_{self.unit}" if self.unit not in ("", "share", "error") else self.name

    @property
    def right(self) -> bool:
        """Does it hold numbers?"""
        return self.number or bool(self.unit)

    def shown(self, row: R) -> Text:
        """A row's cell for people."""
        if self.text is not None:
            found = self.text(row)
            return found if isinstance(found, Text) else Text(found)
        value = self.cell(row)
        if value is None:
            return Text(DASH)
        return coloured(str(value)) if self.mark else Text(_WRITTEN[self.unit](value))


_STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}


class _Fitting(Table):
    """A table that knows smaller ones: where a terminal is too narrow, columns leave before words are cut in two.

    Attributes:
        needs: characters that it takes to cut no word in two.
        flowing: of each column, whether its words may stand below each other.
        narrower: the same table with less in it, the widest first.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.needs = 0
        self.flowing: list[bool] = []
        self.narrower: list[_Fitting] = []

    def fill(self, columns: Sequence[Column[R]], rows: Sequence[R], *, narrow: bool) -> None:
        """Add the columns and the rows; ``narrow``: headings of several words stand in several lines."""
        for column in columns:
            title = re.sub(r" (?=[\w(])", "\n", column.title) if narrow else column.title
            shown = [column.shown(row) for row in rows]
            self.add_column(escape(title), justify="right" if column.right else "left", overflow="fold")
            pieces = [title, *(text.plain for text in shown)]
            self.flowing.append(column.flows)
            self.needs += 3 + max(
                cell_len(piece)
                for text in pieces
                for piece in (text.split() if column.flows else text.splitlines()) or [""]
            )
        for row in rows:
            self.add_row(*(column.shown(row) for column in columns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in (self, *self.narrower):
            if table.needs <= options.max_width:
                break
        if table.needs <= options.max_width:  # else the others would give way to the column with the longest text
            for column, flows in zip(table.columns, table.flowing, strict=True):
                column.no_wrap = not flows
        if table is self:
            yield from super().__rich_console__(console, options)
        else:
            table.title, table.caption = self.title, self.caption  # a caller may have changed them
            yield table


class PageTable(NamedTuple):
    """A table for the HTML template; of a row its class in the style sheet, and its cells."""

    columns: tuple[Column[Any], ...]
    rows: list[tuple[str, list[str]]]


class Columns(Generic[R]):
    """The columns of one kind of row, in order."""

    def __init__(self, columns: Iterable[Column[R]]) -> None:
        self._columns = tuple(columns)

    @classmethod
    def of_records(cls, names: Iterable[str]) -> Columns[dict[str, Any]]:
        """Entries of records, as they are; one that a record does not have is absent."""
        return Columns(Column(name, methodcaller("get", name)) for name in names)

    def pick(self, *names: str) -> Columns[R]:
        """The columns of these names, in this order."""
        known = {column.name: column for column in self._columns}
        return Columns(known[name] for name in names)

    def known_in(self, rows: Sequence[R], *optional: str) -> Columns[R]:
        """Without those of ``optional`` that have no value in any of ``rows``."""
        empty = {c.name for c in self._columns if c.name in optional and all(c.cell(row) is None for row in rows)}
        return Columns(column for column in self._columns if column.name not in empty)

    def terminal(self, title: str, rows: Iterable[R], caption: Text | None = None) -> Table:
        """A table in the house style; nothing in the title or the rows is read as markup.

        Args:
            title: above the table.
            rows: one line each.
            caption: below the table.
        """
        held = list(rows)
        narrow = [replace(column, text=column.narrow or column.text) for column in self._columns]
        leaving = sorted({0, *(column.leaves for column in self._columns)})
        smaller = [[column for column in narrow if not 0 < column.leaves <= rank] for rank in leaving]
        table = _Fitting(title=escape(title), caption=caption, caption_justify="left", **_STYLE)
        table.fill(self._columns, held, narrow=False)
        for columns in smaller:
            table.narrower.append(_Fitting(title=escape(title), caption=caption, caption_justify="left", **_STYLE))
            table.narrower[-1].fill(columns, held, narrow=True)
        return table

    def plain(self, rows: Iterable[R]) -> str:
        """Columns of text, for a terminal of any width."""
        heads = [column.title for column in self._columns]
        return units.visible(self._tabulated([self._texts(row) for row in rows], "simple", heads))

    def markdown(self, rows: Iterable[R], strong: Callable[[R], bool] | None = None) -> str:
        """A table of GitHub-flavoured Markdown.

        Args:
            rows: one line each; no text of theirs can break the table.
            strong: which rows are in bold.
        """
        found = []
        for row in rows:
            cells = [units.markdown(text) for text in self._texts(row)]
            bold = strong is not None and strong(row)
            found.append([f"**{cell}**" if bold and cell else cell for cell in cells])
        return self._tabulated(found, "pipe", [units.markdown(column.title) for column in self._columns])

    def _tabulated(self, rows: list[list[str]], style: str, heads: list[str]) -> str:
        from tabulate import tabulate

        align = ["right" if column.right else "left" for column in self._columns]
        return tabulate(rows, heads, tablefmt=style, disable_numparse=True, colalign=align if rows else None)

    def csv(self, rows: Iterable[R]) -> str:
        """Bare values, units in the names of the columns; an absent value is an empty cell. No text is a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([units.csv_cell(column.key) for column in self._columns])
        writer.writerows([units.csv_cell(column.cell(row)) for column in self._columns] for row in rows)
        return text.getvalue()

    def page(self, rows: Sequence[R], kind: Callable[[R], str] | None = None) -> PageTable:
        """A table for the HTML template.

        Args:
            rows: one line each.
            kind: row → its class in the style sheet.
        """
        return PageTable(self._columns, [(kind(row) if kind is not None else "", self._texts(row)) for row in rows])

    def _texts(self, row: R) -> list[str]:
        return [column.shown(row).plain for column in self._columns]
