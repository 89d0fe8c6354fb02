"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifacts = Annotated[
    Path, typer.Option("--artifacts", metavar="DIR", help="The folder that holds the runs.", show_default=True)
]
Json = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on stdout; everything else on stderr.")
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's name or folder, a bundle's folder, or an artifact file. Default: the newest finished run.",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override a key of the recipe, e.g. [b]training.epochs=3[/b]; the value is YAML. May be repeated.",
        show_default=False,
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Read the recipe's parts from files here (train.tsv, dev.tsv, test.tsv, or .csv, .jsonl, .parquet, "
        "also compressed) instead of from the hub.",
        show_default=False,
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="Use this tokenizer.json instead.", show_default=False),
]


def integers(text: str, option: str) -> tuple[int, ...]:
    """``"1,16"`` → (1, 16). Raises a usage error that names the option."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write whole numbers separated by commas, e.g. {option} 1,16") from None
    if any(value < 1 for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return values
