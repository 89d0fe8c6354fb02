"""Rows of the GPU checklist, one after the other, within a time budget; `make gpu-check` runs it.

Rows whose figures of this very commit are complete are passed over, those that were begun are gone on with, and a row
that fails stops nothing. Each is a process of its own: python -m benchmarks.gpu.MODULE does one alone.

    python -m benchmarks.gpu [--minutes 9] [--rows 1,2,7] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import (
    DONE,
    FAILED,
    NO_CARD,
    ROOT,
    UNFINISHED,
    Options,
    Row,
    folder_of,
    known,
    options_of,
    parser,
)
from edgeformer.system import nvidia

MOST_MINUTES = {3: 9.0, 5: 8.0, 10: 9.0, 13: 9.0}
"""Row → minutes that it may take at once; the others have five."""
LEAST_MINUTES, GRACE_S = 0.5, 45.0
"""Less is not worth a start; and how long a stopping row may take to save its state."""
SAID = {DONE: "done", FAILED: "failed", UNFINISHED: "out of time", NO_CARD: "no card"}
Start = Callable[[Row, Options, float], int]


def start(row: Row, options: Options, minutes: float) -> int:
    """One row in a process of its own. Returns its exit code; it is killed where it does not stop when it should."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{row.module}", "--minutes", f"{minutes:.2f}"]
    command += ["--out", str(options.out.resolve()), "--work", str(options.work.resolve())]
    command += ["--data", str(options.data.resolve())] if options.data is not None else []
    command += [flag for flag, parameters in (("--dry-run", options.dry_run), ("--again", options.again)) if parameters]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=60 * minutes + GRACE_S).returncode
    except subprocess.TimeoutExpired:
        return UNFINISHED


def finished(row: Row, options: Options) -> Path | None:
    """The file with all figures of a row at this commit and on this card; None: something is left to measure."""
    cards = [""] if options.dry_run else sorted({card.name for card in nvidia.gpus()})
    for folder in (folder_of(card, options) for card in cards):
        path = known(row, options, folder)
        if path is not None and json.loads(path.read_text(encoding="utf-8"))["complete"]:
            return path
    return None


def check(rows: Sequence[Row], options: Options, start: Start = start) -> dict[int, str]:
    """Do the rows in their order. Returns number → what became of it.

    Args:
        rows: of the checklist.
        options: ``minutes`` are those of all rows together.
        start: runs one of them for so many minutes, and returns its exit code.
    """
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    messages: dict[int, str] = {}
    for row in rows:
        remaining = float("inf") if ends is None else (ends - time.monotonic()) / 60
        if (path := finished(row, options)) is not None:
            messages[row.number] = f"known of this commit: {path}"
        elif remaining < LEAST_MINUTES:
            messages[row.number] = "out of time: not begun"
        else:
            print(f"\n{row.number}. {row.question}", flush=True)
            code = start(row, options, min(remaining, MOST_MINUTES.get(row.number, 5.0)))
            messages[row.number] = SAID.get(code, f"failed with exit code {code}")
            if code == NO_CARD:  # nor will the others find one
                break
    return messages


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not set(numbers) <= {row.number for row in ROWS}:
        raise argparse.ArgumentTypeError(f"rows are {ROWS[0].number} to {ROWS[-1].number}")
    return numbers


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: all asked rows are measured; 1: one failed; 2: no card; 3: something is left for the next call."""
    requested = parser(__doc__ or "")
    requested.add_argument("--minutes", type=float, default=9.0, help="for all rows together (default: 9)")
    requested.add_argument("--rows", type=_numbers, help="only these, by their numbers")
    arguments = requested.parse_args(words)
    messages = check([row for row in ROWS if not arguments.rows or row.number in arguments.rows], options_of(arguments))
    print()
    for number, label in messages.items():
        print(f"{number:2d}. {label}")
    outcomes = " ".join(messages.values())
    codes = ((NO_CARD, "no card"), (FAILED, "failed"), (UNFINISHED, "out of time"))
    return next((code for code, words_ in codes if words_ in outcomes), DONE)


if __name__ == "__main__":
    raise SystemExit(main())
