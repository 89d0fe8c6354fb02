"""The figures of one run, for each line that it has in a study's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from edgeformer.formats.scores import EvaluationRow
from edgeformer.formats.study import TableSpec
from edgeformer.formats.study_result import ExportedSize, StudyRun, StudyTimes
from edgeformer.run import TORCH

Figures = dict[str, float]
"""Figure → value."""

Lines = dict[str, Figures]
"""Test set, precision, exit or threshold → figures."""

_SCORES = ("accuracy", "f1", "precision", "recall", "loss", "perplexity", "word_perplexity")
_BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 0.5}
"""Of a parameter: how the papers count megabytes."""

SCHEDULE = "schedule"
"""The line of the paper's own thresholds, which fall from loop to loop."""
VALIDATION = "validation"


class Clock:
    """Times of graphs by run and artifact.

    Args:
        times: None: nothing was measured.
        runs: of the table; their times per sample are shown where all were taken on one processor.

    Attributes:
        per_sample: whether they are.
    """

    def __init__(self, times: StudyTimes | None, runs: Sequence[StudyRun] = ()) -> None:
        self.per_sample = not mixed_times(runs)
        self._p50 = {(entry.run, entry.artifact): entry.p50_ms for entry in times.entries} if times else {}

    def figures(self, key: str, artifact: str | None) -> Figures:
        """The median time of a graph; nothing where it was not measured."""
        found = [p50 for p50 in self._p50.get((key, artifact or ""), ()) if p50 is not None]
        return {"latency_ms": median(found)} if found else {}

    def ratios(self, key: str, artifact: str | None, against: tuple[str, str | None]) -> list[float]:
        """How many times as fast as another graph, for each round in which both were measured."""
        mine, others = self._p50.get((key, artifact or ""), ()), self._p50.get((against[0], against[1] or ""), ())
        rounds = zip(mine, others, strict=False)  # both have an entry for each round
        return [other / own for own, other in rounds if own is not None and other is not None]


def graph_of(run: StudyRun, table: TableSpec, at: str) -> str | None:
    """The id of the graph that a line's times are of."""
    if table.rows == "exits" and at != str(run.loops):
        found = [a for a in run.artifacts if a.role == "exit" and a.precision == "fp32" and str(a.exit) == at]
    else:
        found = _full(run, at if table.rows == "artifacts" else "fp32")
    return found[0].id if found and found[0].status == "built" else None


def lines_of(run: StudyRun, table: TableSpec, clock: Clock) -> Lines:
    """The lines of a run in the table, each with all figures that are known."""
    made: Mapping[str, Callable[[StudyRun, Sequence[str]], Lines]] = {
        "tests": _tests,
        "artifacts": _artifacts,
        "exits": _exits,
        "thresholds": _thresholds,
    }
    lines = made[table.rows](run, table.tests)
    if not clock.per_sample:
        for figures in lines.values():
            figures.pop("ms_per_sample", None)
    about = {"parameters": run.parameters, "minutes": run.seconds / 60, "epochs": run.epochs}
    if run.best_epoch is not None:
        about["best_epoch"] = run.best_epoch
    megabytes = {"megabytes": _BYTES["fp32"] * run.parameters / 2**20}
    return {
        at: {**about, **megabytes, **clock.figures(run.key, graph_of(run, table, at)), **figures}
        for at, figures in lines.items()
    }


def label_lines(label_rows: Mapping[str, Mapping[str, int]]) -> Lines:
    """Shares of the labels in each set of some data, in percent."""
    lines: Lines = {}
    for name, counts in label_rows.items():
        whole = sum(counts.values())
        shares = {f"share_{number}": 100 * rows / max(1, whole) for number, rows in enumerate(counts.values())}
        lines[name] = {"rows": whole, **shares}
    return lines


def _rows(run: StudyRun, artifact: str) -> list[EvaluationRow]:
    return [row for row in run.evaluation.rows if row.artifact == artifact]


def _full(run: StudyRun, precision: str) -> list[ExportedSize]:
    return [artifact for artifact in run.artifacts if artifact.role == "full" and artifact.precision == precision]


def mixed_times(runs: Sequence[StudyRun]) -> str:
    """Why the runs' times per sample cannot be compared; empty: all were taken on one processor."""
    rows = (row for run in runs for row in run.evaluation.rows if row.ms_per_sample is not None)
    found = list(dict.fromkeys(row.host or "one that nobody noted" for row in rows))
    return f"No time per sample is shown: they were taken on {' and '.join(found)}." if len(found) > 1 else ""


def mixed_formats(runs: Sequence[StudyRun]) -> str:
    """That runs were trained in several number formats; empty: in one. `precision: auto` takes what a processor has."""
    found = list(dict.fromkeys(run.precision for run in runs))
    return f"Trained in {' and '.join(found)}: seeds of both differ by more than chance." if len(found) > 1 else ""


def _scores(row: EvaluationRow) -> Figures:
    found = {name: getattr(row, name) for name in (*_SCORES, "ms_per_sample")}
    return {"rows": row.n, **{name: value for name, value in found.items() if value is not None}}


def _sets(run: StudyRun, tests: Sequence[str]) -> list[str]:
    """The sets that a table shows of a run: those that it names, else all but the validation set."""
    have = list(dict.fromkeys(row.split for row in _rows(run, TORCH)))
    return [name for name in tests if name in have] if tests else [name for name in have if name != VALIDATION]


def _tests(run: StudyRun, tests: Sequence[str]) -> Lines:
    scored = {row.split: _scores(row) for row in _rows(run, TORCH) if row.exit is None}
    for graph in _full(run, "fp32"):  # what is deployed is what is timed
        for row in _rows(run, graph.id):
            if row.split in scored and row.ms_per_sample is not None:
                scored[row.split]["ms_per_sample"] = row.ms_per_sample
    return {name: scored[name] for name in _sets(run, tests) if name in scored}


def _artifacts(run: StudyRun, tests: Sequence[str]) -> Lines:
    lines: Lines = {}
    for artifact in run.artifacts:
        if artifact.role != "full":
            continue
        size = {"megabytes": _BYTES[artifact.precision] * run.parameters / 2**20}
        if artifact.size_bytes is not None:
            size["size_bytes"] = artifact.size_bytes
        scores = {row.split: _scores(row) for row in _rows(run, artifact.id) if row.exit is None}
        first = next((name for name in _sets(run, tests) if name in scores), None)
        lines[artifact.precision] = {**size, **(scores[first] if first is not None else {})}
    return lines


def _exits(run: StudyRun, tests: Sequence[str]) -> Lines:
    wanted = next(iter(tests), VALIDATION)
    rows = [row for row in _rows(run, TORCH) if row.split == wanted]
    lines = {str(row.exit or run.loops): (row.exit or run.loops, _scores(row)) for row in rows}
    ordered = sorted(lines.items(), key=lambda line: line[1][0])
    return {at: {**figures, "loop_ratio": run.loops / loop} for at, (loop, figures) in ordered}


def _thresholds(run: StudyRun, tests: Sequence[str]) -> Lines:
    wanted = next(iter(tests), VALIDATION)
    lines: Lines = {}
    for row in run.evaluation.early_exit:
        if row.artifact == TORCH and row.split == wanted:
            found = {name: getattr(row, name) for name in ("loss", "accuracy", "perplexity", "mean_loops")}
            figures = {name: value for name, value in found.items() if value is not None}
            rule = "" if row.rule == "confidence" else f"{row.rule} "
            at = SCHEDULE if row.threshold is None else f"{rule}{row.threshold:g}"
            lines[at] = {"rows": row.n, **figures, "loop_ratio": run.loops / row.mean_loops}
    return lines
