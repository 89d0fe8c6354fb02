"""Terminal tables of predictions: of texts, and of similarities between texts."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return label and probability per text, or why there is none; ``name`` is the run's or bundle's."""

    def text(prediction: Row) -> Text:
        line = " ⁄ ".join(str(prediction[key]) for key in ("text", "pair") if key in prediction)
        line = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
        return Text.assemble(line, (" (cut to the model's length)" if prediction.get("truncated") else "", "yellow"))

    columns: Columns[Row] = Columns(
        [
            Column("label", text=lambda row: Text(str(row.get("label") or DASH), "bold")),
            Column("probability", layout="{:.3f}"),
            Column("loops", number=True),
            Column("text", text=text),
            Column(ERROR, text=lambda row: Text(str(row.get(ERROR, "")), "red")),
        ]
    )
    return columns.drop_empty(predictions, "loops", ERROR).terminal(f"{name} · {artifact}", predictions)


def similarity_table(name: str, similarities: Similarities) -> TerminalTable[Any]:
    """Return the cosines of texts with each other, or the nearest texts of a list; ``name``: the run's or bundle's."""
    title, texts, cosines = f"{name} · {similarities.artifact}", similarities.texts, similarities.cosines
    rows: list[dict[str, Any]] = []
    columns: Columns[dict[str, Any]]
    if len(texts) == 1 and similarities.nearest is None:
        vector: Any = similarities.predictions[0]["vector"]
        numbers = ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"
        rows = [{"dimensions": len(vector), "vector": numbers, "text": texts[0]}]
        caption = Text("give a second text for their cosine, or --nearest FILE; --json has the whole vector")
        columns = Columns([Column("dimensions", number=True), Column("vector"), Column("text")])
        return columns.terminal(title, rows, caption)
    if len(texts) <= MAX_MATRIX and similarities.nearest is None:
        for number, (text, values) in enumerate(zip(texts, cosines, strict=True), start=1):
            cells = {str(index): "" if index == number else f"{cosine:.4f}" for index, cosine in enumerate(values, 1)}
            rows.append({"": number, **cells, "text": text})
        columns = Columns(Column(key, number=key != "text") for key in rows[0])
        return columns.terminal(title, rows)
    nearest = similarities.nearest or []
    for row, values in enumerate(cosines if similarities.nearest is None else ()):
        closest = max((index for index in range(len(texts)) if index != row), key=values.__getitem__)
        nearest.append([Match(texts[closest], values[closest])])
    for text, matches in zip(texts, nearest, strict=True):
        for rank, match in enumerate(matches, start=1):
            rows.append(
                {"text": text if rank == 1 else "", "rank": rank, "cosine": match.cosine, "nearest": match.text}
            )
    columns = Columns(
        [Column("text"), Column("rank", number=True), Column("cosine", layout="{:.4f}"), Column("nearest")]
    )
    return columns.terminal(title, rows)
