"""Terminal tables of predictions: of some texts at once, or of any number of them, line by line as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Any, BinaryIO

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from edgeformer.formats.escaping import visible
from edgeformer.formats.row_files import ERROR, Row
from edgeformer.reporting.columns import DASH, Column, Columns

MOST_CHARACTERS = 200
"""Of a text in a table; what is behind them is in JSON."""
_LEAST_WIDTH = 20
"""Of the texts in a narrow terminal."""
_GIVEN = ("text", "pair")
_NOT_IN_LINES = (*_GIVEN, "truncated", ERROR)


def prediction_table(name: str, artifact: str, predictions: Sequence[dict[str, Any]]) -> Table:
    """Label and probability per text; in place of them why there is none.

    Args:
        name: of the run or bundle.
        artifact: that answered.
        predictions: as JSON has them.
    """

    def label(prediction: Mapping[str, Any]) -> Text:
        return Text(prediction["label"], "bold") if prediction.get("label") else Text(DASH)

    def given(prediction: Mapping[str, Any]) -> Text:
        note = (" (cut to the model's length)", "yellow")
        return Text.assemble(_shortened(_in_one(prediction)), *([note] if prediction.get("truncated") else []))

    columns: Columns[dict[str, Any]] = Columns(
        [
            Column("label", methodcaller("get", "label"), text=label),
            Column("probability", methodcaller("get", "probability"), text=_probability, number=True),
            Column("loops", methodcaller("get", "loops"), number=True),
            Column("text", itemgetter("text"), text=given),
            Column(ERROR, methodcaller("get", ERROR), text=lambda found: Text(found.get(ERROR, ""), "red")),
        ]
    )
    return columns.known_in(predictions, "loops", ERROR).terminal(f"{name} · {artifact}", predictions)


def _probability(prediction: Mapping[str, Any]) -> str:
    return f"{prediction['probability']:.3f}" if "probability" in prediction else DASH


def _in_one(prediction: Mapping[str, Any]) -> str:
    return " ⁄ ".join(str(prediction[key]) for key in _GIVEN if key in prediction)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


class PredictionLines:
    """A table of any length: the widths are fixed before the first row, one line each, texts cut to what is left.

    Args:
        stream: for UTF-8 text.
        title: above the table.
        example: a row with every column.
        width: of a line, in characters of a terminal.
    """

    def __init__(self, stream: BinaryIO, title: str, example: Row, width: int) -> None:
        self._stream = stream
        self._widths = {
            name: max(len(name), _widest(name, value, example))
            for name, value in example.items()
            if name not in _NOT_IN_LINES and not isinstance(value, (dict, list)) and value is not None
        }
        taken = sum(column + 2 for column in self._widths.values())
        self._room = max(_LEAST_WIDTH, width - taken)
        numbers = {name for name in self._widths if isinstance(example[name], (int, float))}
        heads = [f"{name:{'>' if name in numbers else '<'}{column}}" for name, column in self._widths.items()]
        rules = ["─" * column for column in (*self._widths.values(), self._room)]
        self._say([visible(title), "  ".join([*heads, "text"]), "  ".join(rules)])

    def write(self, rows: Sequence[Row]) -> None:
        """Add lines."""
        self._say([self._line(row) for row in rows])

    def close(self) -> None:
        """Nothing stands below the last line."""

    def _line(self, row: Row) -> str:
        cells = [_cell(row.get(name), width) for name, width in self._widths.items()]
        text = f"{row[ERROR]}" if ERROR in row else " ".join(_in_one(row)[: 4 * self._room].split())
        return "  ".join([*cells, _fit(visible(text), self._room)]).rstrip()

    def _say(self, lines: Sequence[str]) -> None:
        self._stream.write("".join([f"{line}\n" for line in lines]).encode("utf-8", "replace"))


def _widest(name: str, value: object, example: Row) -> int:
    """How wide the values of a column are: a label is one of those that have a probability."""
    others = example.get("probabilities")
    if isinstance(value, str) and isinstance(others, dict):
        return min(40, max(cell_len(str(other)) for other in others))
    return 12 if isinstance(value, str) else 6


def _cell(value: object, width: int) -> str:
    if isinstance(value, float):
        return f"{value:>{width}.3f}"
    if isinstance(value, int):
        return f"{value:>{width}}"
    return _fit(DASH if value in (None, "") else visible(str(value)), width, pad=True)


def _fit(text: str, width: int, *, pad: bool = False) -> str:
    """Cut to a width, which wide characters fill twice as fast."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width) if pad else text
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    return set_cell_size(text, width) if pad else text
