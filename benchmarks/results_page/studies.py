"""Committed studies and pictures: benchmarks/results/studies/NAME.json is the table.json that `make study` writes.

Pictures are drawn again only where what they show has changed, because another matplotlib changes every byte. After a
change of the code that draws, remove their drawn.json.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.frame import ROOT
from benchmarks.results_page.provenance import read_json, study_origin
from benchmarks.results_page.tables import FOLDER, printed
from benchmarks.studies.figures import draw_study, figure_titles
from benchmarks.studies.render import Questions, column_legend, finding_of, prose, study_body
from benchmarks.studies.results import StudyTable, kept_documents
from benchmarks.studies.specification import load_study
from edgeformer.artifacts.errors import MissingDependencyError
from edgeformer.artifacts.files import write_text
from edgeformer.report import canvas

STUDIES, STUDY_PICTURES = FOLDER.parent / "studies", ROOT / "docs" / "results" / "studies"
PICTURES = ROOT / "docs" / "results" / "pictures"
DRAWN = "drawn.json"
"""Beside pictures: a digest of what they show, and their names."""


def study_tables(folder: Path = STUDIES) -> dict[str, StudyTable]:
    """Return the committed tables by the names of their studies; ``runs`` in the folder has the single runs."""
    tables = (StudyTable.model_validate(read_json(path), strict=False) for path in sorted(folder.glob("*.json")))
    return {table.study: table for table in tables}


@cache
def questions(study: str) -> Questions:
    """Return the functions that read figures of a committed study, for sentences in templates."""
    table = study_tables()[study]
    return Questions(table.rows, table.pairs)


def study_pages(folder: Path = STUDIES, pictures: Path = STUDY_PICTURES) -> dict[str, str]:
    """Return a page per committed study: finding, table, pictures, protocol, origin.

    Raises MissingDependencyError: pictures must be drawn, and matplotlib is not installed.
    """
    pages = {}
    for name, table in study_tables(folder).items():
        study, _ = load_study(name)
        curves: dict[str, list[list[dict[str, Any]]]] = {}
        for run, keys in {row.run: row.keys for row in table.rows}.items():
            for document in (kept_documents(folder).get(key, {}) for key in keys):
                if document.get("curve"):
                    curves.setdefault(run, []).append(document["curve"])
        # The words are those of the study as it is written now; the figures are those of the table.
        rows = tuple(
            row.model_copy(update=study.runs[row.run].model_dump(include={"label", "group", "note"}))
            for row in table.rows
        )
        words = {"protocol": study.protocol, "notes": study.notes, "rows": rows, "kind": study.table.rows}
        table = table.model_copy(update=words)
        no_figures = {"pairs", "protocol", "notes", "finding"}
        shown = [table.model_dump_json(exclude=no_figures), *(figure.model_dump_json() for figure in study.figures)]
        if any(figure.kind == "curves" for figure in study.figures):
            shown.append(json.dumps(curves))

        def draw(place: Path, table: StudyTable = table, specs: Any = study.figures, lines: Any = curves) -> list[str]:
            return draw_study(place, table, specs, lines)

        names, titles = drawn(pictures / name, shown, draw), figure_titles(study.figures)
        finding = finding_of(study, table.rows, table.pairs) if study.finding else ""
        parts = [
            f"# {table.title}",
            *([prose(finding)] if finding else []),
            *study_body(table, "", {f"{name}/{picture}": titles[picture] for picture in names}),
            "## Columns",
            column_legend(table, study.finding),
            "## Protocol",
            f"{table.element}. {' '.join(table.protocol.split())}",
            study_origin(folder.parent, table),
            f"Raw table: `benchmarks/results/studies/{name}.json`. To run the study again:",
            f"```bash\nmake study NAME={name}\n```",
        ]
        pages[f"{pictures.name}/{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def drawn(folder: Path, shown: Sequence[str], draw: Callable[[Path], list[str]]) -> list[str]:
    """Return the names of the pictures in a folder, after drawing them where they are not those of ``shown``.

    ``shown`` are all figures that decide how they look; ``draw`` draws into the folder and returns the names. Raises
    MissingDependencyError: they must be drawn, and matplotlib is not installed.
    """
    digest, record = hashlib.sha256("\n".join(shown).encode()).hexdigest(), folder / DRAWN
    if record.is_file():
        earlier = json.loads(record.read_text(encoding="utf-8"))
        if earlier["of"] == digest and all((folder / name).is_file() for name in earlier["pictures"]):
            return [*earlier["pictures"]]
    if not canvas.can_draw():
        raise MissingDependencyError(f"{folder}: {canvas.NO_PICTURE}")
    folder.mkdir(parents=True, exist_ok=True)
    names = draw(folder)
    write_text(record, json.dumps({"of": digest, "pictures": names}, indent=2) + "\n")
    return names


def picture(name: str, text: str, command: str) -> str:
    """Return Markdown of a picture that ``python benchmarks/SCRIPT figure FILE …`` draws.

    ``name`` is that of its folder; ``command`` has ``FILE`` where the picture's path is put, and its JSON files behind.
    """
    inputs = [word for word in shlex.split(command)[2:] if word.startswith("benchmarks/")]
    shown = [command, *((ROOT / path).read_text(encoding="utf-8") for path in inputs)]

    def draw(folder: Path) -> list[str]:
        printed(command.replace("FILE", shlex.quote(str(folder / f"{name}.png"))))
        return [f"{name}.png"]

    (file,) = drawn(PICTURES / name, shown, draw)
    return f"![{text}]({PICTURES.name}/{name}/{file})"
