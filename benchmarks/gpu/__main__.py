"""Rows of the GPU checklist, one after the other, within a time budget; `make gpu-check` runs it.

Rows whose figures of this very commit are complete are passed over, those that were begun are gone on with, and a row
that fails stops nothing. Each is a process of its own; with one number, it is this process.

    python -m benchmarks gpu [--minutes 9] [--rows 1,2,7] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.frame import RESULTS, ROOT
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import BROUGHT, DONE, FAILED, NO_CARD, UNFINISHED, Options, Row, folder_of, known, perform
from edgeformer.system import nvidia

OPEN = [row for row in ROWS if row.measure is not None]
MOST_MINUTES = {3: 9.0, 5: 8.0, 10: 9.0, 13: 9.0}
"""Row → minutes that it may take at once; the others have five."""
LEAST_MINUTES, GRACE_S = 0.5, 45.0
"""Less is not worth a start; and how long a stopping row may take to save its state."""
SAID = {DONE: "done", FAILED: "failed", UNFINISHED: "out of time", NO_CARD: "no card"}
Start = Callable[[Row, Options, float], int]


def start(row: Row, options: Options, minutes: float) -> int:
    """One row in a process of its own. Returns its exit code; it is killed where it does not stop when it should."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rows", f"{row.number}", "--minutes", f"{minutes:.2f}"]
    command += ["--out", str(options.out.resolve()), "--work", str(options.work.resolve())]
    command += ["--data", str(options.data.resolve())] if options.data is not None else []
    command += [flag for flag, is_set in (("--dry-run", options.dry_run), ("--again", options.again)) if is_set]
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
    """Do the rows in their order within the minutes of all together. Returns number → what became of it."""
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
    if not set(numbers) <= {row.number for row in OPEN}:
        raise argparse.ArgumentTypeError(f"rows are {', '.join(str(row.number) for row in OPEN)}")
    return numbers


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the options of the command line. Raises SystemExit: a dry run among the results."""
    dry_run = arguments.dry_run
    work = arguments.work or ROOT / "artifacts" / ("gpu-dry-run" if dry_run else "gpu")
    out = arguments.out or (work / "results" if dry_run else RESULTS)
    if dry_run and out.resolve() == RESULTS:
        raise SystemExit("--out: figures of a dry run mean nothing; they are not kept in benchmarks/results")
    candidates = (arguments.data, BROUGHT / "data", Path(os.environ.get("EDGEFORMER_TEST_DATA", "/nowhere")))
    data = next((folder for folder in candidates if folder is not None and folder.is_dir()), None)
    return Options(dry_run, out, work, data, arguments.minutes, arguments.again)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: all requested rows are measured; 1: one failed; 2: no card; 3: something is left to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any machine: does the script work?")
    parser.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results)")
    parser.add_argument("--work", type=Path, help="folder of runs and bundles (default: artifacts/gpu)")
    parser.add_argument("--data", type=Path, help="public data (default: what was brought, or EDGEFORMER_TEST_DATA)")
    parser.add_argument("--again", action="store_true", help="measure again what this commit has measured")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all rows together (default: 9)")
    parser.add_argument("--rows", type=_numbers, help="only these, by their numbers")
    arguments = parser.parse_args(words)
    options = options_of(arguments)
    rows = [row for row in OPEN if not arguments.rows or row.number in arguments.rows]
    if len(rows) == 1:
        return perform(rows[0], options)
    messages = check(rows, options)
    print()
    for number, label in messages.items():
        print(f"{number:2d}. {label}")
    outcomes = " ".join(messages.values())
    codes = ((NO_CARD, "no card"), (FAILED, "failed"), (UNFINISHED, "out of time"))
    return next((code for code, words_ in codes if words_ in outcomes), DONE)


if __name__ == "__main__":
    raise SystemExit(main())
