"""Command init: draft a recipe from a file of labelled texts."""

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

    Delimiter, columns and labels are detected, shown and written to the recipe, where they can be changed. A tenth of
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

    recipe = draft(data, DraftOptions(out, Columns(text, pair, label, encoding), source, name, force), show_progress())
    if as_json:
        print_json(
            {
                "recipe": str(recipe.path),
                "name": recipe.name,
                "source": recipe.guess.source.model_dump(mode="json"),
                "labels": recipe.guess.labels,
                "rows": recipe.rows,
                "findings": [finding.model_dump(mode="json") for finding in recipe.findings],
                "notes": list(recipe.notes),
                "text": recipe.text,
            }
        )
        return
    console = stdout()
    console.print(column_table(data.name, recipe.guess))
    for note in (*(finding.message for finding in recipe.findings), *recipe.notes):
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"\n{recipe.text}", soft_wrap=True, markup=False)
    console.print(f"recipe  {recipe.path}", soft_wrap=True, markup=False)
    path = f'"{recipe.path}"' if " " in str(recipe.path) else recipe.path
    console.print(f"next    edgeformer train {path}", soft_wrap=True, markup=False)
