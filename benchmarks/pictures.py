"""Pictures of README and docs: a terminal run as SVG, and the HTML report as PNG.

    python -m benchmarks.pictures terminal OUT.svg "edgeformer profile --device rtx4050"
    python -m benchmarks.pictures report REPORT.html OUT.png

Commands run in the current folder. The report needs chromium.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 140  # that of tables in a pipe


def draw_terminal(out: Path, commands: list[str]) -> None:
    """Run the commands and save what they print on stdout."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    for command in commands:
        program, *arguments = shlex.split(command)
        words = [sys.executable, "-m", program, *arguments]
        result = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(result.stdout.rstrip()), "")
    console.save_svg(str(out), title="edgeformer")


def draw_report(page: Path, out: Path, height: int) -> None:
    """Save a screenshot of the top of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("error: no chromium here; install it to draw a page")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1100,{height}"]
    subprocess.run([browser, *options, f"--screenshot={out.resolve()}", page.resolve().as_uri()], check=True)


def main() -> None:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="kind", required=True)
    terminal = commands.add_parser("terminal")
    terminal.add_argument("out", type=Path)
    terminal.add_argument("commands", nargs="+")
    report = commands.add_parser("report")
    report.add_argument("page", type=Path)
    report.add_argument("out", type=Path)
    report.add_argument("--height", type=int, default=900)
    arguments = parser.parse_args()
    if arguments.kind == "terminal":
        draw_terminal(arguments.out, arguments.commands)
    else:
        draw_report(arguments.page, arguments.out, arguments.height)


if __name__ == "__main__":
    main()
