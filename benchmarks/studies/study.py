"""Re-run a table or figure of the papers: train what is missing, score it, and compare it with the published values.

    python -m benchmarks.studies table6 --data DIR --dry-run    # what is missing
    python -m benchmarks.studies table6 --data DIR --jobs 2     # trains it; the same command continues after Ctrl-C
    python -m benchmarks.studies table6 --no-train              # from results alone, without weights

The folder artifacts/studies/NAME has README.md, table.json and the figures. Scores of a finished run are a file in
artifacts/studies/runs, named by a hash of all that decides its weights: a run that has one is not trained again, and
studies share it. Committed results (benchmarks/results/studies) count as finished without --fresh.

Exit codes: 0 done, 2 bad input, 3 done but rows are missing (the table says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.studies.figures import draw_study, figure_titles
from benchmarks.studies.jobs import jobs_of
from benchmarks.studies.render import finding_of, study_body, study_page
from benchmarks.studies.results import Outcome, Results, StudyTable, StudyTimes, machine_of
from benchmarks.studies.specification import Study, load_study, study_names
from benchmarks.studies.table import mixed_formats, mixed_hosts, pairs_of, pick, rows_of
from benchmarks.studies.train import Trainer
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.cli.console import Terminal
from edgeformer.cli.options import show_progress
from edgeformer.report.columns import Column, TableColumns


@dataclass(frozen=True)
class StudyOptions:
    """Options of the command."""

    artifacts: Path  # the folder that holds the runs
    data: tuple[Path, ...] = ()  # folders with local files in place of the hub
    jobs: int = 1  # trainings at a time
    train: bool = True  # False: nothing is trained or measured
    fresh: bool = False  # do not use the committed results
    commit: bool = False  # put the table and its results among the committed ones
    command: str = "the same command"  # that continues the study, for the message of an interruption


@dataclass(frozen=True)
class Plan:
    """A study, and what is left to do of each of its runs."""

    study: Study
    outcomes: tuple[Outcome, ...]
    trainer: Trainer


def plan_study(name: str, options: StudyOptions, progress: Progress = SILENT) -> Plan:
    """Read a study and look up the results of its runs. Raises RecipeError or ArtifactError."""
    study, path = load_study(name)
    offline = not (options.train or options.data)
    results = Results(options.artifacts, committed=not options.fresh)
    trainer = Trainer(options.artifacts, results, study.table.splits, options.jobs, progress)
    outcomes = []
    for job in jobs_of(study, path, options.artifacts, options.data, progress, offline=offline):
        if study.table.rows == "labels":
            job = results.with_data(job)
            outcomes.append(Outcome(job, None, job.reason, "unavailable" if job.summary is None else "done"))
        elif options.train:
            outcomes.append(trainer.outcome(job))
        elif (run := results.find(job)) is not None:
            outcomes.append(Outcome(job, run))
        else:
            reason = results.ambiguity(job) or "not trained"
            outcomes.append(Outcome(job, None, reason, "unavailable"))
    return Plan(study, tuple(outcomes), trainer)


def run_study(plan: Plan, options: StudyOptions, progress: Progress = SILENT) -> StudyTable:
    """Train what is missing, measure times where the study asks for them, and write the study's folder."""
    study, trainer = plan.study, plan.trainer
    if options.train:
        trainer.run(plan.outcomes, options.command)
    outcomes = []
    for outcome in plan.outcomes:
        if outcome.state not in ("done", "unavailable"):
            reason = trainer.failed.get(outcome.job.key or "", "")
            outcome = replace(outcome, run=trainer.results.find(outcome.job), reason=reason)
        outcomes.append(outcome)
    runs = {outcome.run.key: outcome.run for outcome in outcomes if outcome.run is not None}
    times, timing = None, study.table.timing
    if timing is not None:
        times = trainer.times([*runs.values()], timing, measure=options.train)
    table = table_of(study, outcomes, times)
    folder = options.artifacts / "studies" / study.name
    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Sequence[dict[str, Any]]]] = {}
    for outcome in outcomes:
        if outcome.run is not None and outcome.run.curve:
            curves.setdefault(outcome.job.row, []).append(outcome.run.curve)
    write_json(folder / "table.json", table)
    if options.commit:
        trainer.results.commit(table)
    titles = figure_titles(study.figures)
    pictures = {name: titles[name] for name in draw_study(folder, table, study.figures, curves)}
    write_text(folder / "README.md", study_page(table, pictures, study.finding))
    return table


def table_of(study: Study, outcomes: Sequence[Outcome], times: StudyTimes | None) -> StudyTable:
    """Return the table of a study's results."""
    runs = [*{outcome.run.key: outcome.run for outcome in outcomes if outcome.run is not None}.values()]
    hosts = [f"{machine_of(run.host)}, {run.precision}" for run in runs]
    rows, pairs = rows_of(study, outcomes, times), pairs_of(study, outcomes)
    notes: dict[str, tuple[str, ...]] = {}
    for outcome in outcomes:
        notes.setdefault(outcome.job.row, outcome.job.notes if outcome.run is None else outcome.run.data_notes)
    measured = ""
    if times is not None:
        unstable = sum(not entry.stable for entry in times.entries)
        shaky = f"; the times of {unstable} of {len(times.entries)} graphs varied while measured" if unstable else ""
        rounds = len(times.entries[0].p50_ms) if times.entries else 0
        measured = (
            f"batch {times.batch} × {times.seq} tokens on {times.host.get('cpu')}, {times.threads} threads; "
            f"the median of each graph in {rounds} rounds over all graphs, each time in a new process{shaky}"
        )
    return StudyTable(
        study=study.name, title=study.title, element=study.element, protocol=study.protocol.strip(),
        kind=study.table.rows, columns=study.table.columns, rows=rows,
        picks=tuple(pick(choice, rows) for choice in study.table.choices),
        data=notes, minutes=round(sum(run.seconds for run in runs) / 60, 1), hosts=tuple(dict.fromkeys(hosts)),
        times=measured, finding=finding_of(study, rows, pairs), pairs=pairs,
        notes=(*study.notes, *filter(None, (mixed_hosts(runs), mixed_formats(runs)))),
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, make the study, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="STUDY", help=f"a file, or one of {', '.join(study_names())}")
    parser.add_argument("--data", type=Path, action="append", default=[], metavar="DIR",
                        help="read local files in place of the hub (local/data.yaml); repeatable")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what is missing")
    parser.add_argument("--no-train", action="store_true", help="train and measure nothing")
    parser.add_argument("--fresh", action="store_true", help="do not use the committed results")
    parser.add_argument("--commit", action="store_true", help="add table and results to benchmarks/results/studies")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default: 1)")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"), metavar="DIR", help="folder of runs")
    arguments = parser.parse_args(words)
    console, progress = Terminal(highlight=False), show_progress()
    try:
        for folder in arguments.data:
            if not folder.is_dir():
                raise InputError(f"--data {folder}: is no folder")
        if arguments.jobs < 1:
            raise InputError(f"--jobs {arguments.jobs}: give 1 or more")
        command = shlex.join(["python", "-m", "benchmarks.studies", *sys.argv[1:]])
        options = StudyOptions(
            arguments.artifacts,
            tuple(arguments.data),
            arguments.jobs,
            not arguments.no_train,
            arguments.fresh,
            arguments.commit,
            command,
        )
        plan = plan_study(arguments.name, options, progress)
        if arguments.dry_run:
            columns: TableColumns[Outcome] = TableColumns(
                Column("run", lambda outcome: outcome.job.title),
                Column("recipe", lambda outcome: outcome.job.written.name),
                Column("state", lambda outcome: outcome.state),
                Column("results", lambda outcome: outcome.reason or (outcome.run.origin if outcome.run else None)),
            )  # fmt: skip
            console.print(columns.terminal(plan.study.name, plan.outcomes))
            return 0
        table = run_study(plan, options, progress)
    except EdgeformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    console.print("\n\n".join(study_body(table, table.finding, {})), markup=False, soft_wrap=True)
    console.print(f"\nread {options.artifacts / 'studies' / table.study / 'README.md'}", markup=False, soft_wrap=True)
    return 3 if any(row.missing for row in table.rows) else 0
