"""What several commands share: options, and how results are printed.

Results go to stdout; progress and messages go to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeformer.artifacts.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from edgeformer.artifacts.progress import Progress
    from edgeformer.artifacts.recipe import Recipe

WIDTH_IN_A_PIPE = 140
ADVANCED = "Advanced"
"""Panel of `--help` for options that are rarely used."""

Artifacts = Annotated[Path, typer.Option("--artifacts", metavar="DIR", help="The folder that holds the runs.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on stdout; everything else on stderr.")
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="onnxruntime, openvino (needs its extra) or all; or one provider by its name, e.g. openvino-cpu-bf16. "
        "Default: what profile --search found faster on this machine, else onnxruntime.",
    ),
]
_USUAL_RUNTIME = (
    "Default: what profile --search found faster on this machine, else onnxruntime; a run's own weights on a CUDA card "
    "where torch sees one."
)
AnyRuntime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="onnxruntime, openvino (needs its extra) or all; or one provider by its name, e.g. openvino-cpu-bf16, and "
        "torch-cpu or torch-cuda of a run's own weights. " + _USUAL_RUNTIME,
    ),
]
OneRuntime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="onnxruntime or openvino (needs its extra); or one provider by its name, e.g. openvino-cpu-bf16, and with "
        "--artifact torch torch-cpu or torch-cuda. " + _USUAL_RUNTIME,
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        metavar="NAME",
        help="Of the file, e.g. cp1252, latin-1 or utf-16. Default: UTF-8.",
        rich_help_panel=ADVANCED,
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's name or folder, a bundle's folder, or an artifact file. Default: the newest finished run.",
    ),
]
RunOrGraph = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's name or folder, a bundle's folder, an artifact file, or any .onnx file. Default: the newest "
        "finished run.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override a key of the recipe, e.g. [b]training.epochs=3[/b]; the value is YAML. May be repeated.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="INPUT=1x512",
        help="ONNX files: sizes of an input; B stands for what --batch sizes, S for what --seq sizes. May be repeated.",
        rich_help_panel=ADVANCED,
    ),
]
Ranges = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="INPUT=LOW:HIGH",
        help="ONNX files: draw an input's golden numbers evenly from these, both included. May be repeated.",
        rich_help_panel=ADVANCED,
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE.npz",
        help="ONNX files: real inputs, instead of drawn ones.",
        rich_help_panel=ADVANCED,
    ),
]
ArtifactIds = Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this artifact. May be repeated.")]
AllowLeak = Annotated[
    bool,
    typer.Option(
        "--allow-leak", help="Measure a language model although it sees future tokens.", rich_help_panel=ADVANCED
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Read the recipe's parts from files here (train.tsv, dev.tsv, test.tsv, or .csv, .jsonl, .parquet, "
        "also compressed) instead of from the hub.",
    ),
]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FILE", help="Use this tokenizer.json instead.")
]


def stdout() -> Console:
    """For tables and results. In a pipe there is no terminal to measure, so tables get a fixed width."""
    from edgeformer.cli.console import Terminal  # --json has no use for it

    return Terminal(width=None if sys.stdout.isatty() else WIDTH_IN_A_PIPE, highlight=False)


def print_json(document: BaseModel | dict[str, Any]) -> None:
    """The one JSON document of ``--json``."""
    content = document if isinstance(document, dict) else document.model_dump(mode="json", by_alias=True)
    # At once: what cannot be written is an error of the command, not one that the interpreter tells at its end.
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def stdin() -> str:
    """All of standard input. Raises InputError where it is not UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


def integers(text: str | None, option: str) -> tuple[int, ...]:
    """``"1,16"`` → (1, 16); nothing of nothing.

    Args:
        text: whole numbers with commas between them.
        option: for the message.

    Raises:
        typer.BadParameter: it is something else.
    """
    if not text:
        return ()
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write whole numbers separated by commas, e.g. {option} 1,16") from None
    if any(value < 1 for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return values


def resolve_recipe(
    name: str, overrides: list[str] | None, data: Path | None, tokenizer: Path | None, progress: Progress
) -> Recipe:
    """The recipe with its overrides, and with the local files that stand for what it names or would download.

    Raises:
        RecipeError: there is none, or it is not one.
        DataError: the folder does not hold what the recipe needs.
    """
    from edgeformer.artifacts.data_config import FileTokenizer
    from edgeformer.models import load_recipe
    from edgeformer.tasks import task_named

    recipe = load_recipe(name, overrides, progress.message)
    if data is not None:
        section, notes = task_named(recipe.task).local_data(recipe.data, data)
        recipe = recipe.model_copy(update={"data": section})
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer.resolve()))})
    return recipe
