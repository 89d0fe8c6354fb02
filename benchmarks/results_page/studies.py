"""Committed studies: benchmarks/results/studies/NAME.json is the table.json that `edgeformer study NAME` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results_page.tables import FOLDER, ROOT

STUDIES, PICTURES = FOLDER.parent / "studies", ROOT / "docs" / "studies"


def committed(folder: Path = STUDIES) -> list[dict[str, Any]]:
    """The tables among the files of a folder, by name; files of single runs lie beside them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [document for document in found if "study" in document and "columns" in document]


def studies(folder: Path = STUDIES, pictures: Path = PICTURES) -> str:
    """A section per committed study: what it is, its table and pictures, what took how long; empty without any.

    Args:
        folder: of the tables.
        pictures: where they are drawn, a folder per study; as seen from docs/.
    """
    return "\n\n".join(_section(document, pictures) for document in committed(folder))


def _section(document: dict[str, Any], pictures: Path) -> str:
    from edgeformer.formats.study import load_study
    from edgeformer.formats.study_result import StudyTable
    from edgeformer.reporting.study_figures import draw_study
    from edgeformer.reporting.study_tables import study_markdown

    table = StudyTable.model_validate(document, strict=False)
    study, _ = load_study(table.study)
    own = pictures / table.study
    own.mkdir(parents=True, exist_ok=True)
    names = draw_study(own, table, [figure for figure in study.figures if figure.kind != "curves"], {})
    parts = [
        f"### {table.title}",
        f"`edgeformer study {table.study}`: {table.element}. {' '.join(table.protocol.split())}",
        study_markdown(table).rstrip("\n"),
        f"{table.minutes:,.0f} minutes of training in all: {'; '.join(table.hosts)}." if table.hosts else "",
        *(f"![{table.title}]({pictures.name}/{table.study}/{name})" for name in names),
        "\n".join(f"- {note}" for note in table.notes),
    ]
    return "\n\n".join(part for part in parts if part)
