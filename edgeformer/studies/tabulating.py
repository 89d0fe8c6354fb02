"""From results to a table: each line's figures over its seeds, the published values beside them, and what is picked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from edgeformer.formats.manifest import DataSummary
from edgeformer.formats.study import Choice, Published, RunSpec, Study, TableSpec, measure
from edgeformer.formats.study_result import Cell, Picked, StudyRow, StudyRun, StudyTimes
from edgeformer.studies.jobs import Job
from edgeformer.studies.lines import Clock, Lines, graph_of, label_lines, lines_of
from edgeformer.studies.needs import asked_exits
from edgeformer.studies.results import Found

NOTHING = "–"


@dataclass(frozen=True)
class Outcome:
    """What became of one job: its results, or why there are none; ``data``: what it reads, and who counted that."""

    job: Job
    found: Found | None
    reason: str = ""
    data: tuple[DataSummary, str] | None = None


def rows_of(study: Study, outcomes: Sequence[Outcome], times: StudyTimes | None) -> tuple[StudyRow, ...]:
    """The lines of a study's table, rows in its order."""
    rows: list[StudyRow] = []
    clock = Clock(times, [outcome.found.run for outcome in outcomes if outcome.found is not None])
    reference = _reference(study.table, outcomes)
    for name, spec in study.runs.items():
        own = [outcome for outcome in outcomes if outcome.job.row == name]
        if study.table.rows == "labels":
            rows += _label_rows(name, spec, own, study.table)
        else:
            rows += _rows(name, spec, own, _Asked(study.table, clock, reference))
    return tuple(rows)


@dataclass(frozen=True)
class _Asked:
    table: TableSpec
    clock: Clock
    reference: tuple[str, str | None] | None  # key and graph that ratios are of


def _reference(table: TableSpec, outcomes: Sequence[Outcome]) -> tuple[str, str | None] | None:
    if table.timing is None:
        return None
    name, _, at = table.timing.against.partition("/")
    runs = [outcome.found.run for outcome in outcomes if outcome.job.row == name and outcome.found is not None]
    return (runs[0].key, graph_of(runs[0], table, at)) if runs else None


def _rows(name: str, spec: RunSpec, outcomes: Sequence[Outcome], asked: _Asked) -> list[StudyRow]:
    table, found = asked.table, [outcome.found for outcome in outcomes if outcome.found is not None]
    by_key = {one.run.key: (one.run, lines_of(one.run, table, asked.clock)) for one in found}  # each run once
    published = [known for known in table.published if known.run == name]
    rows = []
    for at in _ats(spec, table, [lines for _, lines in by_key.values()], published):
        runs = [run for run, lines in by_key.values() if at in lines]
        seeds = [lines[at] for _, lines in by_key.values() if at in lines]
        cells = _cells(seeds, table, _printed(published, at))
        if asked.reference is not None and "speedup" in table.columns:
            cells["speedup"] = _speedup(runs, at, asked, cells["speedup"])
        rows.append(
            StudyRow(
                run=name,
                label=spec.label,
                at=at,
                group=spec.group,
                cells=cells,
                source="; ".join(dict.fromkeys(known.source for known in published if _fits(known, at))),
                origin=", ".join(dict.fromkeys(one.origin for one in found)) or NOTHING,
                keys=tuple(run.key for run in runs),
                missing=_missing(outcomes, by_key, table, at),
                leaks=any(run.leaks for run in runs),
                synthetic=any(run.data.synthetic for run in runs),
                note=spec.note,
            )
        )
    return rows


def _ats(spec: RunSpec, table: TableSpec, known: Sequence[Lines], published: Sequence[Published]) -> list[str]:
    """The lines of a row: those that there are, those that were asked for, and those that the paper has."""
    found = [at for lines in known for at in lines]
    asked = ["fp32", *spec.export] if table.rows == "artifacts" and (spec.export or spec.exits) else []
    printed = [_written(line.at) for line in published if line.at is not None]
    return list(dict.fromkeys((*found, *asked, *printed))) or [NOTHING]


def _missing(
    outcomes: Sequence[Outcome], by_key: Mapping[str, tuple[StudyRun, Lines]], table: TableSpec, at: str
) -> str | None:
    """Why a line lacks figures of ours, or those of a seed."""
    for outcome in outcomes:
        run, lines = by_key[outcome.found.run.key] if outcome.found is not None else (None, {})
        lack = "" if run is None else _lack(outcome.job, run, lines, table, at)
        if run is None or lack:
            return f"{outcome.job.title}: {'; '.join(part for part in (lack, outcome.reason) if part)}"
    return _rejected([run for run, _ in by_key.values()], table, at)


def _lack(job: Job, run: StudyRun, lines: Lines, table: TableSpec, at: str) -> str:
    """What a finished run lacks of a line; empty: nothing, or what was rejected."""
    if at not in lines:
        return "its results have no line here" if at == NOTHING else f"its results have no {at}"
    if table.rows == "artifacts" and graph_of(run, table, at) is not None and "rows" not in lines[at]:
        return f"{at} is exported, and not scored"
    graphs = {artifact.exit for artifact in run.artifacts if artifact.role == "exit"}
    if table.rows == "exits" and at in map(str, asked_exits(job) - graphs):
        return f"exit {at} is not exported"
    return ""


def _label_rows(name: str, spec: RunSpec, outcomes: Sequence[Outcome], table: TableSpec) -> list[StudyRow]:
    (outcome, *_) = outcomes
    published = [known for known in table.published if known.run == name]
    lines: Lines = label_lines(outcome.data[0].label_rows) if outcome.data is not None else {}
    ats = [*lines] or [_written(known.at) for known in published] or [NOTHING]
    return [
        StudyRow(
            run=name,
            label=spec.label,
            at=at,
            group=spec.group,
            cells=_cells([lines[at]] if at in lines else [], table, _printed(published, at)),
            source="; ".join(dict.fromkeys(known.source for known in published if _fits(known, at))),
            origin=outcome.data[1] if outcome.data is not None else NOTHING,
            missing=None if lines else outcome.reason,
            note=spec.note,
        )
        for at in ats
    ]


def _written(at: object) -> str:
    if isinstance(at, float):
        return f"{at:g}"
    return NOTHING if at is None else str(at)


def _fits(known: Published, at: str) -> bool:
    return known.at is None or _written(known.at) == at


def _printed(published: Sequence[Published], at: str) -> dict[str, float]:
    return {name: value for known in published if _fits(known, at) for name, value in known.values.items()}


def _cells(seeds: Sequence[Mapping[str, float]], table: TableSpec, printed: Mapping[str, float]) -> dict[str, Cell]:
    cells = {}
    for name in dict.fromkeys((*table.columns, *printed, *(name for figures in seeds for name in figures))):
        values = [figures[name] for figures in seeds if name in figures]
        cells[name] = Cell(
            mean=mean(values) if values else None,
            sd=stdev(values) if len(values) > 1 else None,
            n=len(values),
            values=tuple(values) if len(values) > 1 else (),
            published=printed.get(name),
        )
    return cells


def _speedup(runs: Sequence[StudyRun], at: str, asked: _Asked, cell: Cell) -> Cell:
    """The median over all rounds, with the least and the most: rounds are what spreads here, not seeds."""
    assert asked.reference is not None
    ratios = [
        ratio for run in runs for ratio in asked.clock.ratios(run.key, graph_of(run, asked.table, at), asked.reference)
    ]
    if not ratios:
        return cell
    found = {"mean": median(ratios), "low": min(ratios), "high": max(ratios), "n": len(ratios)}
    return cell.model_copy(update=found)


def _rejected(runs: Sequence[StudyRun], table: TableSpec, at: str) -> str | None:
    """Why a graph of this line is not there."""
    if table.rows != "artifacts":
        return None
    graphs = [a for run in runs for a in run.artifacts if a.role == "full" and a.precision == at]
    return next((f"{a.status}: {a.reason}" for a in graphs if a.status != "built"), None)


def picks_of(choices: Sequence[Choice], rows: Sequence[StudyRow]) -> tuple[Picked, ...]:
    """What each choice across the rows comes to."""
    return tuple(_pick(choice, rows) for choice in choices)


def _value(row: StudyRow, name: str) -> float | None:
    cell = row.cells.get(name)
    return cell.mean if cell is not None else None


def _pick(choice: Choice, rows: Sequence[StudyRow]) -> Picked:
    def gain(row: StudyRow, name: str) -> float:
        value = _value(row, name)
        assert value is not None
        return value if measure(name).higher_is_better else -value

    names = [choice.smallest, *([choice.keep] if choice.keep else [])]
    pool = [row for row in rows if not row.leaks and all(_value(row, name) is not None for name in names)]
    if not pool:
        reason = f"no row has {' and '.join(measure(name).heading for name in names)}"
        return Picked(title=choice.title, row=None, reason=reason, paper=choice.paper)
    bound = ""
    if choice.keep is not None:
        best = max(gain(row, choice.keep) for row in pool)
        near = [row for row in pool if gain(row, choice.keep) >= best - choice.within - 1e-12]
        heading, places = measure(choice.keep).heading, measure(choice.keep).places
        bound = f", of {len(near)} whose {heading} is within {choice.within:g} of the best ({abs(best):.{places}f})"
        pool = near
    pick = max(pool, key=lambda row: gain(row, choice.smallest))
    value, what = _value(pick, choice.smallest), measure(choice.smallest)
    reason = f"{pick.label}, {pick.at}: {what.heading} {value:,.{what.places}f}{bound}"
    return Picked(title=choice.title, row=[*rows].index(pick), reason=reason, paper=choice.paper)
