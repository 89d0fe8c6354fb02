"""The command line of scripts that keep a record for each run, by name, and for each of its sets, in one JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeformer.artifacts.files import write_json

Records = dict[str, dict[str, Any]]
"""Name of a run → set → record."""


def command_line(description: str | None, measure: Callable[[Path, str], Any], table: Callable[[Records], str]) -> None:
    """Run ``measure FILE NAME=RUN… [--split SET]``, which adds to the file, or ``table FILE``, which prints it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, showing = commands.add_parser("measure"), commands.add_parser("table")
    for command in (measuring, showing):
        command.add_argument("file", type=Path)
    measuring.add_argument("runs", nargs="+", metavar="NAME=RUN")
    measuring.add_argument("--split", default="random-split")
    arguments = parser.parse_args()
    file: Path = arguments.file
    runs: Records = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else {}
    if arguments.command == "table":
        print(table(runs))
        return
    for name, _, folder in (run.rpartition("=") for run in arguments.runs):
        runs.setdefault(name, {})[arguments.split] = measure(Path(folder), arguments.split)
        write_json(file, {"runs": runs})
        print(table({name: runs[name]}))
