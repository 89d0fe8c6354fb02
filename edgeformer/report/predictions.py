"""Terminal tables of predictions: of some texts at once, or of any number of them, line by line as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Any, BinaryIO

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from edgeformer.artifacts.row_files import ERROR, Row
from edgeformer.artifacts.units import visible
from edgeformer.inference.similarity import Similarities
from edgeformer.report.columns import DASH, Column, Columns

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


# Terminal tables of what an embedding model says of texts: cosines, and the nearest of a list.


MOST_IN_A_MATRIX = 10
"""More texts than this are shown each with the one that is nearest to it."""


def similarity_table(name: str, found: Similarities) -> Table:
    """How similar the texts are to each other, or which of a list are nearest to each.

    Args:
        name: of the run or bundle.
        found: of one text or more.
    """
    title = f"{name} · {found.artifact}"
    if found.nearest is not None:
        return _nearest(title, found)
    if len(found.texts) == 1:
        return _vector(title, found)
    return _matrix(title, found) if len(found.texts) <= MOST_IN_A_MATRIX else _pairs(title, found)


def _nearest(title: str, found: Similarities) -> Table:
    rows = [
        (text if rank == 1 else "", rank, match.cosine, match.text)
        for text, matches in zip(found.texts, found.nearest or (), strict=True)
        for rank, match in enumerate(matches, start=1)
    ]
    columns: list[Column[Any]] = [
        Column("text", itemgetter(0)),
        Column("rank", itemgetter(1), number=True),
        Column("cosine", itemgetter(2), text=lambda row: f"{row[2]:.4f}", number=True),
        Column("nearest", itemgetter(3)),
    ]
    return Columns(columns).terminal(title, rows)


def _vector(title: str, found: Similarities) -> Table:
    vector: Any = found.predictions[0]["vector"]
    columns: list[Column[Any]] = [
        Column("dimensions", lambda _: len(vector), number=True),
        Column("vector", lambda _: ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"),
        Column("text", itemgetter(0)),
    ]
    caption = Text("give a second text for their cosine, or --nearest FILE; --json has the whole vector")
    return Columns(columns).terminal(title, [found.texts], caption)


def _matrix(title: str, found: Similarities) -> Table:
    """Two texts have one figure; of more, every text has a number, and a column with its cosines."""
    texts = found.texts
    if len(texts) == 2:
        columns: list[Column[Any]] = [
            Column("cosine", lambda _: found.cosines[0][1], text=lambda _: f"{found.cosines[0][1]:.4f}", number=True),
            Column("text", itemgetter(0)),
            Column("other text", itemgetter(1)),
        ]
        return Columns(columns).terminal(title, [texts])

    def cosine(number: int) -> Column[Any]:
        return Column(
            f"{number + 1}",
            lambda row: found.cosines[row][number],
            text=lambda row: f"{found.cosines[row][number]:.4f}" if row != number else "",
            number=True,
        )

    columns = [
        Column("", lambda row: row + 1, number=True),
        *map(cosine, range(len(texts))),
        Column("text", lambda row: texts[row]),
    ]
    return Columns(columns).terminal(title, range(len(texts)))


def _pairs(title: str, found: Similarities) -> Table:
    """Every text with the other one that is nearest to it."""
    columns: list[Column[Any]] = [
        Column("text", lambda row: found.texts[row]),
        Column("cosine", lambda row: max(_others(found.cosines[row], row)), text=lambda row: _best(found, row)[0]),
        Column("nearest", lambda row: _best(found, row)[1]),
    ]
    return Columns(columns).terminal(title, range(len(found.texts)))


def _others(cosines: Sequence[float], row: int) -> list[float]:
    return [cosine for number, cosine in enumerate(cosines) if number != row]


def _best(found: Similarities, row: int) -> tuple[str, str]:
    cosine, number = max((value, -place) for place, value in enumerate(found.cosines[row]) if place != row)
    return f"{cosine:.4f}", found.texts[-number]
