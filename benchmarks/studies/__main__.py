"""Re-run a table or figure of the papers: train what is missing, score it, and compare it with the published values.

    python -m benchmarks.studies table6 --data DIR --dry-run    # what is missing, and how long it takes
    python -m benchmarks.studies table6 --data DIR --jobs 2     # trains it; the same command continues after Ctrl-C
    python -m benchmarks.studies table6 --no-train              # from results alone, without weights

The folder artifacts/studies/NAME has README.md, table.md, table.csv, table.json and the figures. Scores of a finished
run are a file in artifacts/studies/runs, named by a hash of all that decides its weights: a run that has one is not
trained again, and studies share it. Committed results (benchmarks/results/studies) count as finished without --fresh.

Exit codes: 0 done, 2 bad input, 3 done but rows are missing (the table says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.specification import study_names
from benchmarks.studies.store import TRAINED
from benchmarks.studies.study import StudyOptions, plan_study, run_study
from benchmarks.studies.train import Estimate, total_seconds
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.units import format_duration
from edgeformer.cli.console import Terminal
from edgeformer.cli.progress import show_progress
from edgeformer.report.columns import Column, Columns


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, make the study, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="STUDY", help=f"a file, or one of {', '.join(study_names())}")
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="read local files in place of the hub (benchmarks/studies/local/data.yaml); repeatable",
    )
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="also use results of finished runs in this folder; repeatable",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what is missing and how long it takes")
    parser.add_argument("--no-train", action="store_true", help="train and measure nothing")
    parser.add_argument("--fresh", action="store_true", help="do not use the committed results")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default: 1)")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="only this row; repeatable")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"), metavar="DIR", help="folder of runs")
    arguments = parser.parse_args(words)  # fmt: skip
    console = Terminal(highlight=False)
    try:
        return _run(arguments, console)
    except EdgeformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace, console: Terminal) -> int:
    for folder in (*arguments.results, *arguments.data):
        if not folder.is_dir():
            raise InputError(f"{folder}: is no folder; give --data and --results existing folders")
    if arguments.jobs < 1:
        raise InputError(f"--jobs {arguments.jobs}: give 1 or more")
    options = StudyOptions(
        arguments.artifacts, tuple(arguments.data), tuple(arguments.results),
        tuple(arguments.only), arguments.jobs, not arguments.no_train, arguments.fresh,
        shlex.join(["python", "-m", "benchmarks.studies", *sys.argv[1:]]),
    )  # fmt: skip
    progress = show_progress()
    plan = plan_study(arguments.name, options, progress)
    remaining = total_seconds(plan.estimates, options.jobs)
    if arguments.dry_run or remaining:
        columns: Columns[Estimate] = Columns([
            Column("run", lambda estimate: estimate.job.title),
            Column("recipe", lambda estimate: estimate.job.written.name),
            Column("state", lambda estimate: estimate.state),
            Column("time", lambda e: format_duration(e.seconds) if e.seconds else None, number=True),
            Column("steps", lambda estimate: estimate.steps or None, number=True),
            Column("estimated", lambda estimate: estimate.basis),
        ])  # fmt: skip
        console.print(columns.terminal(f"{plan.study.name}: about {format_duration(remaining)}", plan.estimates))
    if arguments.dry_run:
        return 0
    table = run_study(plan, options, progress)
    folder = options.artifacts / "studies" / table.study
    console.print((folder / "table.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    lines = [table.finding, *(f"{pick.title}: {pick.reason}" for pick in table.picks)]
    lines += [f"{row.label}, {row.at}: {row.remark}" for row in table.rows if row.remark]
    origins = dict.fromkeys(f"{row.run} ({row.origin})" for row in table.rows if row.keys and row.origin != TRAINED)
    lines += [f"not trained here: {', '.join(origins)}" if origins else "", f"read {folder / 'README.md'}"]
    console.print("\n".join(filter(None, lines)), markup=False, soft_wrap=True)
    return 3 if any(row.missing for row in table.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
