"""One table of columns: bare values for scripts, words for people, and no text of a row is read as anything else."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from rich.console import Console

from edgeformer.report.columns import Column, Columns


@dataclass(frozen=True)
class Thing:
    name: str
    size: int | None = None
    time: float | None = None
    good: bool = True


COLUMNS: Columns[Thing] = Columns(
    [
        Column("thing", lambda thing: thing.name),
        Column("size", lambda thing: thing.size, "bytes"),
        Column("time", lambda thing: thing.time, "ms", "how long"),
        Column("good", lambda thing: thing.good),
    ]
)
THINGS = [Thing("a", 3 * 2**20, 1.5), Thing("b|[red]x[/]\n<i>", None, None, good=False)]


def printed(columns: Columns[Thing]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(columns.terminal("[bold]things[/]", THINGS))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_scripts_get_bare_values_with_units_in_the_names() -> None:
    rows = list(csv.DictReader(io.StringIO(COLUMNS.csv(THINGS))))
    assert rows[0] == {"thing": "a", "size_bytes": str(3 * 2**20), "time_ms": "1.5", "good": "True"}
    assert rows[1] == {"thing": "b|[red]x[/]\n<i>", "size_bytes": "", "time_ms": "", "good": "False"}


def test_people_get_units_beside_the_figures_everywhere() -> None:
    page = COLUMNS.page(THINGS, kind=lambda thing: "strange" if thing.size is None else "")
    assert page.rows[0] == ("", ["a", "3.0 MiB", "1.50 ms", "yes"])
    assert page.rows[1] == ("strange", ["b|[red]x[/]\n<i>", "–", "–", "no"])
    assert [column.right for column in page.columns] == [False, True, True, False]
    for text in (COLUMNS.markdown(THINGS), COLUMNS.plain(THINGS), printed(COLUMNS)):
        assert "3.0 MiB" in text and "1.50 ms" in text and "how long" in text


def test_nothing_in_a_row_is_markup() -> None:
    assert "[red]x[/]" in printed(COLUMNS) and "[bold]things[/]" in printed(COLUMNS)
    assert "b\\|\\[red\\]x\\[/\\] &lt;i&gt;" in COLUMNS.markdown(THINGS)


def test_a_strong_row_is_bold_in_markdown() -> None:
    lines = COLUMNS.markdown(THINGS, strong=lambda thing: thing.name == "a").splitlines()
    assert "**a**" in lines[2] and "**3.0 MiB**" in lines[2] and "**" not in lines[3]


def test_columns_are_picked_in_order_and_left_out_where_nothing_is_known() -> None:
    assert COLUMNS.pick("size", "thing").csv(THINGS[:1]) == f"size_bytes,thing\n{3 * 2**20},a\n"
    assert COLUMNS.known_in(THINGS[1:], "size", "time").csv(THINGS[1:]).startswith("thing,good\n")
    assert COLUMNS.known_in(THINGS, "size", "time").csv(THINGS).startswith("thing,size_bytes,time_ms,good\n")
