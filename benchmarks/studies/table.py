"""From results to a table: each row's figures over its seeds, published values beside them, recommendations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from benchmarks.studies.paired import Paired, Right, adjust, compare, unpacked
from benchmarks.studies.results import Cell, ExportedSize, Outcome, Picked, StudyRow, StudyRun, StudyTimes
from benchmarks.studies.specification import Choice, Study, TableSpec, measure
from edgeformer.report.columns import DASH
from edgeformer.run import TORCH

Lines = dict[str, dict[str, float]]
"""Test set, precision, exit or threshold → figure → value."""
_SCORES = ("accuracy", "f1", "precision", "recall", "loss", "perplexity", "word_perplexity", "ms_per_sample")
_BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 0.5}
"""Bytes of a parameter, as the papers count them."""


def rows_of(study: Study, outcomes: Sequence[Outcome], times: StudyTimes | None) -> tuple[StudyRow, ...]:
    """Return the rows of a study's table, runs in its order."""
    table, rows = study.table, list[StudyRow]()
    latencies = {(entry.run, entry.artifact): entry.p50_ms for entry in times.entries} if times is not None else {}

    def latency(run: StudyRun, place: str) -> Sequence[float | None]:
        graph = graph_of(run, table, place)
        return latencies.get((run.key, graph.id), ()) if graph is not None and graph.status == "built" else ()

    against: Sequence[float | None] = ()
    if table.timing is not None:
        name, _, part = table.timing.against.partition("/")
        reference = next((o.run for o in outcomes if o.job.row == name and o.run is not None), None)
        against = latency(reference, part) if reference is not None else ()
    host = next(iter(timing_hosts([outcome.run for outcome in outcomes if outcome.run is not None])), None)
    for name, spec in study.runs.items():
        jobs = [outcome for outcome in outcomes if outcome.job.row == name]
        trained = {outcome.run.key: outcome.run for outcome in jobs if outcome.run is not None}
        lines = {key: _lines(run, table, host) for key, run in trained.items()}
        origin = ", ".join(dict.fromkeys(run.origin for run in trained.values())) or DASH
        if table.rows == "labels" and (summary := jobs[0].job.summary) is not None:
            lines = {"": _label_lines(summary.label_rows)}
            origin = "results in studies" if jobs[0].job.reason else "counted here"
        published = [(_at_text(row.at), row) for row in table.published if row.run == name]
        places = [place for parts in lines.values() for place in parts]  # those with results come first
        if table.rows == "artifacts" and (spec.export or spec.exits):  # then those that the study asks for
            places += ["fp32", *spec.export]
        if table.rows != "labels" or not lines:  # and those that the paper has
            places += [at for at, row in published if row.at is not None]
        for place in dict.fromkeys(places or [DASH]):
            runs = [run for key, run in trained.items() if place in lines[key]]
            seeds = [parts[place] for parts in lines.values() if place in parts]
            ratios = []
            for figures, run in zip(seeds, runs, strict=False):  # labels have no runs
                p50 = latency(run, place)
                if measured := [ms for ms in p50 if ms is not None]:
                    figures.setdefault("latency_ms", median(measured))
                ratios += [other / ms for ms, other in zip(p50, against, strict=False) if ms and other]
            printed = [row for at, row in published if row.at is None or at == place]
            cells = _cells(seeds, table.columns, {key: value for row in printed for key, value in row.values.items()})
            if "speedup" in table.columns and ratios:  # the spread over rounds, not over seeds
                spread = {"mean": median(ratios), "low": min(ratios), "high": max(ratios), "n": len(ratios)}
                cells["speedup"] = cells["speedup"].model_copy(update=spread)
            if table.rows == "labels":
                missing = None if lines else jobs[0].reason
            else:
                missing = _missing(jobs, lines, table, place)
            rows.append(
                StudyRow(
                    run=name, label=spec.label, at=place, group=spec.group, cells=cells,
                    source="; ".join(dict.fromkeys(row.source for row in printed)), origin=origin,
                    keys=tuple(run.key for run in runs), missing=missing,
                    leaks=any(run.leaks for run in trained.values()),
                    synthetic=any(run.data.synthetic for run in trained.values()), note=spec.note,
                )
            )  # fmt: skip
    return tuple(rows)


def pairs_of(study: Study, outcomes: Sequence[Outcome]) -> tuple[Paired, ...]:
    """Return the comparisons that a study asks for, on each set whose answers both runs kept."""
    rights: dict[str, dict[str, dict[int, Right]]] = {}  # run → set → seed → answers
    for outcome in outcomes:
        for name, text in outcome.run.right.items() if outcome.run is not None else ():
            assert outcome.run is not None
            count = next(row.n for row in outcome.run.evaluation.rows if (row.artifact, row.split) == (TORCH, name))
            rights.setdefault(outcome.job.row, {}).setdefault(name, {})[outcome.job.recipe.seed] = unpacked(text, count)
    pairs = []
    for run, against in study.table.paired.items():
        sets, others = rights.get(run, {}), rights.get(against, {})
        for name in study.table.tests or sets:
            if name in sets and name in others:
                pairs.append(compare(run, against, name, sets[name], others[name]))
    return adjust([pair for pair in pairs if pair is not None])


def graph_of(run: StudyRun, table: TableSpec, place: str) -> ExportedSize | None:
    """Return the graph whose latency a row shows; None: it was not exported."""
    if table.rows == "exits" and place != str(run.loops):
        return run.graph("fp32", int(place))
    return run.graph(place if table.rows == "artifacts" else "fp32")


def timing_hosts(runs: Sequence[StudyRun]) -> list[str]:
    """Return the processors that took times per sample, that of most runs first."""
    hosts = Counter(
        host
        for run in runs
        for host in {row.host or "an unrecorded host" for row in run.evaluation.rows if row.ms_per_sample is not None}
    )
    return [host for host, _ in hosts.most_common()]


def mixed_hosts(runs: Sequence[StudyRun]) -> str:
    """Return a note where not all runs' times per sample are shown, because they are of several processors."""
    shown, *others = timing_hosts(runs) or [""]
    return f"Times per sample are those of {shown}; runs that {' and '.join(others)} timed show none." if others else ""


def mixed_formats(runs: Sequence[StudyRun]) -> str:
    """Return a note where runs were trained in several number formats; ``precision: auto`` depends on the processor."""
    formats = list(dict.fromkeys(run.precision for run in runs if run.recipe.get("model", {}).get("kind") != "linear"))
    return f"Trained in {' and '.join(formats)}: seeds of both differ by more than chance." if len(formats) > 1 else ""


def _scores(row: Any, names: Sequence[str] = _SCORES) -> dict[str, float]:
    values = {"rows": row.n, **{name: getattr(row, name, None) for name in names}}
    return {name: value for name, value in values.items() if value is not None}


def _lines(run: StudyRun, table: TableSpec, host: str | None) -> Lines:
    """Return the figures of a run for each of its rows; times per sample only if they are of this processor."""
    lines: Lines = {}
    rows = run.evaluation.rows
    torch_rows = [row for row in rows if row.artifact == TORCH]
    scored_sets = [row.split for row in torch_rows]
    tests = table.tests or [name for name in scored_sets if name != "validation"]
    sets = [name for name in dict.fromkeys(tests) if name in scored_sets]
    split = next(iter(table.tests), "validation")
    if table.rows == "tests":
        complete = {row.split: _scores(row) for row in torch_rows if row.exit is None}
        graph = run.graph("fp32")
        for row in rows:  # the deployed graph's time counts
            if (
                graph is not None
                and row.artifact == graph.id
                and row.split in complete
                and row.ms_per_sample is not None
            ):
                complete[row.split]["ms_per_sample"] = row.ms_per_sample
        lines = {name: complete[name] for name in sets if name in complete}
        for name in lines if "cut" in table.columns else ():
            lines[name]["cut"] = run.data.truncated_rows.get(name, 0) / run.data.rows[name]
    elif table.rows == "artifacts":
        for graph in (artifact for artifact in run.artifacts if artifact.role == "full"):
            scored = {row.split: _scores(row) for row in rows if row.artifact == graph.id and row.exit is None}
            size = {"megabytes": _BYTES[graph.precision] * run.parameters / 2**20}
            if graph.size_bytes is not None:
                size["size_bytes"] = graph.size_bytes
            lines[graph.precision] = {**size, **next((scored[name] for name in sets if name in scored), {})}
    elif table.rows == "exits":
        by_loop = {row.exit or run.loops: row for row in torch_rows if row.split == split}
        for loop, row in sorted(by_loop.items()):
            lines[str(loop)] = {**_scores(row), "loop_ratio": run.loops / loop}
    else:
        for early in run.evaluation.early_exit:
            if early.artifact == TORCH and early.split == split:
                rule = "" if early.rule == "confidence" else f"{early.rule} "
                place = "schedule" if early.threshold is None else f"{rule}{early.threshold:g}"
                figures = _scores(early, ("loss", "accuracy", "perplexity", "mean_loops"))
                lines[place] = {**figures, "loop_ratio": run.loops / early.mean_loops}
    common: dict[str, Any] = {"parameters": run.parameters, "minutes": run.seconds / 60, "epochs": run.epochs}
    common |= {"train_rows": run.data.rows["train"]} if "train_rows" in table.columns else {}
    common |= {"best_epoch": run.best_epoch} if run.best_epoch is not None else {}
    accuracies = [record["val_accuracy"] for record in run.curve if "val_accuracy" in record]
    common |= {"last_validation": accuracies[-1]} if accuracies else {}
    common |= {"megabytes": _BYTES["fp32"] * run.parameters / 2**20}
    for figures in lines.values() if timing_hosts([run]) != [host] else ():
        figures.pop("ms_per_sample", None)
    return {place: {**common, **figures} for place, figures in lines.items()}


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
    graphs = []
    for outcome in outcomes:
        lack, run = "", outcome.run
        if run is not None:
            graph = graph_of(run, table, place) if table.rows in ("artifacts", "exits") and place != DASH else None
            if table.rows == "artifacts" and graph is not None:
                graphs.append(graph)
            if place not in lines[run.key]:
                lack = "its results have no line here" if place == DASH else f"its results have no {place}"
            elif graph is not None and graph.status == "built" and "rows" not in lines[run.key][place]:
                lack = f"{place} is exported, and not scored"
            elif graph is None and table.rows == "exits" and place in map(str, outcome.job.exits):
                lack = f"exit {place} is not exported"
        if run is None or lack:
            return f"{outcome.job.title}: {'; '.join(part for part in (lack, outcome.reason) if part)}"
    return next((f"{graph.status}: {graph.reason}" for graph in graphs if graph.status != "built"), None)


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
