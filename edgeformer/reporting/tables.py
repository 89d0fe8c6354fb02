"""Terminal tables of runs, bundles, scores, plans and capabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from rich.table import Table
from rich.text import Text

from edgeformer.data.findings import UNEVEN, always, most_frequent
from edgeformer.formats.caution import LEAKS, cautions
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest, RunManifest
from edgeformer.formats.plan import Plan, PlannedTime
from edgeformer.formats.scores import EvaluationRow, Score
from edgeformer.formats.units import format_bytes, format_duration
from edgeformer.reporting.columns import DASH, Column, Columns, coloured, written
from edgeformer.tasks import ScoreColumn, Task, all_tasks, task_named

_BAR = 30
"""Characters of a bar that is as long as the budget."""


def _score_column(column: ScoreColumn, score_of: Callable[[Any], object] = lambda row: row) -> Column[Any]:
    """A task's own column, of rows that have its figures as attributes, or of the score that is found in a row."""

    def cell(row: object) -> float | None:
        value: float | None = getattr(score_of(row), column.key, None)
        return value

    return Column(column.key, cell, "", column.heading, lambda row: column.text(cell(row)), number=True)


NamedScore = tuple[str, Score]
"""What was scored, and the score."""


def _at_exit(loop: int, row: NamedScore) -> object:
    return row[1].by_exit.get(loop)


def _score_columns(task: Task, scores: Sequence[Score]) -> Columns[NamedScore]:
    """A task's scores, the metric of every earlier exit, and of early exit by confidence, where they were scored."""
    metric = task.metric

    def early(row: NamedScore) -> str:
        found = row[1].leaving_early
        if found is None:
            return DASH
        return f"{metric.text(getattr(found, metric.name, None))} ({found.mean_loops:.2f} loops)"

    columns: list[Column[NamedScore]] = [Column("set", itemgetter(0))]
    columns += [_score_column(column, itemgetter(1)) for column in task.columns]
    for loop in sorted({loop for score in scores for loop in list(score.by_exit)[:-1]}):
        at_exit = ScoreColumn(metric.name, f"exit {loop}", metric.places)
        columns.append(_score_column(at_exit, partial(_at_exit, loop)))
    if any(score.leaving_early is not None for score in scores):
        columns.append(Column("early exit", lambda row: row[1].leaving_early, text=early, number=True))
    return Columns(columns)


def run_table(manifest: RunManifest) -> Table | Text:
    """Scores of a finished run on its validation and test sets; a sentence where it has none."""
    # The weights of a stop between two epochs are of no whole one.
    kept = "stopped in mid-epoch" if manifest.best_epoch is None else f"best epoch {manifest.best_epoch}"
    trained = f"{manifest.steps:,} steps in {format_duration(manifest.seconds)}, {kept}"
    parts = [f"{manifest.parameters:,} parameters", trained if manifest.steps else "not trained here"]
    title = f"{manifest.run}: {', '.join([*parts, *cautions(manifest)])}"
    scores = {"validation": manifest.validation, **manifest.tests}
    rows = [(name if name == "validation" else f"test: {name}", s) for name, s in scores.items() if s is not None]
    if not rows:
        return Text(f"{title}\nno scores: evaluate it first")
    columns = _score_columns(task_named(manifest.task), [score for _, score in rows])
    return columns.terminal(title, rows, _beside(manifest))


def _beside(manifest: RunManifest) -> Text | None:
    """What answering without reading would score, where labels are so uneven that it is much."""
    data = manifest.data
    if not any(finding.kind == UNEVEN for finding in data.findings):
        return None
    told = ", ".join(f"{accuracy:.4f} ({name})" for name, accuracy in always(data.label_rows).items())
    return Text(f"always answering {most_frequent(data.label_rows)!r} has an accuracy of {told}")


def comparable_scores(bundle: BundleManifest) -> tuple[dict[str, Score], str | None]:
    """Artifact → score, all on the same set, and what that set is.

    The validation split where any artifact was scored on it, else the golden inputs. An artifact without such a score
    (steps and decode graphs answer golden inputs only) is left out: figures of other rows do not compare.
    """
    unit = task_named(bundle.task).unit
    split = {artifact.id: artifact.validation for artifact in bundle.artifacts if artifact.validation is not None}
    if split:
        return split, f"scores on {next(iter(split.values())).n:,} {unit} of the validation split"
    golden = {artifact.id: artifact.score for artifact in bundle.artifacts if artifact.score is not None}
    return golden, f"scores on the golden inputs only ({next(iter(golden.values())).n:,})" if golden else None


def artifact_table(bundle: BundleManifest) -> Table:
    """What a bundle holds, how each artifact compares with torch FP32, and how good it is."""
    metric = task_named(bundle.task).metric
    scores, scored_on = comparable_scores(bundle)

    def score(artifact: ArtifactManifest) -> float | None:
        return metric.of(scores.get(artifact.id))

    def stored(artifact: ArtifactManifest) -> str | None:
        sharing = artifact.sharing
        return f"{sharing.stored_parameters:,} of {sharing.unique_parameters:,}" if sharing else None

    heading = "max error vs torch" if bundle.wrapped is None else "max error vs FP32"
    columns: Columns[ArtifactManifest] = Columns(
        [
            Column("artifact", attrgetter("id")),
            Column("file", attrgetter("file"), leaves=2),
            Column("size", attrgetter("size_bytes"), "bytes"),
            Column("parameters stored", stored, number=True, leaves=1),
            Column("max_error", lambda a: getattr(a.parity, "max_abs_error", None), "error", heading),
            Column("top-1 agreement", lambda a: getattr(a.parity, "top1_agreement", None), "share"),
            Column(metric.name, score, text=lambda artifact: metric.text(score(artifact)), number=True),
            Column("status", attrgetter("status"), mark=True),
        ]
    )
    synthetic = " (trained on SYNTHETIC data)" if bundle.synthetic else ""
    leaks = f" · {LEAKS}" if bundle.leaks else ""
    title = f"{bundle.run}: bundle{synthetic}{leaks}"
    return columns.terminal(title, bundle.artifacts, Text(scored_on) if scored_on is not None else None)


def evaluation_table(name: str, rows: Sequence[EvaluationRow]) -> Table:
    """Scores per artifact, with the time per sample.

    Args:
        name: of the run or bundle.
        rows: of one task.
    """
    # A row does not name its task; its metric tells.
    tasks = all_tasks()
    task = next((t for t in tasks if any(getattr(row, t.metric.name, None) is not None for row in rows)), tasks[0])

    providers = [str(provider) for provider in dict.fromkeys(row.provider for row in rows)]
    columns: list[Column[EvaluationRow]] = [
        Column("artifact", attrgetter("artifact")),
        *([Column[EvaluationRow]("computed by", attrgetter("provider"))] if len(providers) > 1 else []),
        Column("set", attrgetter("split")),
        Column("exit", attrgetter("exit"), text=lambda row: str(row.exit or "last"), number=True),
        *map(_score_column, task.columns),
        _score_column(ScoreColumn("ms_per_sample", "ms/sample", 3)),
    ]
    how = ", ".join([str(rows[0].host), *providers[:1]][: 1 + (len(providers) == 1)]) if rows else ""
    where = f" (times: {how}, batch {rows[0].batch})" if rows and rows[0].host else ""
    leaks = f" · {LEAKS}" if any(row.leaks for row in rows) else ""
    return Columns(columns).known_in(rows, "exit").terminal(f"{name}: scores{where}{leaks}", rows)


def plan_table(plan: Plan) -> Table:
    """What a recipe's training memory is made of, and its share of the device's budget."""
    budget = ("budget", plan.budget_bytes)
    rows: list[tuple[str, int]] = [*plan.breakdown.model_dump().items(), ("peak", plan.peak_bytes), budget]

    def share(row: tuple[str, int]) -> float:
        return row[1] / plan.budget_bytes if plan.budget_bytes else float("inf")

    def bar(row: tuple[str, int]) -> Text:
        drawn = "█" * min(_BAR, round(_BAR * min(1.0, share(row)))) if row is not budget else ""
        return Text(f"{drawn}▶", "red") if share(row) > 1 else Text(drawn)

    columns: Columns[tuple[str, int]] = Columns(
        [
            Column("memory at the peak (predicted)", itemgetter(0)),
            Column("size", itemgetter(1), "bytes"),
            Column("of the budget", share, "share"),
            Column("bar", share, heading="", text=bar),
        ]
    )
    title = f"{plan.recipe} on {plan.device}: {plan.parameters:,} parameters, {plan.precision}"
    # Below the table: a long source in it would leave no room for the figures.
    source = (f"\nbudget: {plan.budget_source}", "dim")
    table = columns.terminal(title, rows, Text.assemble(coloured(plan.status), f": {plan.reason}", source))
    table.rows[len(rows) - 3].end_section = True
    return table


def time_text(time: PlannedTime) -> str:
    """How long a training is predicted to take, in one to three lines."""
    if time.low_s is None or time.high_s is None:
        return f"time: unknown: {time.basis}"
    low_s, high_s, epochs = time.low_s, time.high_s, time.epochs
    what = f"for {time.steps:,} steps" if time.steps is not None else f"per {time.rows:,} training rows"
    if epochs > 1:
        what += f" ({format_duration(low_s / epochs)} to {format_duration(high_s / epochs)} an epoch)"
    lines = [f"time (estimated): {format_duration(low_s)} to {format_duration(high_s)} {what}: {time.basis}"]
    lines += [f"low end: {time.low_reason}"] if time.low_reason else []
    lines += [f"high end: {time.high_reason}"] if time.high_reason else []
    return "\n".join(lines)


def larger_batch_text(plan: Plan) -> str:
    """How many more rows at a time would fit, in a line; empty: none that is known to."""
    used = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} used"
    changes = [
        f"{' '.join(f'--set {pair}' for pair in change.set)} would use at most {format_bytes(change.peak_bytes)}"
        for change in plan.larger_batches
    ]
    return f"{used}: {'; '.join(changes)}; whether it is faster is not measured" if changes else ""


def suggestion_table(plan: Plan) -> Table:
    """Changes of a recipe that does not fit, as they are typed, with the peak that each is predicted to have."""
    columns: Columns[Any] = Columns(
        [
            Column("change", lambda change: "\n".join(f"--set {pair}" for pair in change.set)),
            Column("predicted peak", attrgetter("peak_bytes"), "bytes"),
            Column("fits", attrgetter("fits"), text=lambda c: Text(written(c.fits), "green" if c.fits else "")),
            Column("what it costs", attrgetter("note")),
        ]
    )
    return columns.terminal("What to change (the first row that fits is the cheapest that was found)", plan.suggestions)


def capability_table(capabilities: Sequence[dict[str, Any]]) -> Table:
    """What works on this machine, and the remedy for what does not."""

    def details(found: Mapping[str, Any]) -> Text:
        detail = str(found["detail"])
        remedy = [(("\n" if detail else "") + f"→ {found['remedy']}", "dim")] if found["remedy"] else []
        return Text.assemble(detail, *remedy)

    columns: Columns[dict[str, Any]] = Columns(
        [
            Column("what", itemgetter("name")),
            Column("status", itemgetter("status"), mark=True),
            Column("version", lambda found: found["version"] or None),
            Column("details", itemgetter("detail"), text=details, flows=True),
        ]
    )
    return columns.terminal("What works on this machine", capabilities)
