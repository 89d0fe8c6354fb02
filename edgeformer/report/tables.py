"""Early exit of scored artifacts: what each threshold costs in loss and saves in loops, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edgeformer.artifacts.data_warnings import LEAKS, cautions
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, ExitGuarantee, RunManifest
from edgeformer.artifacts.plan import Plan, PlannedTime
from edgeformer.artifacts.scores import EarlyExitRow, EvaluationRow, Score
from edgeformer.artifacts.units import format_bytes, format_duration
from edgeformer.data.column_detection import ColumnFacts, Guess
from edgeformer.data.data_warnings import UNEVEN, always, most_frequent
from edgeformer.report.canvas import PALETTE, can_draw, drawing
from edgeformer.report.columns import DASH, Column, Columns, coloured, written
from edgeformer.run import read_run
from edgeformer.tasks import ScoreColumn, Task, all_tasks, task_named
from edgeformer.tasks.early_exit import SWEEP


def early_exit_table(name: str, rows: Sequence[EarlyExitRow]) -> Table:
    """A line per artifact and threshold; thresholds that let the same ones leave are one line.

    Args:
        name: the run's.
        rows: of one task.
    """
    metric = "accuracy" if any(row.accuracy is not None for row in rows) else "perplexity"
    decimals = 4 if metric == "accuracy" else 2

    def leaving(alike: list[EarlyExitRow]) -> str:
        return ", ".join(f"{loop}: {share:.1%}" for loop, share in alike[0].share.items() if share)

    by: Column[list[EarlyExitRow]] = Column("computed by", lambda alike: alike[0].provider)
    columns: list[Column[list[EarlyExitRow]]] = [
        Column("artifact", lambda alike: alike[0].artifact),
        *([by] if len({(row.artifact, row.provider) for row in rows}) > len({row.artifact for row in rows}) else []),
        Column("set", lambda alike: alike[0].split),
        Column("threshold", _thresholds, number=True),
        Column("mean_loops", lambda alike: f"{alike[0].mean_loops:.2f}", number=True),
        Column(metric, lambda alike: f"{getattr(alike[0], metric):,.{decimals}f}", number=True),
        Column("loss", lambda alike: alike[0].loss, number=True),
        Column("leave_after_loop", leaving),
    ]
    groups = [list(alike) for _, alike in groupby(rows, key=_kind)]
    return Columns(columns).terminal(f"{name}: early exit (loops are a mean, and no time)", groups)


def guarantee_table(name: str, found: Mapping[str, ExitGuarantee]) -> Table:
    """A line per step artifact: what early exit is promised to cost, was seen to cost, and saves.

    Args:
        name: the run's.
        found: artifact's id → what is promised of it.
    """

    def milliseconds(of: str) -> Callable[[tuple[str, ExitGuarantee]], float | None]:
        return lambda one: getattr(one[1].time, of).get("mean")

    columns: list[Column[tuple[str, ExitGuarantee]]] = [
        Column("artifact", lambda one: one[0]),
        Column("held-out", lambda one: f"{one[1].rows:,} of {one[1].split}"),
        Column("thresholds", lambda one: ", ".join(f"{loop}: {value:g}" for loop, value in one[1].thresholds.items())),
        Column("may lose", lambda one: f"{100 * one[1].max_drop:g} points", number=True),
        Column("lost here", lambda one: f"{100 * one[1].drop:.2f}", number=True),
        Column("p", lambda one: f"{one[1].p_value:.3f}", number=True),
        Column("mean loops", lambda one: f"{one[1].mean_loops:.2f}", number=True),
        Column("one text", milliseconds("early_ms"), "ms"),
        Column("all loops", milliseconds("full_ms"), "ms"),
        Column("full graph", milliseconds("full_graph_ms"), "ms"),
    ]
    return Columns(columns).terminal(f"{name}: early exit with a guarantee", [*found.items()])


def _kind(row: EarlyExitRow) -> tuple[object, ...]:
    """The same for rows that one line tells: what was asked for beside the sweep has a line of its own."""
    asked = None if row.threshold in SWEEP else row.threshold
    return row.artifact, row.provider, row.split, row.rule, row.threshold is None, asked, row.share


def _thresholds(rows: Sequence[EarlyExitRow]) -> str:
    first, last = rows[0].threshold, rows[-1].threshold
    if first is None:
        steps = list(dict.fromkeys(f"{value:.2f}" for value in rows[0].thresholds.values()))
        return f"paper: {steps[0]}…{steps[-1]}" if len(steps) > 1 else f"paper: {steps[0]}"
    told = f"{first:g}" if first == last else f"{first:g}…{last:g}"
    return told if rows[0].rule == "confidence" else f"{rows[0].rule} {told}"


def draw_early_exit(run: Path, rows: Sequence[EvaluationRow], early_exit: Sequence[EarlyExitRow]) -> Path | None:
    """Write ``plots/early_exit.png``: the loss, and the task's figure, over the mean number of loops.

    Args:
        run: the run's folder.
        rows: scores of the exits themselves: everyone leaves there.
        early_exit: of the same artifacts and set; not empty.

    Returns:
        The picture's path; None where matplotlib is not installed.
    """
    if not can_draw():
        return None
    metric = "accuracy" if early_exit[0].accuracy is not None else "perplexity"
    artifacts = list(dict.fromkeys(row.artifact for row in early_exit))
    path, leaks = run / "plots" / "early_exit.png", " · LEAKS FUTURE TOKENS" if early_exit[0].leaks else ""
    title = f"{read_run(run).run} · early exit on {early_exit[0].split} ({early_exit[0].n:,}){leaks}"
    with drawing(path, title, 2, (10.5, 4.2)) as axes:
        for artifact, colour in zip(artifacts, PALETTE * len(artifacts), strict=False):
            cosine = [row for row in early_exit if row.artifact == artifact and row.rule == "cosine"]
            swept = [row for row in early_exit if row.artifact == artifact and row.threshold is not None
                     and row.rule == "confidence"]  # fmt: skip
            paper = [row for row in early_exit if row.artifact == artifact and row.threshold is None]
            last = max(map(int, (swept or paper)[0].share))
            exits = sorted((row for row in rows if row.artifact == artifact), key=lambda row: row.exit or last)
            for axis, key in zip(axes, ("loss", metric), strict=True):
                axis.plot([row.mean_loops for row in swept], [getattr(row, key) for row in swept], ".-", color=colour,
                          linewidth=1, label=f"{artifact}: one threshold")  # fmt: skip
                axis.plot([row.mean_loops for row in cosine], [getattr(row, key) for row in cosine], ".:", color=colour,
                          linewidth=1, label=f"{artifact}: by cosine" if cosine else None)  # fmt: skip
                axis.plot([row.exit or last for row in exits], [getattr(row, key) for row in exits], "s", color=colour,
                          markerfacecolor="none", label=f"{artifact}: all leave there")  # fmt: skip
                axis.plot([row.mean_loops for row in paper], [getattr(row, key) for row in paper], "*", color=colour,
                          markersize=13, label=f"{artifact}: the paper's schedule" if paper else None)  # fmt: skip
        for axis, label in zip(axes, ("loss (nats)", metric), strict=True):
            axis.set(xlabel="mean loops", ylabel=label)
        axes[0].legend(frameon=False, fontsize=8)
    return path


# What was guessed of somebody's file of data.


_SHOWN = 40
"""Characters of an example."""
_NAMED = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


def column_table(name: str, guess: Guess) -> Table:
    """The columns of the file ``name``: what each is taken for, and why."""
    source = guess.source
    roles = {source.text: "text", source.text_pair: "second text", source.label: "label"}

    def example(column: ColumnFacts) -> str:
        line = " ".join(column.example.split())
        return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"

    def different(column: ColumnFacts) -> int | None:
        return len(column.values) if column.values is not None else None

    columns: Columns[ColumnFacts] = Columns(
        [
            Column("column", attrgetter("name"), text=lambda column: Text(column.name)),
            Column("read as", lambda column: roles.get(column.name)),
            Column("filled", attrgetter("filled"), text=lambda column: f"{column.filled:,}", number=True),
            Column("different values", different, text=lambda c: str(different(c) or "many"), number=True),
            Column("first", example, text=lambda column: Text(example(column))),
        ]
    )
    parted = f", parted by {_NAMED[source.delimiter]}" if source.delimiter else ""
    header = "" if source.header else ", the first line names no columns"
    counted = [f"{label} {rows:,}" for label, rows in guess.labels.items()]
    labels = ", ".join(counted[:12]) + (f" … ({len(counted)} in all)" if len(counted) > 12 else "")
    return columns.terminal(f"{name}: {guess.rows:,} rows{parted}{header}", guess.columns, Text(f"labels: {labels}"))


# Terminal tables of runs, bundles, scores, plans and capabilities.


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
