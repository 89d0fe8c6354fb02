"""Command tree, and the conversion of errors into exit codes."""

import atexit
import copy
import gc
import inspect
import json
import os
import re
import sys
from importlib import import_module
from typing import Annotated

import typer

from edgeformer._version import __version__
from edgeformer.artifacts.errors import AlreadyReported, EdgeformerError, InputError
from edgeformer.cli import import_model, machines
from edgeformer.system.child import end_with_parent

app = typer.Typer(
    name="edgeformer",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, export and measure small weight-shared transformers for edge devices.\n\n"
    "A [b]recipe[/b] becomes a [b]run[/b] (train), a run becomes a [b]bundle[/b] (export), "
    "a bundle becomes a [b]report[/b] (profile).",
    epilog="edgeformer without arguments shows three ways to start.",
)

_START = """edgeformer trains, exports and measures small text models for edge devices.

[b]Your CSV → model → device verdict[/b]
  edgeformer init reviews.csv
  edgeformer train reviews.yaml
  edgeformer export --int8
  edgeformer profile --device raspberry-pi-5 --max-latency 20ms

[b]Your Hugging Face or ONNX model → device verdict[/b]
  edgeformer import hf path/to/model
  edgeformer export --int8
  edgeformer profile --device raspberry-pi-5 --max-latency 50ms
  edgeformer profile model.onnx --device raspberry-pi-5

[b]A looped language model in 6 GB[/b]
  edgeformer plan crt_deep_rtx4050 --device rtx4050
  edgeformer train crt_deep_rtx4050
  edgeformer export --fp16 --trt
  edgeformer profile --device rtx4050

All commands: edgeformer --help
What works on this machine: edgeformer doctor"""

_PANELS = {
    "Build": ("init", "search", "train", "export"),
    "Use": ("predict", "evaluate", "generate", "serve", "page"),
    "Measure": ("profile", "gate", "calibrate", "compare"),
    "Check": ("plan", "verify", "exits", "doctor"),
    "Reference": ("list", "schema"),
}
for _panel, _names in _PANELS.items():
    for _name in _names:
        app.command(_name, rich_help_panel=_panel)(import_module(f"edgeformer.cli.{_name}").command)
app.add_typer(import_model.app, name="import", rich_help_panel="Build")
app.add_typer(machines.app, name="machines", rich_help_panel="Measure")
for _command in (*app.registered_commands, *import_model.app.registered_commands, *machines.app.registered_commands):
    # Join the lines of each paragraph, because typer prints a docstring's line breaks as they are.
    _docstring = inspect.cleandoc((_command.callback and _command.callback.__doc__) or "")
    _command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", _docstring)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"edgeformer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        from edgeformer.cli.console import Terminal

        Terminal(highlight=False).print(_START)


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0 done; 1 failed; 2 bad input; 3 done, but an artifact was rejected or a budget failed; 4 undecided;
    130 interrupted.
    """
    end_with_parent()
    # Garbage collection during imports and at exit, and the search for pydantic plugins, take a large part of a small
    # model's time to the first answer, and a short command needs none of them.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Windows pipes are not UTF-8 by default, and a C locale would read bad bytes as surrogates.
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)
    try:
        if sys.argv[1:2] == ["devices"]:
            raise InputError("devices: this command is called machines now; run: edgeformer machines")
        # With --json, usage errors must come back here to be printed as JSON too.
        code = select_command(sys.argv[1:2])(standalone_mode="--json" not in sys.argv[1:])
        if code == 130:
            _report("interrupted", 130)
        sys.exit(code if isinstance(code, int) else 0)
    except AlreadyReported as error:
        sys.exit(error.exit_code)
    except EdgeformerError as error:
        _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        _report("interrupted", 130)
    except OSError as error:
        _report(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    except Exception as error:
        if callable(usage := getattr(error, "format_message", None)):  # click's usage errors
            _report(str(usage()), getattr(error, "exit_code", 2))
        if os.environ.get("EDGEFORMER_TRACEBACK"):
            raise
        message = f"unexpected {type(error).__name__}: {error}"
        _report(f"{message}\nThis is a defect. Set EDGEFORMER_TRACEBACK=1 and run it again for the traceback.", 1)


def select_command(arguments: list[str]) -> typer.Typer:
    """Return the app with only the command named by ``arguments``: building one command's options takes 1–2 ms.

    The app's callback stays, because typer would otherwise read the name of a single command as an argument.
    """
    selected = [command for command in app.registered_commands if [command.name] == arguments]
    if not selected:
        return app
    single = copy.copy(app)
    single.registered_commands, single.registered_groups = selected, []
    return single


def _report(message: str, exit_code: int) -> None:
    from rich.markup import escape

    from edgeformer.cli.console import Terminal

    Terminal(emoji=False, stderr=True, highlight=False, soft_wrap=True).print(
        f"[bold red]error:[/bold red] {escape(message)}"
    )
    if "--json" in sys.argv[1:]:
        try:
            print(json.dumps({"error": message, "exit_code": exit_code}, ensure_ascii=False), flush=True)
        except OSError:  # stdout is closed, and stderr has the message; do not flush stdout again at exit
            sys.stdout = None
    sys.exit(exit_code)
