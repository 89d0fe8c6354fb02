"""edgeformer init: a file of texts with labels becomes a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Encoding, Json, print_json, stdout


def command(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A CSV, TSV, JSONL or Parquet file, also compressed.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="The recipe. Default: DATA's name with .yaml."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column of the text; its number if the first line names no columns."),
    ] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the label.")] = None,
    pair: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of a second text.")] = None,
    encoding: Encoding = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="PATH|NAME", help="Start from this pretrained encoder: a folder, or a name on the hub."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the recipe. Default: DATA's name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a recipe from a file of texts with labels: a dozen lines that train as they stand.

    Delimiter, columns and labels are guessed and shown, and stand in the recipe, where they can be changed. A tenth of
    the texts of each label is held out for validation, another tenth for the test. Length, vocabulary and epochs are
    fitted to the rows.

    Examples:

      edgeformer init reviews.csv

      edgeformer init tickets.tsv --text subject --label queue --source path/to/all-MiniLM-L6-v2
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.data.sources import Columns
    from edgeformer.report.tables import column_table
    from edgeformer.training.init import DraftOptions, draft

    found = draft(data, DraftOptions(out, Columns(text, pair, label, encoding), source, name, force), show_progress())
    if as_json:
        print_json(
            {
                "recipe": str(found.path),
                "name": found.name,
                "source": found.guess.source.model_dump(mode="json"),
                "labels": found.guess.labels,
                "rows": found.rows,
                "findings": [finding.model_dump(mode="json") for finding in found.findings],
                "notes": list(found.notes),
                "text": found.text,
            }
        )
        return
    console = stdout()
    console.print(column_table(data.name, found.guess))
    for note in (*(finding.message for finding in found.findings), *found.notes):
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"\n{found.text}", soft_wrap=True, markup=False)
    console.print(f"recipe  {found.path}", soft_wrap=True, markup=False)
    path = f'"{found.path}"' if " " in str(found.path) else found.path
    console.print(f"next    edgeformer train {path}", soft_wrap=True, markup=False)
