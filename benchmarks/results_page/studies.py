"""Committed studies: benchmarks/results/studies/NAME.json is the table.json that `make study NAME=NAME` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page.committed import tables
from benchmarks.results_page.pictures import drawn
from benchmarks.results_page.provenance import study_origin
from benchmarks.results_page.tables import FOLDER, ROOT
from benchmarks.studies import figures
from benchmarks.studies.finding import finding_of
from benchmarks.studies.render import study_markdown, study_picks, study_remarks, study_sources
from benchmarks.studies.results import StudyTable
from benchmarks.studies.specification import FigureSpec, load_study
from edgeformer.artifacts.units import markdown
from edgeformer.report import canvas

STANDS_IN = "in place of the hub's"
STUDIES, PICTURES = FOLDER.parent / "studies", ROOT / "docs" / "studies"


def studies(folder: Path = STUDIES, pictures: Path = PICTURES) -> str:
    """A section per committed study: what it is, its table and pictures, what took how long; empty without any.

    Args:
        folder: of the tables; files of single runs lie beside them.
        pictures: where they are drawn, a folder per study; as seen from docs/.

    Raises:
        InputError: a table shows a part of its study, or a study that was changed.
        MissingDependencyError: pictures must be drawn, and matplotlib is not installed.
    """
    return "\n\n".join(_section(document, folder, pictures) for document in tables(folder))


def _section(document: dict[str, Any], folder: Path, pictures: Path) -> str:
    table = StudyTable.model_validate(document, strict=False)
    study, _ = load_study(table.study)
    names = _pictures(pictures / table.study, table, study.figures, _curves(folder, table))
    parts = [
        f"### {table.title}",
        f"`make study NAME={table.study}`: {table.element}. {' '.join(table.protocol.split())}",
        study_origin(folder.parent, table),
        study_markdown(table).rstrip("\n"),
        f"The paper's figures: {markdown(source)}." if (source := study_sources(table)) else "",
        markdown(finding_of(study, table.rows)) if study.finding else "",
        "\n".join(study_picks(table)),
        f"{table.minutes:,.0f} minutes of training in all: {'; '.join(table.hosts)}." if table.hosts else "",
        f"Times: {table.times}." if table.times else "",
        *(f"![{table.title}]({pictures.name}/{table.study}/{name})" for name in names),
        "\n".join(f"- {markdown(remark)}" for remark in (*other_data(table), *study_remarks(table))),
    ]
    return "\n\n".join(part for part in parts if part)


def other_data(table: StudyTable) -> list[str]:
    """What files of this machine stood in for, where they hold other rows than the hub's data set."""
    notes = dict.fromkeys(note for row in table.data.values() for note in row if STANDS_IN in note)
    rows = {note: [row for row, row_notes in table.data.items() if note in row_notes] for note in notes}
    same = re.compile(r": the same [\d,]+ rows$")
    return [f"{', '.join(of)}: {note}" for note, of in rows.items() if not same.search(note)]


def _curves(folder: Path, table: StudyTable) -> dict[str, list[list[dict[str, Any]]]]:
    """Return run → the records of each of its committed seeds."""
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for run, keys in {row.run: row.keys for row in table.rows}.items():
        for path in (folder / f"{key}.json" for key in keys):
            if path.is_file() and (curve := json.loads(path.read_text(encoding="utf-8")).get("curve")):
                curves.setdefault(run, []).append(curve)
    return curves


def _pictures(
    folder: Path, table: StudyTable, specs: Sequence[FigureSpec], curves: dict[str, list[list[dict[str, Any]]]]
) -> list[str]:
    """Names of the pictures of a study."""
    displayed = [table.model_dump_json(), *(figure.model_dump_json() for figure in specs)]
    if any(figure.kind == "curves" for figure in specs):
        displayed.append(json.dumps(curves))
    displayed += [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (figures, canvas)]
    return drawn(folder, displayed, lambda place: figures.draw_study(place, table, specs, curves))
