"""Terminal tables of predictions, rankings and similarities of texts."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from edgeformer.artifacts.row_files import ERROR, TableRow
from edgeformer.inference.rank import Ranking, Similarities
from edgeformer.report.columns import DASH, Column, TableColumns, TerminalTable

MAX_TEXT = 200  # characters of a text in a table; JSON has the full text
MAX_MATRIX = 10  # texts of a similarity matrix; more texts are shown each with its nearest neighbour


def prediction_table(name: str, artifact: str, predictions: Sequence[TableRow]) -> TerminalTable[TableRow]:
    """Return label and probability per text, or of each span in it; ``name`` is the run's or bundle's."""
    has_spans = any("spans" in prediction for prediction in predictions)
    rows: list[dict[str, Any]] = [{**prediction} for prediction in predictions]
    if has_spans:  # a line for each span; a text without spans has a line, too
        rows = []
        for prediction in predictions:
            spans: Any = prediction.get("spans") or [{}]
            for number, span in enumerate(spans):
                place = f"{span['start']}–{span['end']}" if span else None
                rows.append({**span, "span": span.get("text"), "characters": place, ERROR: prediction.get(ERROR)})
                rows[-1]["text"] = "" if number else prediction["text"]

    def text(row: TableRow) -> Text:
        line = " ⁄ ".join(str(row[key]) for key in ("text", "pair") if key in row)
        is_cut = " (cut: the model reads only the beginning)" if row.get("truncated") else ""
        return Text.assemble(_shortened(line), (is_cut, "yellow"))

    columns: TableColumns[TableRow] = TableColumns(
        Column("score", layout="{:.4f}"),
        Column("label", text=lambda row: Text(str(row.get("label") or DASH), "bold")),
        Column("span"),
        Column("characters", number=True),
        Column("probability", layout="{:.3f}"),
        Column("loops", number=True),
        Column("text", text=text),
        Column(ERROR, text=lambda row: Text(str(row.get(ERROR) or ""), "red")),
    )
    has_scores = any("score" in row for row in predictions)
    columns = columns.omit(*(("label", "probability") if has_scores else ("score",)))
    columns = columns.omit(*(("loops",) if has_spans else ("span", "characters")))
    return columns.drop_empty(rows, "loops", ERROR).terminal(f"{name} · {artifact}", rows)


def ranking_table(title: str, rankings: Sequence[Ranking], caption: str | None) -> TerminalTable[Any]:
    """Return the documents of each query, best first; ``caption``: note below the table."""
    rows: list[dict[str, Any]] = [
        {**asdict(document), "query": ranking.query if document.rank == 1 else ""}
        for ranking in rankings
        for document in ranking.documents
    ]
    columns: TableColumns[dict[str, Any]] = TableColumns(
        *([Column("query")] if len(rankings) > 1 else []),
        Column("rank", number=True),
        Column("score", layout="{:.4f}"),
        Column("row", number=True),
        Column("text", text=lambda row: _shortened(row["text"])),
    )
    return columns.terminal(title, rows, Text(caption) if caption is not None else None)


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def similarity_table(name: str, similarities: Similarities) -> TerminalTable[Any]:
    """Return the similarities of texts; ``name``: the run's or bundle's."""
    title, pairs = f"{name} · {similarities.artifact}", similarities.similarities
    texts = [str(prediction["text"]) for prediction in similarities.predictions]
    rows: list[dict[str, Any]] = []
    columns: TableColumns[dict[str, Any]]
    if len(texts) == 1:
        vector: Any = similarities.predictions[0]["vector"]
        numbers = ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"
        rows = [{"dimensions": len(vector), "vector": numbers, "text": texts[0]}]
        caption = Text("--json prints the whole vector; give a second text, or --query TEXT --file FILE, to compare")
        columns = TableColumns(Column("dimensions", number=True), Column("vector"), Column("text"))
        return columns.terminal(title, rows, caption)
    if len(texts) <= MAX_MATRIX:
        for number, (text, values) in enumerate(zip(texts, pairs, strict=True), start=1):
            cells = {str(index): "" if index == number else f"{value:.4f}" for index, value in enumerate(values, 1)}
            rows.append({"": number, **cells, "text": text})
        columns = TableColumns(*(Column(key, number=key != "text") for key in rows[0]))
        return columns.terminal(title, rows)
    for row, values in enumerate(pairs):
        closest = max((index for index in range(len(texts)) if index != row), key=values.__getitem__)
        rows.append({"text": texts[row], similarities.measure: values[closest], "nearest": texts[closest]})
    columns = TableColumns(Column("text"), Column(similarities.measure, layout="{:.4f}"), Column("nearest"))
    return columns.terminal(title, rows)
