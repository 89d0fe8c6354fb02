"""Command init: draft a recipe from a file of labelled texts, or of texts with labelled spans."""

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from edgeformer.cli import options as opt


def command(
    data: Path = Argument(..., metavar="DATA", help="CSV, TSV, JSONL, Parquet or CoNLL file, also compressed."),
    out: Path | None = Option(
        None, "-o", "--out", metavar="FILE", help="Recipe to write. Default: the name of DATA with .yaml."
    ),
    text: opt.TextColumn = None,
    label: opt.LabelColumn = None,
    labels: opt.LabelNames = None,
    pair: opt.PairColumn = None,
    encoding: opt.Encoding = None,
    delimiter: opt.Delimiter = None,
    quote: opt.Quote = None,
    test: opt.TestFile = None,
    source: str | None = Option(
        None, metavar="PATH|NAME", help="Pretrained encoder to start from: a folder, or a name on the hub."
    ),
    model: Literal["linear", "encoder"] | None = Option(
        None, help="Model without a source. Default: the better one on at most 2,000 rows, compared in about a minute."
    ),
    name: str | None = Option(None, help="Name of the recipe. Default: the name of DATA."),
    force: bool = Option(False, "--force", help="Replace an existing recipe."),
    as_json: opt.Json = False,
) -> None:
    """Write a recipe for a file of labelled texts.

    Detect delimiter, columns and labels, print them, and write them to the recipe. The split holds out a tenth of each
    label's texts for validation and another tenth for the test. A linear model and a small encoder are compared on some
    rows; text length, vocabulary size and number of epochs follow from the data. CoNLL files, and JSONL files with
    [b]spans[/b], become recipes of token classifiers.

    Examples:
      edgeformer init reviews.csv
      edgeformer init tickets.tsv --text subject,body --label queue --source path/to/all-MiniLM-L6-v2
    """
    from edgeformer.data.sources import Columns
    from edgeformer.report.tables import column_table
    from edgeformer.training.init import DraftOptions, draft

    columns = Columns(text, pair, label, encoding, labels, delimiter, quote)
    options = DraftOptions(out, columns, source, model, name, force, test)
    recipe = draft(data, options, opt.show_progress())
    if as_json:
        opt.print_json({
            "recipe": str(recipe.path), "name": recipe.name, "source": recipe.guess.source.model_dump(mode="json"),
            "labels": recipe.guess.labels, "rows": recipe.rows,
            "findings": [finding.model_dump(mode="json") for finding in recipe.findings],
            "notes": list(recipe.notes), "lengths": recipe.lengths,
            "comparison": [entry.model_dump() for entry in recipe.comparison], "text": recipe.text,
        })  # fmt: skip
        return
    opt.stdout().print(column_table(data.name, recipe.guess))
    opt.say(f"texts of {recipe.lengths}")
    for note in (*(finding.message for finding in recipe.findings), *recipe.notes):
        opt.say(note)
    for entry in recipe.comparison:
        score = f"accuracy {entry.score:.3f} on {entry.validation_rows:,} validation rows"
        opt.say(f"{entry.family}: {score}, trained on {entry.rows:,} rows in {entry.seconds:.0f} s")
    opt.say(f"\n{recipe.text}\nrecipe  {recipe.path}")
    files = [f'"{file}"' if " " in str(file) else str(file) for file in (recipe.path, data, test) if file is not None]
    purpose = "trains and compares models within minutes, and recommends one"
    opt.say_next(f"edgeformer search {' --test '.join(files[1:])}", purpose)
    opt.say_next(f"edgeformer train {files[0]}")
