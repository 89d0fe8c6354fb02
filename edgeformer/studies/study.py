"""study: several runs become one table. What is missing is trained; what is known is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeformer.bundle import Bundle
from edgeformer.formats.errors import InputError
from edgeformer.formats.progress import SILENT, Progress
from edgeformer.formats.study import Study, load_study
from edgeformer.formats.study_result import StudyRow, StudyRun, StudyTable, StudyTimes
from edgeformer.formats.workspace import BUNDLE_FILE, BUNDLE_FOLDER
from edgeformer.studies.estimating import Estimate, Estimator
from edgeformer.studies.finding import check_finding, finding_of
from edgeformer.studies.jobs import DataReader, Job, asked_together, jobs_of
from edgeformer.studies.leftover import doubted, known_only, makespan, once, with_teachers
from edgeformer.studies.lines import mixed_formats, mixed_times
from edgeformer.studies.local_data import shipped_mapping
from edgeformer.studies.results import Results
from edgeformer.studies.tabulating import Outcome, picks_of, rows_of
from edgeformer.studies.timing import SECONDS_A_TURN, measure_times, taken_as_here, timed_artifacts, times_key
from edgeformer.studies.working import Workplace, work


@dataclass(frozen=True)
class StudyOptions:
    """Where a study finds its data and results, and what it may do.

    Attributes:
        artifacts: the folder that holds the runs.
        data: folders with local files in place of the hub.
        results: further folders with results of finished runs.
        overrides: ``key=value`` for every run.
        only: rows of the study; empty: all.
        seeds: instead of those that the study says.
        jobs: runs at a time.
        train: else nothing is trained or measured: the table is made of the results that there are.
        fresh: results that came with a checkout are not taken.
        again: the command that goes on with it, for whoever interrupts it.
    """

    artifacts: Path
    data: tuple[Path, ...] = ()
    results: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    jobs: int = 1
    train: bool = True
    fresh: bool = False
    again: str = "the same call"


@dataclass(frozen=True)
class Plan:
    """What there is of a study, and what is left to do, in order.

    Attributes:
        study: with what the options changed.
        estimates: of every run.
        timing_s: measuring times at the end.
        jobs: runs at a time.
    """

    study: Study
    jobs: tuple[Job, ...]
    estimates: tuple[Estimate, ...]
    results: Results
    timing_s: float
    at_a_time: int

    @property
    def seconds(self) -> float:
        """Until the study is finished."""
        return makespan(self.estimates, self.at_a_time) + self.timing_s


def plan_study(name: str, options: StudyOptions, progress: Progress = SILENT) -> Plan:
    """Read a study, look for the results of its runs, and estimate what the others will take.

    Args:
        name: a path, or a shipped study's name.
        options: where to look.
        progress: is told of data that is read, and of steps that are timed.

    Raises:
        RecipeError: study, recipe or override are not valid.
        InputError: no such row.
        ArtifactError: damaged results.
    """
    written, place = load_study(name)
    check_finding(written, place)
    study = _narrowed(written, options)
    jobs = asked_together(jobs_of(study, place, options.overrides, reader_of(options, progress)))
    results = Results(options.artifacts, options.results, committed=not options.fresh)
    results.settle(jobs)
    estimator = Estimator(options.artifacts, results.known(), options.jobs, splits_of(study))
    found = {job.title: results.of(job) for job in jobs}
    if study.table.rows == "labels":
        estimates = [Estimate(job, "done" if results.data_of(job) else "unavailable") for job in jobs]
    elif options.train:
        estimates = [doubted(estimator.of(job, found[job.title], progress), results) for job in jobs]
        estimates = with_teachers(estimates, estimator, options.artifacts, progress)
    else:
        estimates = [known_only(job, found[job.title], results) for job in jobs]
    missing = any(estimate.seconds for estimate in estimates)
    return Plan(
        study, tuple(jobs), tuple(once(estimates)), results, _timing_s(study, jobs, missing=missing), options.jobs
    )


def reader_of(options: StudyOptions, progress: Progress) -> DataReader:
    """What reads the data of a study's runs. Raises RecipeError."""
    offline = not (options.train or options.data)
    return DataReader(options.artifacts, options.data, shipped_mapping(), progress, offline)


def _narrowed(study: Study, options: StudyOptions) -> Study:
    """The study with the rows and seeds that were asked for. Raises InputError."""
    for row in options.only:
        if row not in study.runs:
            raise InputError(f"--only {row}: {study.name} has no such row; there are {', '.join(study.runs)}")
    kept = [row for row in study.runs if not options.only or row in options.only]
    for row in kept:  # grows: a teacher may have one, too
        if (teacher := study.runs[row].teacher) is not None and teacher not in kept:
            kept.append(teacher)
    runs = {row: spec for row, spec in study.runs.items() if row in kept}
    if options.seeds:
        runs = {row: spec.model_copy(update={"seeds": options.seeds}) for row, spec in runs.items()}
    return study.model_copy(update={"runs": runs})


def splits_of(study: Study) -> tuple[str, ...]:
    """The sets on which graphs are scored: those of the table, else the protocol's own test set."""
    return study.table.tests or ("validation" if study.table.rows in ("exits", "thresholds") else "test",)


def _timing_s(study: Study, jobs: Sequence[Job], *, missing: bool) -> float:
    timing = study.table.timing
    if timing is None or not missing:
        return 0.0
    exported = [job.spec for job in jobs if job.spec.export or job.spec.exits]
    graphs = sum(len({"fp32", *spec.export}) + (3 if spec.exits else 0) for spec in exported)
    return timing.rounds * graphs * SECONDS_A_TURN


def run_study(plan: Plan, options: StudyOptions, progress: Progress = SILENT) -> StudyTable:
    """Train what is missing, measure times where the study wants them, and make the table.

    Raises:
        InterruptedRun: Ctrl-C or SIGTERM; the same command goes on.
        ArtifactError: damaged results.
    """
    study, failed = plan.study, dict[str, str]()
    if options.train:
        todo = [estimate for estimate in plan.estimates if estimate.state in ("to score", "resumable", "missing")]
        if todo:
            place = Workplace(options.artifacts, plan.results, splits_of(study), options.jobs, options.again)
            steps = {estimate.job.key or "": estimate.steps for estimate in todo}
            failed = work([estimate.job for estimate in todo], steps, place, progress)
    reasons = {estimate.job.title: estimate.basis for estimate in plan.estimates if estimate.state == "unavailable"}
    outcomes = [_outcome(job, plan.results, failed, reasons) for job in plan.jobs]
    if study.table.rows == "labels":
        outcomes = [_counted(outcome.job, plan.results) for outcome in outcomes]
    times = _times(study, outcomes, plan.results, options, progress)
    rows = rows_of(study, outcomes, times)
    return _table(study, outcomes, rows, times, options)


def _outcome(job: Job, results: Results, failed: Mapping[str, str], reasons: Mapping[str, str]) -> Outcome:
    found = results.of(job)
    reason = failed.get(job.key or "") or reasons.get(job.title)
    return Outcome(job, found, reason or ("has no results" if found is None else ""))


def _counted(job: Job, results: Results) -> Outcome:
    """What a job reads, of which a file is left for those who cannot read it."""
    results.keep_data(job)
    data = results.data_of(job)
    return Outcome(job, None, "" if data is not None else results.doubt(job) or job.data.reason, data)


def _times(
    study: Study, outcomes: Sequence[Outcome], results: Results, options: StudyOptions, progress: Progress
) -> StudyTimes | None:
    """The times of a study's graphs: known ones, else measured now, where all that there are lie here."""
    found = [outcome.found.run for outcome in outcomes if outcome.found is not None]
    runs = {run.key: run for run in found if timed_artifacts(run)}  # some are trained for their scores alone
    timing = study.table.timing
    if timing is None or not runs:
        return None
    known = results.times(times_key([*runs.values()], timing))
    folders = {key: options.artifacts / run.run for key, run in runs.items()}
    gone = [str(folders[run.key]) for run in runs.values() if not _graphs_are_in(folders[run.key], run)]
    if not options.train or (known is not None and (gone or taken_as_here(known))):
        return known
    if gone:
        progress.message(f"times are not measured: no graphs lie in {', '.join(gone)}, and all are measured in turns")
        return None
    times = measure_times([*runs.values()], folders, timing, options.artifacts, progress)
    results.keep_times(times)
    return times


def _graphs_are_in(folder: Path, run: StudyRun) -> bool:
    """Whether a run's graphs that times are of lie here, too: its results may be from elsewhere."""
    bundle = folder / BUNDLE_FOLDER
    if not (bundle / BUNDLE_FILE).is_file():
        return False
    built = {artifact.id for artifact in Bundle.open(bundle).manifest.artifacts if artifact.status == "built"}
    return built >= {*timed_artifacts(run)}


def _table(
    study: Study, outcomes: Sequence[Outcome], rows: Sequence[StudyRow], times: StudyTimes | None, options: StudyOptions
) -> StudyTable:
    runs = {outcome.found.run.key: outcome.found.run for outcome in outcomes if outcome.found is not None}
    hosts = [f"{run.host.get('cpu')}, {run.host.get('accelerator', 'cpu')}, {run.precision}" for run in runs.values()]
    seen = {outcome.job.row: outcome for outcome in reversed(outcomes)}
    made = tuple(rows)
    return StudyTable(
        study=study.name,
        title=study.title,
        element=study.element,
        protocol=study.protocol.strip(),
        columns=study.table.columns,
        rows=made,
        picks=picks_of(study.table.choices, made),
        data={row: _notes(seen[row]) for row in study.runs if row in seen},
        sets={row: _sets(seen[row]) for row in study.runs if row in seen},
        minutes=round(sum(run.seconds for run in runs.values()) / 60, 1),
        hosts=tuple(dict.fromkeys(hosts)),
        times=_told(times),
        overrides=options.overrides,
        only=options.only,
        seeds=options.seeds,
        finding=finding_of(study, made),
        notes=(*study.notes, *filter(None, (mixed_times([*runs.values()]), mixed_formats([*runs.values()])))),
    )


def _notes(outcome: Outcome) -> tuple[str, ...]:
    return outcome.found.run.data_notes if outcome.found is not None else outcome.job.notes


def _sets(outcome: Outcome) -> dict[str, int]:
    if outcome.found is not None:
        return outcome.found.run.data.rows
    return outcome.data[0].rows if outcome.data is not None else {}


def _told(times: StudyTimes | None) -> str:
    if times is None:
        return ""
    rounds = len(times.entries[0].p50_ms) if times.entries else 0
    unstable = sum(not entry.stable for entry in times.entries)
    shaky = f"; {unstable} of {len(times.entries)} graphs were not measured calmly" if unstable else ""
    return (
        f"batch {times.batch} × {times.seq} tokens on {times.host.get('cpu')}, {times.threads} threads; {rounds} "
        f"rounds in turns, each median in a process of its own{shaky}"
    )
