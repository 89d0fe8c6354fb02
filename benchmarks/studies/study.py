"""Make a study: train what is missing, measure times, and write table.md, table.csv, table.json, figures, README.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies.figures import draw_study
from benchmarks.studies.finding import finding_of
from benchmarks.studies.jobs import DataReader, Job, jobs_of
from benchmarks.studies.render import study_csv, study_markdown, study_page
from benchmarks.studies.results import StudyRun, StudyTable, StudyTimes
from benchmarks.studies.specification import Study, load_study
from benchmarks.studies.store import Results
from benchmarks.studies.table import Outcome, mixed_formats, mixed_hosts, pick, rows_of
from benchmarks.studies.timing import measure_times, measured_on_this_machine, timed_artifacts, times_key
from benchmarks.studies.train import Estimate, Trainer
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER
from edgeformer.bundle import Bundle


@dataclass(frozen=True)
class StudyOptions:
    """Options of the command.

    Attributes:
        artifacts: the folder that holds the runs.
        data: folders with local files in place of the hub.
        results: further folders with results of finished runs.
        only: rows of the study; empty: all.
        jobs: trainings at a time.
        train: False: nothing is trained or measured.
        fresh: do not use the committed results.
        command: that continues the study, for the message of an interruption.
    """

    artifacts: Path
    data: tuple[Path, ...] = ()
    results: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    jobs: int = 1
    train: bool = True
    fresh: bool = False
    command: str = "the same command"


@dataclass(frozen=True)
class Plan:
    """A study with what the options changed, its runs, and what is left to do of each."""

    study: Study
    jobs: tuple[Job, ...]
    estimates: tuple[Estimate, ...]
    results: Results
    trainer: Trainer


def plan_study(name: str, options: StudyOptions, progress: Progress = SILENT) -> Plan:
    """Read a study, look up the results of its runs, and estimate how long the others take.

    Raises:
        RecipeError: study or recipe are not valid.
        InputError: no such row.
        ArtifactError: damaged results.
    """
    study, path = load_study(name)
    for row in options.only:
        if row not in study.runs:
            raise InputError(f"--only {row}: {study.name} has no such row; there are {', '.join(study.runs)}")
    kept = [row for row in study.runs if not options.only or row in options.only]
    for row in kept:  # grows: a teacher may have one, too
        if (teacher := study.runs[row].teacher) is not None and teacher not in kept:
            kept.append(teacher)
    study = study.model_copy(update={"runs": {row: spec for row, spec in study.runs.items() if row in kept}})
    reader = DataReader(options.artifacts, options.data, progress, offline=not (options.train or options.data))
    jobs = jobs_of(study, path, reader)
    results = Results(options.artifacts, options.results, committed=not options.fresh)
    results.check_ambiguity(jobs)
    trainer = Trainer(options.artifacts, results, study.table.splits, options.jobs, progress)
    estimates: list[Estimate] = []
    for job in jobs:
        if study.table.rows == "labels":
            estimate = Estimate(job, "done" if results.data_of(job) else "unavailable")
        elif options.train:
            estimate = trainer.estimate(job)
            if estimate.state not in ("done", "unavailable") and job.key in [e.job.key for e in estimates]:
                estimate = Estimate(job, "shared", basis="the same run as above")
        elif (match := results.find(job)) is not None:
            estimate = Estimate(job, "done", basis=match.origin)
        else:
            reason = results.ambiguity(job) or "has no results here, and --no-train trains nothing"
            estimate = Estimate(job, "unavailable", basis=f"{reason}; add folders with --results, or leave it out")
        estimates.append(estimate)
    return Plan(study, tuple(jobs), tuple(estimates), results, trainer)


def run_study(plan: Plan, options: StudyOptions, progress: Progress = SILENT) -> StudyTable:
    """Train what is missing, measure times where the study asks for them, and write the study's folder.

    Raises:
        InterruptedRun: Ctrl-C or SIGTERM; the same command continues.
        ArtifactError: damaged results.
    """
    study, results = plan.study, plan.results
    if options.train:
        plan.trainer.run(plan.estimates, options.command)
    outcomes = []
    for estimate in plan.estimates:
        job, reason = estimate.job, plan.trainer.failed.get(estimate.job.key or "", "")
        if study.table.rows == "labels":
            results.keep_data(job)
            data = results.data_of(job)
            reason = "" if data is not None else results.ambiguity(job) or job.data.reason
            outcomes.append(Outcome(job, None, reason, data))
            continue
        reason = reason or (estimate.basis if estimate.state == "unavailable" else "")
        match = results.find(job)
        outcomes.append(Outcome(job, match, reason or ("has no results" if match is None else "")))
    times = _times(study, outcomes, results, options, progress)
    table = _table(study, outcomes, times, options)
    folder = options.artifacts / "studies" / study.name
    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Sequence[dict[str, Any]]]] = {}
    for outcome in outcomes:
        if outcome.match is not None and outcome.match.run.curve:
            curves.setdefault(outcome.job.row, []).append(outcome.match.run.curve)
    write_json(folder / "table.json", table)
    write_text(folder / "table.csv", study_csv(table))
    write_text(folder / "table.md", study_markdown(table))
    write_text(folder / "README.md", study_page(table, draw_study(folder, table, study.figures, curves)))
    return table


def _times(
    study: Study, outcomes: Sequence[Outcome], results: Results, options: StudyOptions, progress: Progress
) -> StudyTimes | None:
    """Return the times of a study's graphs: kept ones, else measured now, where all of the graphs are here."""
    matches = [outcome.match.run for outcome in outcomes if outcome.match is not None]
    runs = {run.key: run for run in matches if timed_artifacts(run)}  # some are trained for their scores alone
    timing = study.table.timing
    if timing is None or not runs:
        return None
    times = results.times(times_key([*runs.values()], timing))
    folders = {key: options.artifacts / run.run for key, run in runs.items()}

    def has_graphs(run: StudyRun) -> bool:  # its results may be from another machine
        bundle = folders[run.key] / BUNDLE_FOLDER
        if not (bundle / BUNDLE_FILE).is_file():
            return False
        built = {artifact.id for artifact in Bundle.open(bundle).manifest.artifacts if artifact.status == "built"}
        return built >= {*timed_artifacts(run)}

    absent = [str(folders[key]) for key, run in runs.items() if not has_graphs(run)]
    if not options.train or (times is not None and (absent or measured_on_this_machine(times))):
        return times
    if absent:
        progress.message(f"times are not measured: {', '.join(absent)} have no graphs, and all are measured in turns")
        return None
    times = measure_times([*runs.values()], folders, timing, options.artifacts, progress)
    results.keep_times(times)
    return times


def _table(study: Study, outcomes: Sequence[Outcome], times: StudyTimes | None, options: StudyOptions) -> StudyTable:
    runs = {outcome.match.run.key: outcome.match.run for outcome in outcomes if outcome.match is not None}
    hosts = [f"{run.host.get('cpu')}, {run.host.get('accelerator', 'cpu')}, {run.precision}" for run in runs.values()]
    rows = rows_of(study, outcomes, times)
    notes: dict[str, tuple[str, ...]] = {}
    sets: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        run, row = outcome.match.run if outcome.match is not None else None, outcome.job.row
        if row not in notes:
            notes[row] = run.data_notes if run is not None else outcome.job.notes
            sets[row] = run.data.rows if run is not None else outcome.data[0].rows if outcome.data is not None else {}
    measured = ""
    if times is not None:
        unstable = sum(not entry.stable for entry in times.entries)
        shaky = f"; {unstable} of {len(times.entries)} graphs were not measured calmly" if unstable else ""
        measured = (
            f"batch {times.batch} × {times.seq} tokens on {times.host.get('cpu')}, {times.threads} threads; "
            f"{len(times.entries[0].p50_ms) if times.entries else 0} rounds in turns, each median in a process of its "
            f"own{shaky}"
        )
    return StudyTable(
        study=study.name,
        title=study.title,
        element=study.element,
        protocol=study.protocol.strip(),
        columns=study.table.columns,
        rows=rows,
        picks=tuple(pick(choice, rows) for choice in study.table.choices),
        data=notes,
        sets=sets,
        minutes=round(sum(run.seconds for run in runs.values()) / 60, 1),
        hosts=tuple(dict.fromkeys(hosts)),
        times=measured,
        only=options.only,
        finding=finding_of(study, rows),
        notes=(*study.notes, *filter(None, (mixed_hosts([*runs.values()]), mixed_formats([*runs.values()])))),
    )
