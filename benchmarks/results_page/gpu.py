"""Figures of GPUs: a table for each committed JSON of a row of the checklist, or a note that none exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.frame import RESULTS, markdown
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import CLOSED, Column, Row
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.units import markdown as escaped

NONE = "**No figure was measured on a GPU.**"
SUMMARY = {
    "prediction_off": "predicted tensors over the measured peak, less one",
    "within": "as wanted",
    "with_reserve_off": "predicted peak with its reserve over the reserved peak, less one",
    "measured_with": "measured by",
    "cases": "measurements",
    "held": "of them within the estimated range",
    "median_log2": "median size of log2(measured / estimated)",
    "worst_log2": "largest size of log2(measured / estimated)",
    "over_stacked": "energy over that of stacked layers in the same format",
    "claimed": "claimed ratios, by exit",
}
"""Key of a summary → what the page calls it; others are called by their words."""


def gpu(folder: Path = RESULTS) -> str:
    """Return a headline, and a part per card and row, in the checklist's order; results of a card lie in its folder.

    Raises InputError: the figures of a dry run are among them.
    """
    topics = {row.topic: row for row in ROWS}
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(document, dict) and document.get("topic") in topics and "gpu" in document):
            continue
        if document["dry_run"]:
            raise InputError(f"{path}: is of a dry run, whose figures mean nothing; remove it")
        newest[path.parent.name, document["topic"]] = document
    ordered = sorted(newest.items(), key=lambda item: (item[0][0], topics[item[0][1]].number))
    if not ordered:
        return NONE
    documents = [document for _, document in ordered]
    cards = ", ".join(dict.fromkeys(document["gpu"] for document in documents))
    finished = sum(document["complete"] for document in documents)
    headline = f"**Of {len(ROWS)} measurements, {len(documents)} were begun on {cards}, and {finished} are finished.**"
    return "\n\n".join([headline, *(_section(topics[topic], document) for (_, topic), document in ordered)])


def _section(row: Row, document: dict[str, Any]) -> str:
    parts = [f"## {row.question[0].upper()}{row.question[1:]} ({document['gpu']})"]
    torch = document["versions"].get("torch", "–")
    script = f"`benchmarks/gpu/{row.topic.replace('-', '_')}.py` of commit {CLOSED}"
    command = script if row.measure is None else f"`python -m benchmarks gpu --rows {row.number}`"
    parts.append(
        f"{command}, {document['began'][:10]}, torch {torch}, commit {document['commit']}. A good result: {row.wanted}."
    )
    if not document["complete"]:
        remaining = ", ".join(document.get("left", []))
        parts.append(f"Not finished{'; next: ' + escaped(remaining) if remaining else ''}.")
    parts += [document["note"]] if "note" in document else []
    cases = document["cases"]
    parts.append(variants(row.variants, cases) if row.variants is not None else table(row.columns, cases))
    tables = {name: case["figures"] for name, case in document["cases"].items() if "rows" in case.get("figures", {})}
    for name, figures in {**document.get("partial", {}), **tables}.items():
        parts += [f"{escaped(Path(name).stem)}:", _study(figures)]
    # What each variant saves is in its table already.
    summary = {} if row.variants is not None else document["summary"]
    lines = [f"- {SUMMARY.get(key, key.replace('_', ' '))}: {_said(value)}" for key, value in summary.items()]
    if lines:
        parts += [*([] if document["complete"] else ["So far:"]), "\n".join(lines)]
    return "\n\n".join(parts)


def table(columns: tuple[Column, ...], cases: dict[str, Any]) -> str:
    """A line for every case; of one that failed, why."""
    lines = []
    for name, case in cases.items():
        figures = case.get("figures")
        cells = [_cell(column, figures) for column in columns] if figures is not None else ["–"] * len(columns)
        lines.append([escaped(name), *cells, escaped(case.get("failed", ""))])
    header = ["case", *(column.heading for column in columns), "failed"]
    if not any(line[-1] for line in lines):
        header, lines = header[:-1], [line[:-1] for line in lines]
    return markdown(header, lines)


def variants(column: Column, cases: dict[str, Any]) -> str:
    """One figure of cases named "model, shape, variant": a line per model and shape, a column per variant."""
    lines: dict[str, dict[str, str]] = {}
    for name, case in cases.items():
        if name.count(", ") >= 2:
            model, shape, variant = name.split(", ", 2)
            lines.setdefault(f"{model}, {shape}", {})[variant] = _cell(column, case.get("figures"))
    names = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    rows = [[escaped(place), *(cells.get(name, "–") for name in names)] for place, cells in lines.items()]
    return f"{column.heading}:\n\n{markdown(['case', *names], rows)}"


def _cell(column: Column, figures: dict[str, Any] | None) -> str:
    results: Any = figures
    for part in column.key.split("."):
        try:
            results = results[int(part)] if isinstance(results, list) else results[part]
        except (KeyError, IndexError, TypeError):
            return "–"
    return "–" if results is None else escaped(column.format.format(results))


def _study(figures: dict[str, Any]) -> str:
    """A study's rows: mean ± standard deviation (number of seeds), and what was published."""
    rows = figures["rows"]
    keys = list(dict.fromkeys(key for cells in rows.values() for key in cells))
    return markdown(
        ["row", *keys], [[escaped(name), *(_mean(cells.get(key)) for key in keys)] for name, cells in rows.items()]
    )


def _mean(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    spread = f" ± {cell['sd']:.2g} ({cell['n']})" if cell["sd"] is not None else ""
    published = f"; published {cell['published']:g}" if cell["published"] is not None else ""
    return f"{cell['mean']:.4g}{spread}{published}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{escaped(str(key)).replace('_', ' ')}: {_said(item)}" for key, item in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else escaped(str(value))
