"""Options shared by several commands, and printing of results.

Results go to stdout; progress and messages go to stderr.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeformer.artifacts.errors import ArtifactError, InputError, nearest_names

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from edgeformer.artifacts.progress import Progress
    from edgeformer.artifacts.recipe import Recipe
    from edgeformer.export.import_onnx import OnnxImportOptions
    from edgeformer.run import Location

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
NamedRun = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run; then every word is a text, also one that looks like a name."),
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
    """Return the console for tables and results; in a pipe, tables have a fixed width."""
    from edgeformer.cli.console import Terminal  # not needed for --json

    return Terminal(width=None if sys.stdout.isatty() else WIDTH_IN_A_PIPE, highlight=False)


def print_json(document: BaseModel | dict[str, Any]) -> None:
    """Print the JSON document of ``--json``."""
    content = document if isinstance(document, dict) else document.model_dump(mode="json", by_alias=True)
    # Flush now, so that a failed write is an error of the command and not a message of the interpreter at exit.
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def stdin() -> str:
    """Read standard input to its end. Raises InputError if it is not UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


def integers(text: str | None, option: str) -> tuple[int, ...]:
    """Parse ``"1,16"`` to (1, 16), and None to ().

    Raises:
        typer.BadParameter: ``text`` is not a list of whole numbers ≥ 1; the message names ``option``.
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
    """Load a recipe with its overrides, and replace its data and tokenizer by local files.

    Raises:
        RecipeError: the recipe does not exist or is invalid.
        DataError: ``data`` lacks files that the recipe needs.
    """
    from edgeformer.artifacts.data_config import FileTokenizer
    from edgeformer.models import load_recipe
    from edgeformer.tasks import get_task

    recipe = load_recipe(name, overrides, progress.message)
    if data is not None:
        section, notes = get_task(recipe.task).local_data(recipe.data, data)
        recipe = recipe.model_copy(update={"data": section})
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer.resolve()))})
    return recipe


def split_run_and_texts(words: list[str], artifacts: Path, run: str | None, command: str) -> tuple[Location, list[str]]:
    """Split the arguments [RUN] TEXT… of ``command`` into the run and the texts.

    With ``run`` (option --run) every word is a text. Otherwise the first word is the run if it names one. A first word
    that can only be a name (letters, digits, ``.``, ``_`` and ``-``) or a path, and is followed by texts or by standard
    input, must be a run: a misspelt run never becomes a text for another run.

    Raises:
        InputError: the first word looks like a run and is none; the message says how to pass it as a text.
        ArtifactError: no such run, or no runs at all.
    """
    from edgeformer.artifacts.data_config import NAME_PATTERN
    from edgeformer.run import locate, path_exists, run_folders

    if run is not None or not words:
        return locate(run, artifacts), words
    first = words[0]
    try:
        return locate(first, artifacts), words[1:]
    except ArtifactError:
        has_space = not first or any(character.isspace() for character in first)
        has_texts = len(words) >= 2 or _stdin_has_input()
        exists = not has_space and (path_exists(Path(first)) or path_exists(artifacts / first))
        if exists or (has_texts and not has_space and ("/" in first or "\\" in first)):
            raise
        if has_texts and re.fullmatch(NAME_PATTERN, first) is not None:
            names = [folder.name for folder in run_folders(artifacts)]
            near = nearest_names(first, names, limit=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            runs = ", ".join(names[-8:]) or "none yet"
            example = f"edgeformer {command} --run {near[0] if near else names[-1] if names else 'RUN'} {first}"
            dots = " …" if len(words) > 1 else ""
            raise InputError(
                f"no run {first!r}; {hint}runs in {artifacts}: {runs}; if it is a text: {example}{dots}"
            ) from None
    return locate(None, artifacts), words


def _stdin_has_input() -> bool:
    """Return whether standard input is a pipe or a non-empty file (not the null device, not closed)."""
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size > 0)


def wrap_options(
    shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None, **options: Any
) -> OnnxImportOptions:
    """Parse --shape and --range, and return the options of an ONNX import. Raises InputError."""
    from edgeformer.export.foreign_graph import parse_range, parse_shape
    from edgeformer.export.import_onnx import OnnxImportOptions

    shape_of_input, range_of_input = dict(map(parse_shape, shapes or ())), dict(map(parse_range, ranges or ()))
    return OnnxImportOptions(shapes=shape_of_input, ranges=range_of_input, inputs=inputs, **options)


def locate_or_import(
    run: str | None, artifacts: Path, shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None
) -> Location:
    """Return the location of RUN; an ONNX file outside of a bundle becomes a bundle below ``artifacts``.

    Raises:
        InputError: --shape, --range or --inputs for a RUN that is no ONNX file; or RUN cannot be used.
    """
    from edgeformer.bundle import find_enclosing_bundle
    from edgeformer.cli.progress import show_progress
    from edgeformer.run import Location, locate

    path = Path(run or "")
    if run is not None and path.suffix == ".onnx" and path.is_file() and find_enclosing_bundle(path) is None:
        from edgeformer.export.import_onnx import import_onnx_cached

        progress = show_progress()
        bundle = import_onnx_cached(path, artifacts, wrap_options(shapes, ranges, inputs), progress)
        progress.message(f"{run}: measured as the bundle {bundle}")
        return Location(None, bundle)
    for option, value in {"--shape": shapes, "--range": ranges, "--inputs": inputs}.items():
        if value:
            raise InputError(f"{option}: is for an ONNX file; the inputs of a bundle are known")
    return locate(run, artifacts)
