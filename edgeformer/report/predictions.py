"""Terminal tables of predictions: of a few texts, of a stream of texts, and of similarities between texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Any, BinaryIO

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from edgeformer.artifacts.row_files import ERROR, Row
from edgeformer.artifacts.units import visible
from edgeformer.inference.predict import Similarities
from edgeformer.report.columns import DASH, Column, Columns

MAX_TEXT = 200
"""Characters of a text in a table; JSON has the full text."""
MAX_MATRIX = 10
"""Texts of a similarity matrix; more texts are shown each with its nearest neighbour."""
_MIN_TEXT_WIDTH = 20
_INPUTS = ("text", "pair")
_NOT_STREAMED = (*_INPUTS, "truncated", ERROR)


def _input_text(prediction: Mapping[str, Any]) -> str:
    return " ⁄ ".join(str(prediction[key]) for key in _INPUTS if key in prediction)


def prediction_table(name: str, artifact: str, predictions: Sequence[dict[str, Any]]) -> Table:
    """Return label and probability per text, or why there is none.

    Args:
        name: of the run or bundle.
        artifact: that computed the predictions.
        predictions: as in the JSON output.
    """

    def label(prediction: Mapping[str, Any]) -> Text:
        return Text(prediction["label"], "bold") if prediction.get("label") else Text(DASH)

    def probability(prediction: Mapping[str, Any]) -> str:
        return f"{prediction['probability']:.3f}" if "probability" in prediction else DASH

    def text(prediction: Mapping[str, Any]) -> Text:
        line = _input_text(prediction)
        line = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
        note = (" (cut to the model's length)", "yellow")
        return Text.assemble(line, *([note] if prediction.get("truncated") else []))

    columns: Columns[dict[str, Any]] = Columns(
        [
            Column("label", methodcaller("get", "label"), text=label),
            Column("probability", methodcaller("get", "probability"), text=probability, number=True),
            Column("loops", methodcaller("get", "loops"), number=True),
            Column("text", itemgetter("text"), text=text),
            Column(ERROR, methodcaller("get", ERROR), text=lambda prediction: Text(prediction.get(ERROR, ""), "red")),
        ]
    )
    return columns.drop_empty(predictions, "loops", ERROR).terminal(f"{name} · {artifact}", predictions)


class PredictionLines:
    """Table of any length, a line per row: widths are fixed before the first row, texts are cut to the rest.

    Args:
        stream: for UTF-8 text.
        title: above the table.
        example: a row with every column.
        width: of the terminal, in characters.
    """

    def __init__(self, stream: BinaryIO, title: str, example: Row, width: int) -> None:
        self._stream = stream
        self._widths: dict[str, int] = {}
        labels = example.get("probabilities")
        for name, value in example.items():
            if name in _NOT_STREAMED or value is None or isinstance(value, (dict, list)):
                continue
            if not isinstance(value, str):
                cells = 6
            elif isinstance(labels, dict):  # the value is a label
                cells = min(40, max(cell_len(str(label)) for label in labels))
            else:
                cells = 12
            self._widths[name] = max(len(name), cells)
        self._text_width = max(_MIN_TEXT_WIDTH, width - sum(column + 2 for column in self._widths.values()))
        headings = [
            f"{name:{'>' if isinstance(example[name], (int, float)) else '<'}{column}}"
            for name, column in self._widths.items()
        ]
        rules = ["─" * column for column in (*self._widths.values(), self._text_width)]
        self._write_lines([visible(title), "  ".join([*headings, "text"]), "  ".join(rules)])

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line per row."""
        lines = []
        for row in rows:
            cells = []
            for name, width in self._widths.items():
                value = row.get(name)
                if isinstance(value, (int, float)):
                    cells.append(f"{value:>{width}{'.3f' if isinstance(value, float) else ''}}")
                else:
                    cells.append(_fit(DASH if value in (None, "") else visible(str(value)), width, pad=True))
            text = str(row[ERROR]) if ERROR in row else " ".join(_input_text(row)[: 4 * self._text_width].split())
            lines.append("  ".join([*cells, _fit(visible(text), self._text_width)]).rstrip())
        self._write_lines(lines)

    def close(self) -> None:
        """Do nothing: the table has no last line."""

    def _write_lines(self, lines: Sequence[str]) -> None:
        self._stream.write("".join([f"{line}\n" for line in lines]).encode("utf-8", "replace"))


def _fit(text: str, width: int, *, pad: bool = False) -> str:
    """Cut text to a width in terminal cells; wide characters take two."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width) if pad else text
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    return set_cell_size(text, width) if pad else text


def similarity_table(name: str, similarities: Similarities) -> Table:
    """Return the cosines of texts with each other, or the nearest texts of a list.

    Args:
        name: of the run or bundle.
        similarities: of one or more texts.
    """
    title, texts, cosines = f"{name} · {similarities.artifact}", similarities.texts, similarities.cosines
    columns: list[Column[Any]]
    if similarities.nearest is not None:
        rows = [
            (text if rank == 1 else "", rank, match.cosine, match.text)
            for text, matches in zip(texts, similarities.nearest, strict=True)
            for rank, match in enumerate(matches, start=1)
        ]
        columns = [
            Column("text", itemgetter(0)),
            Column("rank", itemgetter(1), number=True),
            _cosine_column("cosine", itemgetter(2)),
            Column("nearest", itemgetter(3)),
        ]
        return Columns(columns).terminal(title, rows)
    if len(texts) == 1:
        vector: Any = similarities.predictions[0]["vector"]
        columns = [
            Column("dimensions", lambda _: len(vector), number=True),
            Column("vector", lambda _: ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"),
            Column("text", itemgetter(0)),
        ]
        caption = Text("give a second text for their cosine, or --nearest FILE; --json has the whole vector")
        return Columns(columns).terminal(title, [texts], caption)
    if len(texts) == 2:
        columns = [
            _cosine_column("cosine", lambda _: cosines[0][1]),
            Column("text", itemgetter(0)),
            Column("other text", itemgetter(1)),
        ]
        return Columns(columns).terminal(title, [texts])
    if len(texts) <= MAX_MATRIX:
        columns = [
            Column("", lambda row: row + 1, number=True),
            *(
                _cosine_column(str(index + 1), lambda row, index=index: cosines[row][index] if row != index else None)
                for index in range(len(texts))
            ),
            Column("text", lambda row: texts[row]),
        ]
        return Columns(columns).terminal(title, range(len(texts)))

    def nearest(row: int) -> tuple[float, str]:
        cosine, index = max((value, -index) for index, value in enumerate(cosines[row]) if index != row)
        return cosine, texts[-index]

    columns = [
        Column("text", lambda row: texts[row]),
        Column("cosine", lambda row: nearest(row)[0], text=lambda row: f"{nearest(row)[0]:.4f}"),
        Column("nearest", lambda row: nearest(row)[1]),
    ]
    return Columns(columns).terminal(title, range(len(texts)))


def _cosine_column(heading: str, cell: Any) -> Column[Any]:
    """Return a column with four decimals; empty where there is no cosine."""
    return Column(
        heading, cell, text=lambda row: f"{value:.4f}" if (value := cell(row)) is not None else "", number=True
    )
