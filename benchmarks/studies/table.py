"""From results to a table: each row's figures over its seeds, published values beside them, recommendations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from benchmarks.studies.jobs import Job
from benchmarks.studies.results import Cell, Picked, StudyRow, StudyRun, StudyTimes
from benchmarks.studies.specification import Choice, Published, RunSpec, Study, TableSpec, measure
from benchmarks.studies.store import Match
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.run import TORCH

DASH = "–"
Lines = dict[str, dict[str, float]]
"""Test set, precision, exit or threshold → figure → value."""
_SCORES = ("accuracy", "f1", "precision", "recall", "loss", "perplexity", "word_perplexity", "ms_per_sample")
_BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 0.5}
"""Bytes of a parameter, as the papers count them."""


@dataclass(frozen=True)
class Outcome:
    """The results of one job, or why there are none; ``data``: what it reads, and who counted that."""

    job: Job
    match: Match | None
    reason: str = ""
    data: tuple[DataSummary, str] | None = None


def rows_of(study: Study, outcomes: Sequence[Outcome], times: StudyTimes | None) -> tuple[StudyRow, ...]:
    """Return the rows of a study's table, runs in its order."""
    table, rows = study.table, list[StudyRow]()
    latencies = {(entry.run, entry.artifact): entry.p50_ms for entry in times.entries} if times is not None else {}
    per_sample = not mixed_hosts([outcome.match.run for outcome in outcomes if outcome.match is not None])
    against: Sequence[float | None] = ()
    if table.timing is not None:
        name, _, part = table.timing.against.partition("/")
        runs = [o.match.run for o in outcomes if o.job.row == name and o.match is not None]
        against = latencies.get((runs[0].key, graph_of(runs[0], table, part) or ""), ()) if runs else ()
    for name, spec in study.runs.items():
        jobs = [outcome for outcome in outcomes if outcome.job.row == name]
        matches = {outcome.match.run.key: outcome.match for outcome in jobs if outcome.match is not None}
        lines = {key: _lines(match.run, table, per_sample=per_sample) for key, match in matches.items()}
        origin = ", ".join(dict.fromkeys(match.origin for match in matches.values())) or DASH
        if table.rows == "labels" and jobs[0].data is not None:
            lines, origin = {"": _label_lines(jobs[0].data[0].label_rows)}, jobs[0].data[1]
        published = [row for row in table.published if row.run == name]
        for place in _parts(spec, table, [*lines.values()], published):
            runs = [match.run for key, match in matches.items() if place in lines[key]]
            seeds = [parts[place] for parts in lines.values() if place in parts]
            ratios = []
            for figures, run in zip(seeds, runs, strict=False):  # labels have no runs
                p50 = latencies.get((run.key, graph_of(run, table, place) or ""), ())
                if measured := [ms for ms in p50 if ms is not None]:
                    figures.setdefault("latency_ms", median(measured))
                ratios += [other / ms for ms, other in zip(p50, against, strict=False) if ms and other]
            printed = [row for row in published if row.at is None or _at_text(row.at) == place]
            cells = _cells(seeds, table.columns, {key: value for row in printed for key, value in row.values.items()})
            if "speedup" in table.columns and ratios:  # the spread over rounds, not over seeds
                spread = {"mean": median(ratios), "low": min(ratios), "high": max(ratios), "n": len(ratios)}
                cells["speedup"] = cells["speedup"].model_copy(update=spread)
            missing = (
                _missing(jobs, lines, table, place) if table.rows != "labels" else None if lines else jobs[0].reason
            )
            rows.append(
                StudyRow(
                    run=name, label=spec.label, at=place, group=spec.group, cells=cells,
                    source="; ".join(dict.fromkeys(row.source for row in printed)), origin=origin,
                    keys=tuple(run.key for run in runs), missing=missing,
                    leaks=any(match.run.leaks for match in matches.values()),
                    synthetic=any(match.run.data.synthetic for match in matches.values()), note=spec.note,
                )
            )  # fmt: skip
    return tuple(rows)


def graph_of(run: StudyRun, table: TableSpec, place: str) -> str | None:
    """Return the id of the graph whose latency a row shows; None: it was not built."""
    if table.rows == "exits" and place != str(run.loops):
        graphs = [a for a in run.artifacts if (a.role, a.precision, str(a.exit)) == ("exit", "fp32", place)]
    else:
        precision = place if table.rows == "artifacts" else "fp32"
        graphs = [a for a in run.artifacts if (a.role, a.precision) == ("full", precision)]
    return graphs[0].id if graphs and graphs[0].status == "built" else None


def mixed_hosts(runs: Sequence[StudyRun]) -> str:
    """Return why the runs' times per sample cannot be compared; empty: all were taken on one processor."""
    rows = (row for run in runs for row in run.evaluation.rows if row.ms_per_sample is not None)
    hosts = list(dict.fromkeys(row.host or "an unrecorded host" for row in rows))
    return f"No time per sample is shown: they were taken on {' and '.join(hosts)}." if len(hosts) > 1 else ""


def mixed_formats(runs: Sequence[StudyRun]) -> str:
    """Return a note where runs were trained in several number formats; ``precision: auto`` depends on the processor."""
    formats = list(dict.fromkeys(run.precision for run in runs))
    return f"Trained in {' and '.join(formats)}: seeds of both differ by more than chance." if len(formats) > 1 else ""


def _lines(run: StudyRun, table: TableSpec, *, per_sample: bool) -> Lines:
    """Return the figures of a run for each of its rows."""
    lines: Lines = {}
    torch_rows = [row for row in run.evaluation.rows if row.artifact == TORCH]
    graphs = [artifact for artifact in run.artifacts if artifact.role == "full"]
    splits = [row.split for row in torch_rows]
    sets = list(dict.fromkeys(table.tests or (split for split in splits if split != "validation")))
    sets = [name for name in sets if name in splits]

    def scores(row: object) -> dict[str, float]:
        figures = {"rows": getattr(row, "n"), **{name: getattr(row, name, None) for name in _SCORES}}  # noqa: B009
        return {name: value for name, value in figures.items() if value is not None}

    if table.rows == "tests":
        complete = {row.split: scores(row) for row in torch_rows if row.exit is None}
        for graph in graphs:
            for row in run.evaluation.rows if graph.precision == "fp32" else ():  # the deployed graph's time counts
                if row.artifact == graph.id and row.split in complete and row.ms_per_sample is not None:
                    complete[row.split]["ms_per_sample"] = row.ms_per_sample
        lines = {name: complete[name] for name in sets if name in complete}
    elif table.rows == "artifacts":
        for graph in graphs:
            size = {"megabytes": _BYTES[graph.precision] * run.parameters / 2**20}
            if graph.size_bytes is not None:
                size["size_bytes"] = graph.size_bytes
            scored = {r.split: scores(r) for r in run.evaluation.rows if r.artifact == graph.id and r.exit is None}
            lines[graph.precision] = {**size, **next((scored[name] for name in sets if name in scored), {})}
    elif table.rows == "exits":
        split = next(iter(table.tests), "validation")
        by_loop = {row.exit or run.loops: scores(row) for row in torch_rows if row.split == split}
        lines = {str(loop): {**by_loop[loop], "loop_ratio": run.loops / loop} for loop in sorted(by_loop)}
    else:
        split = next(iter(table.tests), "validation")
        for early in run.evaluation.early_exit:
            if early.artifact == TORCH and early.split == split:
                figures = {name: getattr(early, name) for name in ("loss", "accuracy", "perplexity", "mean_loops")}
                rule = "" if early.rule == "confidence" else f"{early.rule} "
                place = "schedule" if early.threshold is None else f"{rule}{early.threshold:g}"
                figures = {name: value for name, value in figures.items() if value is not None}
                lines[place] = {"rows": early.n, **figures, "loop_ratio": run.loops / early.mean_loops}
    common = {"parameters": run.parameters, "minutes": run.seconds / 60, "epochs": run.epochs}
    common |= {"best_epoch": run.best_epoch} if run.best_epoch is not None else {}
    common |= {"megabytes": _BYTES["fp32"] * run.parameters / 2**20}
    dropped = set() if per_sample else {"ms_per_sample"}
    return {
        place: {name: value for name, value in {**common, **figures}.items() if name not in dropped}
        for place, figures in lines.items()
    }


def _label_lines(label_rows: Mapping[str, Mapping[str, int]]) -> Lines:
    """Return the shares of the labels in each set of some data, in percent."""
    lines: Lines = {}
    for name, counts in label_rows.items():
        total = sum(counts.values())
        shares = {f"share_{number}": 100 * rows / max(1, total) for number, rows in enumerate(counts.values())}
        lines[name] = {"rows": total, **shares}
    return lines


def _at_text(place: object) -> str:
    return DASH if place is None else f"{place:g}" if isinstance(place, float) else str(place)


def _parts(spec: RunSpec, table: TableSpec, lines: Sequence[Lines], published: Sequence[Published]) -> list[str]:
    """Return the rows of a run: those with results, those that the study asks for, and those that the paper has."""
    printed = [_at_text(row.at) for row in published if row.at is not None]
    if table.rows == "labels" and lines:
        printed = []
    graphs = ["fp32", *spec.export] if table.rows == "artifacts" and (spec.export or spec.exits) else []
    return list(dict.fromkeys((*(place for parts in lines for place in parts), *graphs, *printed))) or [DASH]


def _cells(
    seeds: Sequence[Mapping[str, float]], columns: Sequence[str], printed: Mapping[str, float]
) -> dict[str, Cell]:
    cells = {}
    for name in dict.fromkeys((*columns, *printed, *(name for figures in seeds for name in figures))):
        values = [figures[name] for figures in seeds if name in figures]
        several = len(values) > 1
        cells[name] = Cell(
            mean=mean(values) if values else None,
            sd=stdev(values) if several else None,
            n=len(values),
            values=tuple(values) if several else (),
            published=printed.get(name),
        )
    return cells


def _missing(outcomes: Sequence[Outcome], lines: Mapping[str, Lines], table: TableSpec, place: str) -> str | None:
    """Return why a row has no figures, or lacks those of a seed."""
    for outcome in outcomes:
        lack = ""
        if outcome.match is not None:
            run = outcome.match.run
            graphs = {artifact.exit for artifact in run.artifacts if artifact.role == "exit"}
            if place not in lines[run.key]:
                lack = "its results have no line here" if place == DASH else f"its results have no {place}"
            elif table.rows == "artifacts" and graph_of(run, table, place) and "rows" not in lines[run.key][place]:
                lack = f"{place} is exported, and not scored"
            elif table.rows == "exits" and place in map(str, outcome.job.exits - graphs):
                lack = f"exit {place} is not exported"
        if outcome.match is None or lack:
            return f"{outcome.job.title}: {'; '.join(part for part in (lack, outcome.reason) if part)}"
    runs = [outcome.match.run for outcome in outcomes if outcome.match is not None and table.rows == "artifacts"]
    graphs_at = (a for run in runs for a in run.artifacts if (a.role, a.precision) == ("full", place))
    return next((f"{graph.status}: {graph.reason}" for graph in graphs_at if graph.status != "built"), None)


def pick(choice: Choice, rows: Sequence[StudyRow]) -> Picked:
    """Return the row that a choice recommends; rows that leak are never recommended."""

    def gain(row: StudyRow, name: str) -> float:
        value = row.cell(name).mean
        return -float("inf") if value is None else value if measure(name).higher_is_better else -value

    names = [choice.smallest, *([choice.keep] if choice.keep else [])]
    pool = [row for row in rows if not row.leaks and all(row.cell(name).mean is not None for name in names)]
    if not pool:
        reason = f"no row has {' and '.join(measure(name).heading for name in names)}"
        return Picked(title=choice.title, row=None, reason=reason, paper=choice.paper)
    bound = ""
    if choice.keep is not None:
        best = max(gain(row, choice.keep) for row in pool)
        pool = [row for row in pool if gain(row, choice.keep) >= best - choice.within - 1e-12]
        heading, places = measure(choice.keep).heading, measure(choice.keep).places
        bound = f", of {len(pool)} whose {heading} is within {choice.within:g} of the best ({abs(best):.{places}f})"
    picked = max(pool, key=lambda row: gain(row, choice.smallest))
    figure = measure(choice.smallest)
    value = f"{abs(gain(picked, choice.smallest)):,.{figure.places}f}"
    reason = f"{picked.label}, {picked.at}: {figure.heading} {value}{bound}"
    return Picked(title=choice.title, row=[*rows].index(picked), reason=reason, paper=choice.paper)
