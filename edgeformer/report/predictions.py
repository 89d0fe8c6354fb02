"""Terminal tables of predictions: of texts, and of similarities between texts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter, methodcaller
from typing import Any

from rich.text import Text

from edgeformer.artifacts.row_files import ERROR, Row
from edgeformer.inference.predict import Match, Similarities
from edgeformer.report.columns import DASH, Column, Columns, TerminalTable

MAX_TEXT = 200
"""Characters of a text in a table; JSON has the full text."""
MAX_MATRIX = 10
"""Texts of a similarity matrix; more texts are shown each with its nearest neighbour."""


def prediction_table(name: str, artifact: str, predictions: Sequence[Row]) -> TerminalTable[Row]:
    """Return label and probability per text, or why there is none.

    Args:
        name: of the run or bundle.
        artifact: that computed the predictions.
        predictions: as in the JSON output.
    """

    def text(prediction: Row) -> Text:
        line = " ⁄ ".join(str(prediction[key]) for key in ("text", "pair") if key in prediction)
        line = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
        note = (" (cut to the model's length)", "yellow")
        return Text.assemble(line, *([note] if prediction.get("truncated") else []))

    columns: Columns[Row] = Columns(
        [
            Column("label", methodcaller("get", "label"), text=lambda row: Text(str(row.get("label") or DASH), "bold")),
            Column("probability", methodcaller("get", "probability"), layout="{:.3f}"),
            Column("loops", methodcaller("get", "loops"), number=True),
            Column("text", itemgetter("text"), text=text),
            Column(ERROR, methodcaller("get", ERROR), text=lambda row: Text(str(row.get(ERROR, "")), "red")),
        ]
    )
    return columns.drop_empty(predictions, "loops", ERROR).terminal(f"{name} · {artifact}", predictions)


def similarity_table(name: str, similarities: Similarities) -> TerminalTable[Any]:
    """Return the cosines of texts with each other, or the nearest texts of a list.

    Args:
        name: of the run or bundle.
        similarities: of one or more texts.
    """
    title, texts, cosines = f"{name} · {similarities.artifact}", similarities.texts, similarities.cosines
    caption = None
    columns: list[Column[Any]]
    rows: Sequence[Any] = range(len(texts))
    if len(texts) == 1 and similarities.nearest is None:
        vector: Any = similarities.predictions[0]["vector"]
        columns = [
            Column("dimensions", lambda _: len(vector), number=True),
            Column("vector", lambda _: ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"),
            Column("text", lambda row: texts[row]),
        ]
        caption = Text("give a second text for their cosine, or --nearest FILE; --json has the whole vector")
    elif len(texts) <= MAX_MATRIX and similarities.nearest is None:
        columns = [
            Column("", lambda row: row + 1, number=True),
            *(
                Column(
                    str(index + 1),
                    lambda row, index=index: f"{cosines[row][index]:.4f}" if row != index else "",  # type: ignore[misc]
                    number=True,
                )
                for index in range(len(texts))
            ),
            Column("text", lambda row: texts[row]),
        ]
    else:
        columns = [
            Column("text", itemgetter(0)),
            Column("rank", itemgetter(1), number=True),
            Column("cosine", itemgetter(2), layout="{:.4f}"),
            Column("nearest", itemgetter(3)),
        ]
        nearest = similarities.nearest or []
        for row, values in enumerate(cosines if similarities.nearest is None else ()):
            closest = max((index for index in range(len(texts)) if index != row), key=values.__getitem__)
            nearest.append([Match(texts[closest], values[closest])])
        rows = [
            (text if rank == 1 else "", rank, match.cosine, match.text)
            for text, matches in zip(texts, nearest, strict=True)
            for rank, match in enumerate(matches, start=1)
        ]
    return Columns(columns).terminal(title, rows, caption)
