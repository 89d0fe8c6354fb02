"""Pictures of README and docs: a terminal run as SVG, and the HTML report as PNG.

Commands run in the current folder. The report needs chromium.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.frame import run_script

WIDTH = 140  # that of tables in a pipe


def terminal(out: Path, commands: list[str]) -> None:
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


def report(page: Path, out: Path, height: int = 900) -> None:
    """Save a screenshot of the top of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("error: no chromium here; install it to draw a page")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1100,{height}"]
    subprocess.run([browser, *options, f"--screenshot={out.resolve()}", page.resolve().as_uri()], check=True)


if __name__ == "__main__":
    run_script(terminal, report)
