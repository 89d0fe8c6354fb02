"""A study's folder: table.md, table.csv, table.json, its pictures and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.study import Study
from edgeformer.formats.study_result import StudyTable
from edgeformer.reporting.study_figures import draw_study
from edgeformer.reporting.study_tables import study_csv, study_markdown, study_page
from edgeformer.studies.jobs import Job
from edgeformer.studies.results import Results


def write_study(folder: Path, study: Study, table: StudyTable, jobs: Sequence[Job], results: Results) -> list[Path]:
    """Write all of it, each file as a whole or not at all.

    Returns:
        The files, README.md first.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", table)
    write_text(folder / "table.csv", study_csv(table))
    write_text(folder / "table.md", study_markdown(table))
    figures = draw_study(folder, table, study.figures, _curves(jobs, results))
    write_text(folder / "README.md", study_page(table, figures))
    return [folder / name for name in ("README.md", "table.md", "table.csv", "table.json", *figures)]


def _curves(jobs: Sequence[Job], results: Results) -> dict[str, list[Sequence[dict[str, Any]]]]:
    """Return run → the records of each of its seeds that has any."""
    curves: dict[str, list[Sequence[dict[str, Any]]]] = {}
    for job in jobs:
        known = results.of(job)
        if known is not None and known.run.curve:
            curves.setdefault(job.row, []).append(known.run.curve)
    return curves
