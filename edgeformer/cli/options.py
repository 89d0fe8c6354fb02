"""Options that several commands share, what their text stands for, and the extra that a command needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from edgeformer.formats.errors import MissingDependencyError, install_hint

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
    """``"1,16"`` → (1, 16).

    Args:
        text: whole numbers with commas between them.
        option: for the message.

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write whole numbers separated by commas, e.g. {option} 1,16") from None
    if any(value < 1 for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return values


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Wrap the imports of a command whose packages come with an extra.

    Args:
        extra: its name.
        purpose: what the packages are needed for.

    Raises:
        MissingDependencyError: one of them is not installed; the message names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("edgeformer"):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {error.name}, which is not installed; install it with: {install_hint(extra)}"
        ) from None
