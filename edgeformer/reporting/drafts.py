"""What was guessed of somebody's file of data."""

from __future__ import annotations

from operator import attrgetter

from rich.table import Table
from rich.text import Text

from edgeformer.data.guessing import ColumnFacts, Guess
from edgeformer.reporting.columns import Column, Columns

_SHOWN = 40
"""Characters of an example."""
_NAMED = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


def column_table(name: str, guess: Guess) -> Table:
    """The columns of the file ``name``: what each is taken for, and why."""
    source = guess.source
    roles = {source.text: "text", source.text_pair: "second text", source.label: "label"}

    def example(column: ColumnFacts) -> str:
        line = " ".join(column.example.split())
        return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"

    def different(column: ColumnFacts) -> int | None:
        return len(column.values) if column.values is not None else None

    columns: Columns[ColumnFacts] = Columns(
        [
            Column("column", attrgetter("name"), text=lambda column: Text(column.name)),
            Column("read as", lambda column: roles.get(column.name)),
            Column("filled", attrgetter("filled"), text=lambda column: f"{column.filled:,}", number=True),
            Column("different values", different, text=lambda c: str(different(c) or "many"), number=True),
            Column("first", example, text=lambda column: Text(example(column))),
        ]
    )
    parted = f", parted by {_NAMED[source.delimiter]}" if source.delimiter else ""
    header = "" if source.header else ", the first line names no columns"
    counted = [f"{label} {rows:,}" for label, rows in guess.labels.items()]
    labels = ", ".join(counted[:12]) + (f" … ({len(counted)} in all)" if len(counted) > 12 else "")
    return columns.terminal(f"{name}: {guess.rows:,} rows{parted}{header}", guess.columns, Text(f"labels: {labels}"))
