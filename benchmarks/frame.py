"""What scripts share: a command line from the parameters of their functions, records in JSON, and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from tabulate import tabulate

from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def run_script(*commands: Callable[..., int | None]) -> None:
    """Run a script: parameters of its function are the options, those without a default the arguments.

    Several functions are subcommands of their names. What a function returns is the exit code.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    description = sys.modules["__main__"].__doc__ if len(commands) == 1 else None
    for command in commands:
        app.command(help=description)(_with_exit_code(command))
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def _with_exit_code(command: Callable[..., int | None]) -> Callable[..., None]:
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        if code := command(*arguments, **options):
            raise typer.Exit(code)

    return run


def stamp() -> dict[str, Any]:
    """Return when, by what code and libraries, and on what machine figures are measured."""
    return {
        "measured": now(), "code_version": code_version(), "host": describe_host(), "versions": library_versions(),
    }  # fmt: skip


def read_record(file: Path, **empty: Any) -> dict[str, Any]:
    """Return the content of a JSON file to go on with; ``empty`` where there is none yet."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else empty


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return one table, its cells as they are."""
    return tabulate([*rows], [*header], tablefmt="github", disable_numparse=True)
