"""edgeformer study: a table or figure of the papers, from recipes to picture."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, Set, print_json, stdout

if TYPE_CHECKING:
    from edgeformer.formats.study_result import StudyTable
    from edgeformer.studies.study import Plan


def command(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="A study's file, or the name of a shipped one.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Read local files in place of what recipes take from the hub. May be repeated.",
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option("--results", metavar="DIR", help="Also look here for results of finished runs. May be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is there, what is missing, and how long it will take.")
    ] = False,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Train and measure nothing: make the table of the results there are.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Take no results that came with a checkout, but train those runs here."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the cores or the card.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ROW", help="Only this row of the study. May be repeated.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="1,2,3", help="Seeds, instead of those that the study names.")
    ] = None,
    overrides: Set = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Re-run a table or figure: train what is missing, score it, and put the published values beside it.

    Each finished run leaves its scores in artifacts/studies/runs; studies that need the same run share it, and a table
    can be made again from such files without the weights. A study that was stopped or killed goes on when it is started
    again. Deleting a run's folder and its scores trains that one again. In the folder of a clone of edgeformer, its
    own results (benchmarks/results/studies) count as finished; --fresh trains those runs here, too. Elsewhere name
    them with --results.

    Exit code 3: done, but a row is missing; the table says why.

    Examples:

      edgeformer list studies

      edgeformer study table6 --data ~/data --dry-run

      edgeformer study table6 --data ~/data --jobs 2

      edgeformer study table6 --no-train --results path/to/results
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.errors import InputError
    from edgeformer.studies.study import StudyOptions, plan_study, run_study
    from edgeformer.studies.writing import write_study

    for folder in [*(results or []), *(data or [])]:
        if not folder.is_dir():
            raise InputError(f"{folder}: is no folder")
    options = StudyOptions(
        artifacts,
        data=tuple(data or ()),
        results=tuple(results or ()),
        overrides=tuple(overrides or ()),
        only=tuple(only or ()),
        seeds=_seeds(seeds),
        jobs=jobs,
        train=not no_train,
        fresh=fresh,
        again=shlex.join(["edgeformer", *sys.argv[1:]]),
    )
    progress = show_progress()
    plan = plan_study(name, options, progress)
    if dry_run:
        _show_plan(plan, as_json=as_json)
        return
    if not as_json and plan.seconds:
        stdout().print(_plan_table(plan))
    table = run_study(plan, options, progress)
    files = write_study(artifacts / "studies" / plan.study.name, plan.study, table, plan.jobs, plan.results)
    _show(table, files, as_json=as_json)
    if any(row.missing for row in table.rows):
        raise typer.Exit(3)


def _seeds(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if any(not 0 <= seed < 2**32 for seed in found):
        raise typer.BadParameter(f"{text!r}: write whole numbers separated by commas, e.g. --seeds 1,2,3")
    return tuple(dict.fromkeys(found))


def _plan_table(plan: Plan) -> object:
    from edgeformer.reporting.listing import plan_table

    return plan_table(plan.study.name, _records(plan), plan.seconds, plan.timing_s)


def _records(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "run": estimate.job.title,
            "recipe": estimate.job.written.name,
            "state": estimate.state,
            "minutes": round(estimate.seconds / 60, 2),
            "steps": estimate.steps,
            "basis": estimate.basis,
            "key": estimate.job.key,
        }
        for estimate in plan.estimates
    ]


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        total = {"minutes": round(plan.seconds / 60, 2), "timing_minutes": round(plan.timing_s / 60, 2)}
        print_json({"study": plan.study.name, **total, "runs": _records(plan)})
        return
    stdout().print(_plan_table(plan))


def _show(table: StudyTable, files: list[Path], *, as_json: bool) -> None:
    from edgeformer.reporting.study_tables import study_terminal
    from edgeformer.studies.results import HERE

    if as_json:
        print_json({"files": [str(file) for file in files], **table.model_dump(mode="json")})
        return
    console = stdout()
    console.print(study_terminal(table))
    if table.finding:
        console.print(table.finding, markup=False)
    for pick in table.picks:
        console.print(f"{pick.title}: {pick.reason}", soft_wrap=True, markup=False)
    for row in table.rows:
        if row.said:
            console.print(f"{row.label}, {row.at}: {row.said}", soft_wrap=True, markup=False)
    elsewhere = dict.fromkeys(f"{row.run} ({row.origin})" for row in table.rows if row.keys and row.origin != HERE)
    if elsewhere:
        console.print(f"not trained here: {', '.join(elsewhere)}", soft_wrap=True, markup=False)
    console.print(f"read {files[0]}", soft_wrap=True, markup=False)
