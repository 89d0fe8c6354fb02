"""Options shared by several commands, reading of their values, and printing of results.

Results go to stdout; progress and messages go to stderr.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edgeformer.artifacts.errors import ArtifactError, InputError, nearest_names

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from edgeformer.artifacts.progress import Progress
    from edgeformer.artifacts.recipe import Recipe
    from edgeformer.imports.onnx import OnnxImportOptions
    from edgeformer.run import Location

V = TypeVar("V")

WIDTH_IN_A_PIPE = 140
LEAKS = "leaks future tokens: this model sees the tokens that it predicts, so its scores are void"

advanced = partial(typer.Option, rich_help_panel="Advanced")  # a rarely used option, in a panel of its own
_RUNTIMES = (
    "Runtime: onnxruntime, openvino, litert or executorch (need their extras); or a provider, e.g. openvino-cpu-bf16"
)

Artifacts = Annotated[
    Path,
    typer.Option("--artifacts", metavar="DIR", help="Folder where edgeformer stores runs, device profiles and packs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and everything else on stderr.")]
_RUN = "A run's name or folder, a bundle's folder, an artifact file{}. Default: the newest finished run."
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help=_RUN.format(""))]
RunOrGraph = Annotated[str | None, typer.Argument(metavar="[RUN]", help=_RUN.format(", or any .onnx file"))]
NamedRun = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Name or folder of the run; all arguments are then texts.")
]
Device = Annotated[
    str | None, typer.Option(help="Device profile (edgeformer list devices). Default: the recipe's target.")
]
MeasuredDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device profile (edgeformer list devices), or auto: the one that names the machine. Default: the recipe's "
        "target, else host; with --on: auto.",
    ),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="HOST",
        help="Measure on a machine over SSH: [USER@]HOST, a name of machines add, or local. May be repeated.",
    ),
]
OnOne = Annotated[
    str | None,
    typer.Option("--on", metavar="HOST", help="Run on a machine over SSH: [USER@]HOST or a name of machines add."),
]
Batches = Annotated[
    str | None,
    typer.Option(metavar="N,N…", help="Batch sizes to measure, in rows. Default: that of the device budget."),
]
Lengths = Annotated[
    str | None,
    typer.Option(metavar="N,N…", help="Sequence lengths to measure, in tokens. Default: that of the device budget."),
]
Cosine = Annotated[
    float | None,
    advanced(
        min=-1.0,
        max=1.0,
        help="Language models: exit each token at the first exit whose loop left its state this similar, by the cosine "
        "of both; try 0.99.",
    ),
]
Threads = Annotated[
    str | None,
    advanced(metavar="N,N…", help="Threads per operator. Default: the physical cores available to this process."),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help=f"{_RUNTIMES}; for the run's own weights torch-cpu or torch-cuda. Default: onnxruntime; for "
        "other formats than ONNX their own runtime.",
    ),
]
MeasuredRuntime = Annotated[
    str | None,
    advanced(
        "--runtime",
        metavar="NAME",
        help=f"{_RUNTIMES}; all: every installed one. Default: onnxruntime; with --choose: all.",
    ),
]
ArtifactIds = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Measure only this artifact. May be repeated.")
]
Strict = Annotated[bool, advanced("--strict", help="Measure each row for at least 60 s, for figures to publish.")]
AllowNoise = Annotated[
    bool,
    advanced("--allow-noise", help="Keep the calibration even if other programs disturbed it. Estimates then say so."),
]
AllowLeak = Annotated[
    bool,
    advanced("--allow-leak", help="Accept a language model that sees future tokens. Its files and reports say so."),
]
Shapes = Annotated[
    list[str] | None,
    advanced(
        "--shape",
        metavar="INPUT=1x512",
        help="ONNX files: sizes of an input; B is the batch size, S the sequence length. May be repeated.",
    ),
]
Ranges = Annotated[
    list[str] | None,
    advanced(
        "--range",
        metavar="INPUT=LOW:HIGH",
        help="ONNX files: range of an input's random golden values, both ends included. May be repeated.",
    ),
]
Inputs = Annotated[
    Path | None, advanced("--inputs", metavar="FILE.npz", help="ONNX files: real inputs to use as golden inputs.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override a key of the recipe, e.g. [b]training.epochs=3[/b]; the value is YAML. May be repeated.",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder with train.tsv, dev.tsv and test.tsv (or .csv, .jsonl, .parquet, also compressed). "
        "Replaces the recipe's sources.",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="tokenizer.json that replaces the recipe's tokenizer."),
]
TextColumn = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of the text, or several (title,body); numbers without a header."),
]
LabelColumn = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the label.")]
LabelNames = Annotated[
    str | None, advanced("--labels", metavar="A,B…", help="Names of labels that are numbers, from the smallest.")
]
TestFile = Annotated[
    Path | None, advanced("--test", metavar="FILE", help="Test file; without it a tenth of DATA is held out.")
]
PairColumn = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the second text of a pair.")]
Encoding = Annotated[
    str | None,
    advanced("--encoding", metavar="NAME", help="Encoding of the file, e.g. cp1252 or latin-1. Default: UTF-8."),
]
Delimiter = Annotated[
    str | None,
    advanced("--delimiter", metavar="MARK", help="Between columns: comma, semicolon, tab or bar. Default: detected."),
]
Quote = Annotated[
    str | None, advanced("--quote", metavar="MARK", help="Around texts: double or single. Default: detected.")
]


def stdout() -> Console:
    """Return the console for tables and results; in a pipe, tables have a fixed width."""
    from edgeformer.cli.console import Terminal  # not needed for --json

    return Terminal(emoji=False, width=None if sys.stdout.isatty() else WIDTH_IN_A_PIPE, highlight=False)


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text of any origin with control characters shown as signs; ``err``: on stderr."""
    from edgeformer.artifacts.units import visible  # imports pydantic, which --help does not need

    typer.echo(visible(text) + end, nl=False, err=err)


def show_progress() -> Progress:
    """Show progress as a bar where stderr is a terminal, else as lines, or as ``EDGEFORMER_PROGRESS`` says."""
    from edgeformer.cli.progress import Bars, Events, Lines  # imports rich, which --help does not need

    if os.environ.get("EDGEFORMER_PROGRESS") == "json":
        return Events()
    return Bars() if sys.stderr.isatty() else Lines()


def say_next(command: str, purpose: str = "") -> None:
    """Print the most likely next command, and what it is for."""
    say(f"next    {command}" + (f"   ({purpose})" if purpose else ""))


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
        raise InputError(
            f"standard input is not UTF-8: {error.reason} at byte {error.start}; convert it to UTF-8"
        ) from None


def parse_value(option: str, text: str, parse: Callable[[str], V]) -> V:
    """Return ``parse(text)``. Raises InputError, which names the option, for a ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def integers(text: str | None, option: str) -> tuple[int, ...]:
    """Parse ``"1,16"`` to (1, 16), and None to (). Raises typer.BadParameter unless all are whole numbers ≥ 1."""
    try:
        values = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write integers separated by commas, e.g. {option} 1,16") from None
    if any(value < 1 for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return values


def _stated(context: typer.Context, names: Collection[str]) -> Iterator[Any]:
    """Yield those of the parameters ``names`` that the user stated."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            yield parameter


def refuse_options(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise InputError for the first of these options (parameter names) that the user gave: it would do nothing."""
    for parameter in _stated(context, names):
        raise InputError(f"{parameter.opts[0]}: {reason}")


def forward_options(context: typer.Context, names: Collection[str]) -> list[str]:
    """Return those of the options ``names`` (parameter names) that the user gave, as arguments for another process."""
    arguments: list[str] = []
    for parameter in _stated(context, names):
        value, flag = context.params[parameter.name], parameter.opts[0]
        values = value if isinstance(value, list) else [value]
        arguments += [flag if item is True else f"{flag}={item}" for item in values]
    return arguments


def resolve_recipe(
    name: str, overrides: list[str] | None, data: Path | None, tokenizer: Path | None, progress: Progress
) -> Recipe:
    """Load a recipe with its overrides, and replace its data and tokenizer by local files. Raises InputError."""
    from edgeformer.artifacts.data_config import FileTokenizer
    from edgeformer.data.sources import local_parts
    from edgeformer.models import load_recipe

    recipe = load_recipe(name, overrides, progress.message)
    if data is not None:
        section, notes = local_parts(recipe.data, data)
        recipe = recipe.model_copy(update={"data": section})
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer.resolve()))})
    return recipe


def locate(run: str | None, artifacts: Path) -> Location:
    """Return the run and the bundle that RUN names. Raises InputError or ArtifactError: there is no such run."""
    from edgeformer import run as runs

    return runs.locate(run, artifacts)


def split_run_and_texts(words: list[str], artifacts: Path, run: str | None, command: str) -> tuple[Location, list[str]]:
    """Split the arguments [RUN] TEXT… of ``command`` into the run and the texts.

    With ``run`` (option --run) every word is a text. Otherwise the first word is the run if it names one. A first word
    that can only be a name or a path, and is followed by texts or by standard input, must be a run: a misspelt run
    never becomes a text for another run. Raises InputError or ArtifactError: no such run.
    """
    from edgeformer.artifacts.data_config import NAME_PATTERN
    from edgeformer.run import run_folders

    if run is not None or not words:
        return locate(run, artifacts), words
    first = words[0]
    try:
        return locate(first, artifacts), words[1:]
    except ArtifactError:
        can_name = first != "" and not any(character.isspace() for character in first)
        has_texts = len(words) >= 2
        with suppress(OSError, ValueError):  # stdin is closed; the null device is neither a pipe nor a file
            status = os.fstat(sys.stdin.fileno())
            has_texts |= stat.S_ISFIFO(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size > 0)
        exists = can_name and (os.path.exists(first) or os.path.exists(artifacts / first))  # noqa: PTH110
        if exists or (has_texts and can_name and ("/" in first or "\\" in first)):
            raise
        if has_texts and re.fullmatch(NAME_PATTERN, first) is not None:
            names = [folder.name for folder in run_folders(artifacts)]
            near = nearest_names(first, names, limit=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            dots = " …" if len(words) > 1 else ""
            example = f"edgeformer {command} --run {[*near, *names[::-1], 'RUN'][0]} {first}{dots}"
            runs = ", ".join(names[-8:]) or "none yet"
            raise InputError(
                f"no run {first!r}; {hint}runs in {artifacts}: {runs}; if {first!r} is a text: {example}"
            ) from None
    return locate(None, artifacts), words


def onnx_options(
    shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None, **options: Any
) -> OnnxImportOptions:
    """Parse --shape and --range, and return the options of an ONNX import. Raises InputError."""
    from edgeformer.imports.foreign_graph import parse_range, parse_shape
    from edgeformer.imports.onnx import OnnxImportOptions

    shape_of_input, range_of_input = dict(map(parse_shape, shapes or ())), dict(map(parse_range, ranges or ()))
    return OnnxImportOptions(shapes=shape_of_input, ranges=range_of_input, inputs=inputs, **options)


def locate_or_import(
    run: str | None, artifacts: Path, shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None
) -> Location:
    """Return the location of RUN; an ONNX file outside of a bundle becomes a bundle below ``artifacts``."""
    from edgeformer.bundle import find_enclosing_bundle
    from edgeformer.run import Location

    path = Path(run or "")
    if run is not None and path.suffix == ".onnx" and path.is_file() and find_enclosing_bundle(path) is None:
        from edgeformer.imports.onnx import import_onnx_cached

        progress = show_progress()
        bundle = import_onnx_cached(path, artifacts, onnx_options(shapes, ranges, inputs), progress)
        progress.message(f"{run}: imported as the bundle {bundle}")
        return Location(None, bundle)
    for option, value in {"--shape": shapes, "--range": ranges, "--inputs": inputs}.items():
        if value:
            raise InputError(f"{option}: is for an ONNX file, and a bundle has its inputs; leave it out")
    return locate(run, artifacts)
