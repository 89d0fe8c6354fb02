"""Columns: bare values for scripts, text for people, and all text escaped."""

import csv
import io
from dataclasses import dataclass

from edgeformer.report.columns import Column, TableColumns
from tests.report.made_reports import rendered


@dataclass(frozen=True)
class Item:
    name: str
    size: int | None = None
    time: float | None = None
    good: bool = True


COLUMNS: TableColumns[Item] = TableColumns(
    Column("item", lambda item: item.name),
    Column("size", lambda item: item.size, "bytes"),
    Column("time", lambda item: item.time, "ms", "how long"),
    Column("good", lambda item: item.good),
)
ITEMS = [Item("a", 3 * 2**20, 1.5), Item("b|[red]x[/]\n<i>", None, None, good=False)]
TERMINAL = rendered(COLUMNS.terminal("[bold]items[/]", ITEMS))


def test_csv_has_bare_values_of_the_picked_columns() -> None:
    rows = list(csv.DictReader(io.StringIO(COLUMNS.csv(ITEMS))))
    assert rows[0] == {"item": "a", "size_bytes": str(3 * 2**20), "time_ms": "1.5", "good": "True"}
    assert rows[1] == {"item": "b|[red]x[/]\n<i>", "size_bytes": "", "time_ms": "", "good": "False"}
    assert COLUMNS.pick("size", "item").csv(ITEMS[:1]) == f"size_bytes,item\n{3 * 2**20},a\n"
    assert COLUMNS.drop_empty(ITEMS[1:], "size", "time").csv(ITEMS[1:]).startswith("item,good\n")
    assert COLUMNS.drop_empty(ITEMS, "size", "time").csv(ITEMS).startswith("item,size_bytes,time_ms,good\n")


def test_people_read_units_and_no_markup() -> None:
    table = COLUMNS.html(ITEMS, ["", "unknown"])
    assert table.rows[0] == ("", ["a", "3.0 MiB", "1.50 ms", "yes"])
    assert table.rows[1] == ("unknown", ["b|[red]x[/]\n<i>", "–", "–", "no"])
    assert [column.is_numeric for column in table.columns] == [False, True, True, False]
    for text in (COLUMNS.markdown(ITEMS), COLUMNS.plain(ITEMS), TERMINAL):
        assert "3.0 MiB" in text and "1.50 ms" in text and "how long" in text

    assert "[red]x[/]" in TERMINAL and "[bold]items[/]" in TERMINAL
    assert "b\\|\\[red\\]x\\[/\\] &lt;i&gt;" in COLUMNS.markdown(ITEMS)
    lines = COLUMNS.markdown(ITEMS, bold=lambda item: item.name == "a").splitlines()
    assert "**a**" in lines[2] and "**3.0 MiB**" in lines[2] and "**" not in lines[3]
