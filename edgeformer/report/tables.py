"""Terminal tables of runs, bundles, scores, early exit, plans, capabilities, verifications and calibrations."""

from collections.abc import Callable, Mapping, Sequence
from math import log2
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from edgeformer.artifacts.data_config import column_names
from edgeformer.artifacts.device import Calibration
from edgeformer.artifacts.manifest import (
    LEAKS,
    ArtifactManifest,
    BundleManifest,
    ExitGuarantee,
    RunManifest,
    Sharing,
    cautions,
)
from edgeformer.artifacts.plan import Plan, PlannedTime, Suggestion
from edgeformer.artifacts.report import Figure
from edgeformer.artifacts.scores import EarlyExitRow, EvaluationRow, Score
from edgeformer.artifacts.units import format_bytes, format_duration, format_memory, format_threads
from edgeformer.data.column_detection import ColumnFacts, DetectedColumns
from edgeformer.data.data_warnings import UNEVEN, majority_accuracy
from edgeformer.data.rows import excerpt
from edgeformer.inference.verification import ArtifactCheck, Verification
from edgeformer.report.columns import DASH, Column, TableColumns, TerminalTable, coloured, format_value
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import ScoreColumn, Task, all_tasks, get_task

_EXAMPLE_WIDTH = 40  # characters of an example from a data file


def _score_column(column: ScoreColumn, score_of: Callable[[Any], object] = lambda row: row) -> Column[Any]:
    """Return a task's column for rows that have its figures, or from whose score ``score_of`` takes them."""
    layout = "{:,}" if column.places is None else f"{{:,.{column.places}f}}"
    return Column(
        column.name, lambda row: getattr(score_of(row), column.name, None), heading=column.heading, layout=layout
    )


def run_table(manifest: RunManifest) -> RenderableType:
    """Return the scores of a run on its validation and test sets; a sentence if it has none."""
    # Weights of a stop between two epochs belong to no epoch.
    best = "stopped in mid-epoch" if manifest.best_epoch is None else f"best epoch {manifest.best_epoch}"
    trained = f"{manifest.steps:,} steps in {format_duration(manifest.seconds)}, {best}"
    if not manifest.steps:
        is_fitted = manifest.best_epoch == 0
        trained = f"head fitted in {format_duration(manifest.seconds)}" if is_fitted else "not trained here"
    parts = [f"{manifest.parameters:,} parameters", trained]
    title = f"{manifest.run}: {', '.join([*parts, *cautions(manifest)])}"
    tests = {f"test: {name}": score for name, score in manifest.tests.items()}
    rows = [(name, score) for name, score in {"validation": manifest.validation, **tests}.items() if score is not None]
    if not rows:
        data_option = "" if manifest.data.rows else " --data FILE"
        return Text(f"{title}\nno scores yet; compute them with: edgeformer evaluate {manifest.run}{data_option}")

    task, data = get_task(manifest.task), manifest.data
    metric = task.metric

    def early_exit(row: tuple[str, Score]) -> str | None:
        early = row[1].leaving_early
        if early is None:
            return None
        return f"{metric.text(getattr(early, metric.name, None))} ({early.mean_loops:.2f} loops)"

    columns: list[Column[tuple[str, Score]]] = [Column("set", itemgetter(0))]
    columns += [_score_column(column, itemgetter(1)) for column in task.columns]
    for loop in sorted({loop for _, score in rows for loop in list(score.by_exit)[:-1]}):
        column = ScoreColumn(metric.name, f"exit {loop}", metric.places)
        columns.append(_score_column(column, lambda row, loop=loop: row[1].by_exit.get(loop)))  # type: ignore[misc]
    columns.append(Column("early exit", early_exit, number=True))

    caption = None
    if any(warning.kind == UNEVEN for warning in data.findings):
        label, accuracies = majority_accuracy(data.label_rows)
        accuracy = ", ".join(f"{share:.4f} ({name})" for name, share in accuracies.items())
        caption = Text(f"for comparison: always answering {label!r} has accuracy {accuracy}")
    scores = TableColumns(*columns).drop_empty(rows, "early exit", *(column.name for column in task.columns))
    return scores.terminal(title, rows, caption)


def comparable_scores(bundle: BundleManifest) -> tuple[dict[str, Score], str | None]:
    """Return the artifacts' scores on one set, and a description of that set.

    The set is the validation split if any artifact was scored on it, else the golden inputs. Artifacts without a score
    on this set are left out: step and decode graphs are scored on golden inputs only.
    """
    validation = {artifact.id: artifact.validation for artifact in bundle.artifacts if artifact.validation is not None}
    if validation:
        rows = f"{next(iter(validation.values())).n:,} {get_task(bundle.task).unit}"
        return validation, f"scores on {rows} of the validation split"
    golden = {artifact.id: artifact.score for artifact in bundle.artifacts if artifact.score is not None}
    if not golden:
        return golden, None
    count, note = next(iter(golden.values())).n, get_task(bundle.task).golden_note
    return golden, f"scores on the {count:,} golden inputs only: {note}"


def _memory_text(measured: Sharing | ArtifactCheck | None) -> str | None:
    """Return the memory of an opened artifact; None: not measured."""
    if measured is None or measured.resident_bytes is None:
        return None
    return format_memory(measured.resident_bytes, measured.resident_ratio)


def artifact_table(bundle: BundleManifest) -> TerminalTable[ArtifactManifest]:
    """Return the artifacts of a bundle: size, difference from torch FP32, score, status."""
    metric = get_task(bundle.task).metric
    scores, scored_on = comparable_scores(bundle)
    heading = "max error vs torch" if bundle.wrapped is None else "max error vs FP32"
    score_column = ScoreColumn(metric.name, metric.name, metric.places)
    columns: TableColumns[ArtifactManifest] = TableColumns(
        Column("artifact", "id"),
        Column("file", leaves=2),
        Column("size", "size_bytes", "bytes"),
        Column(
            "parameters stored",
            lambda a: f"{a.sharing.stored_parameters:,} of {a.sharing.unique_parameters:,}" if a.sharing else None,
            number=True,
            leaves=1,
        ),
        Column("in memory", lambda a: _memory_text(a.sharing), number=True, leaves=1),
        Column("max_error", "parity.max_abs_error", "error", heading),
        Column("agreement", "parity.top1_agreement", "share", get_task(bundle.task).agreement),
        _score_column(score_column, lambda artifact: scores.get(artifact.id)),
        Column("status", mark=True),
    )
    synthetic = " (trained on SYNTHETIC data)" if bundle.synthetic else ""
    title = f"{bundle.run}: bundle{synthetic}{f' · {LEAKS}' if bundle.leaks else ''}"
    return columns.terminal(title, bundle.artifacts, Text(scored_on) if scored_on is not None else None)


def evaluation_table(name: str, task: Task, rows: Sequence[EvaluationRow]) -> TerminalTable[EvaluationRow]:
    """Return scores and time per sample of artifacts of a task; ``name`` is the run's or bundle's."""
    providers = [str(provider) for provider in dict.fromkeys(row.provider for row in rows)]
    columns: list[Column[EvaluationRow]] = [
        Column("artifact"),
        Column("computed by", "provider"),
        Column("set", "split"),
        Column("exit", text=lambda row: str(row.exit or "last"), number=True),
        *map(_score_column, task.columns),
        _score_column(ScoreColumn("ms_per_sample", "ms/sample", 3)),
    ]
    where = ""
    if rows and rows[0].host:
        provider = f", {providers[0]}" if len(providers) == 1 else ""
        where = f" (times: {rows[0].host}{provider}, batch {rows[0].batch})"
    leaks = f" · {LEAKS}" if any(row.leaks for row in rows) else ""
    selected = TableColumns(*columns).drop_empty(rows, "exit", *(column.name for column in task.columns))
    selected = selected.omit(*([] if len(providers) > 1 else ["computed by"]))
    return selected.terminal(f"{name}: scores{where}{leaks}", rows)


def early_exit_table(name: str, rows: Sequence[EarlyExitRow]) -> TerminalTable[EarlyExitRow]:
    """Return a line per artifact and threshold; ``rows`` are of one task, ``name`` is the run's."""
    task = next(t for t in all_tasks() if any(getattr(row, t.metric.name, None) is not None for row in rows))
    metric = ScoreColumn(task.metric.name, task.metric.name, task.metric.places)

    def threshold(row: EarlyExitRow) -> str:
        if row.threshold is None:
            steps = [f"{value:.2f}" for value in row.thresholds.values()]
            return f"paper: {'…'.join(dict.fromkeys([steps[0], steps[-1]]))}"
        return f"{row.threshold:g}" if row.rule == "confidence" else f"{row.rule} {row.threshold:g}"

    columns: TableColumns[EarlyExitRow] = TableColumns(
        Column("artifact"),
        Column("computed by", "provider"),
        Column("set", "split"),
        Column("threshold", threshold, number=True),
        Column("mean_loops", layout="{:.2f}"),
        _score_column(metric),
        Column("loss", number=True),
        Column("share", heading="exit after loop",
               text=lambda row: ", ".join(f"{loop}: {share:.1%}" for loop, share in row.share.items() if share)),
    )  # fmt: skip
    has_providers = len({(row.artifact, row.provider) for row in rows}) > len({row.artifact for row in rows})
    selected = columns.omit(*([] if has_providers else ["computed by"]))
    return selected.terminal(f"{name}: early exit (mean loops per row, not time)", rows)


def guarantee_table(name: str, guarantees: Mapping[str, ExitGuarantee]) -> TerminalTable[tuple[str, ExitGuarantee]]:
    """Return a line per step artifact: allowed and observed score drop of early exit, and its times."""
    columns: TableColumns[tuple[str, ExitGuarantee]] = TableColumns(
        Column("artifact", itemgetter(0)),
        Column("held-out", lambda row: f"{row[1].rows:,} of {row[1].split}"),
        Column("thresholds", lambda row: ", ".join(f"{loop}: {p:g}" for loop, p in row[1].thresholds.items())),
        Column("allowed drop", lambda row: 100 * row[1].max_drop, layout="{:g} points"),
        Column("observed drop", lambda row: 100 * (row[1].lost - row[1].won) / row[1].rows, layout="{:.2f}"),
        Column("p", lambda row: row[1].p_value, layout="{:.3f}"),
        Column("mean loops", lambda row: row[1].mean_loops, layout="{:.2f}"),
        Column("early exit", lambda row: row[1].time.early_ms.get("mean"), "ms"),
        Column("all loops", lambda row: row[1].time.full_ms.get("mean"), "ms"),
        Column("full graph", lambda row: row[1].time.full_graph_ms.get("mean"), "ms"),
    )
    caption = Text("times: mean of single texts; drop: points of accuracy")
    return columns.terminal(f"{name}: early exit with a guarantee", guarantees.items(), caption)


def column_table(name: str, guess: DetectedColumns) -> TerminalTable[ColumnFacts]:
    """Return the columns of the data file ``name``: what each is read as, and examples."""
    source = guess.source
    roles: dict[str | None, str] = dict.fromkeys(column_names(source.text), "text")
    roles |= {source.text_pair: "second text", source.label: "label"}

    columns: TableColumns[ColumnFacts] = TableColumns(
        Column("column", "name"),
        Column("read as", lambda column: roles.get(column.name)),
        Column("filled", number=True),
        Column("different values", lambda column: len(column.values) if column.values else "many", number=True),
        Column("first", "example", text=lambda column: excerpt(" ".join(column.example.split()), _EXAMPLE_WIDTH)),
    )
    delimiters = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    delimiter = f", separated by {delimiters[source.delimiter]}" if source.delimiter else ""
    header = ", texts in single quotes" if source.quote == "'" else ""
    header += "" if source.header else ", the first line names no columns"
    counts = [f"{label} {rows:,}" for label, rows in guess.labels.items()]
    labels = ", ".join(counts[:12]) + (f" … ({len(counts)} in all)" if len(counts) > 12 else "")
    return columns.terminal(f"{name}: {guess.rows:,} rows{delimiter}{header}", guess.columns, Text(f"labels: {labels}"))


def time_text(time: PlannedTime) -> str:
    """Return the predicted training time in one line."""
    if time.low_s is None or time.high_s is None:
        return f"time: unknown: {time.basis}"
    low_s, high_s, epochs = time.low_s, time.high_s, time.epochs
    extent = f" for {time.steps:,} steps" if time.steps is not None else f" per {time.rows:,} training rows"
    if time.steps == 0:  # a head on a frozen encoder
        extent = ""
    if epochs > 1:
        extent += f" ({format_duration(low_s / epochs)} to {format_duration(high_s / epochs)} an epoch)"
    return f"time (estimated): {format_duration(low_s)} to {format_duration(high_s)}{extent}: {time.basis}"


def print_plan(plan: Plan, console: Console) -> None:
    """Print the result of `plan`: memory by use, changes to a recipe that does not fit, time, larger batches, notes."""
    # 1. Parts of the memory, and their share of the device's budget
    parts = [*plan.breakdown.model_dump().items(), ("peak", plan.peak_bytes), ("budget", plan.budget_bytes)]
    rows = [(name, size, size / plan.budget_bytes if plan.budget_bytes else float("inf")) for name, size in parts]
    columns: TableColumns[tuple[str, int, float]] = TableColumns(
        Column("memory at the peak (predicted)", itemgetter(0)),
        Column("size", itemgetter(1), "bytes"),
        Column("of the budget", itemgetter(2), "share",
               text=lambda row: Text(format_value(row[2], "share"), "red" if row[2] > 1 else "")),
    )  # fmt: skip
    title = f"{plan.recipe} on {plan.device}: {plan.parameters:,} parameters, {plan.precision}"
    source = (f"\nbudget: {plan.budget_source}", "dim")
    caption = Text.assemble(coloured(plan.status), f": {plan.reason}", source)
    console.print(columns.terminal(title, rows, caption))
    # 2. Changes that make it fit, as command-line options
    if plan.suggestions:
        changes: TableColumns[Suggestion] = TableColumns(
            Column("change", lambda change: "\n".join(f"--set {pair}" for pair in change.set)),
            Column("predicted peak", "peak_bytes", "bytes"),
            Column("fits", lambda change: format_value(change.fits), mark=True),
            Column("what it costs", "note"),
        )
        title = "What to change (the first row that fits is the cheapest that was found)"
        console.print(changes.terminal(title, plan.suggestions))
    # 3. Time, larger batches, and notes
    lines = [time_text(plan.time)]
    larger = [
        f"{' '.join(f'--set {pair}' for pair in change.set)} would use at most {format_bytes(change.peak_bytes)}"
        for change in plan.larger_batches
    ]
    if larger:
        used = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} used"
        lines.append(f"{used}: {'; '.join(larger)}; whether it is faster is not measured")
    for line in (*lines, *plan.notes):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def capability_table(capabilities: Sequence[dict[str, Any]]) -> TerminalTable[dict[str, Any]]:
    """Return what works on this machine, and the remedy for what does not."""
    columns: TableColumns[dict[str, Any]] = TableColumns(
        Column("what", "name"),
        Column("status", mark=True),
        Column("version", lambda capability: capability["version"] or None),
        Column("details", "detail", flows=True, text=lambda capability: Text.assemble(
            capability["detail"], ("\n" if capability["detail"] and capability["remedy"] else ""),
            (f"→ {capability['remedy']}" if capability["remedy"] else "", "dim"))),
    )  # fmt: skip
    return columns.terminal("What works on this machine", capabilities)


def print_verification(verification: Verification, task: str, console: Console) -> None:
    """Print the result of `verify`: every artifact, reasons, damaged files, and the conclusion."""
    columns: TableColumns[ArtifactCheck] = TableColumns(
        Column("artifact"),
        Column("ran on", "parity.provider", text=lambda check: (
            provider_facts(check.parity.provider).label if check.parity and check.parity.provider else DASH)),
        Column("n", "parity.n", number=True),
        Column("max error", "parity.max_abs_error", "error"),
        Column("relative", "parity.relative_error", "error"),
        Column("agreement", "parity.top1_agreement", "share", get_task(task).agreement),
        Column("tolerance", lambda check: check.tolerance or None),
        Column("in memory", _memory_text, number=True),
        Column("status", mark=True),
    )  # fmt: skip
    original = verification.wrapped
    baseline = "torch FP32" if original is None else f"the outputs of {original} in ONNX Runtime"
    console.print(columns.terminal(f"{verification.run}: golden inputs against {baseline}", verification.artifacts))
    lines = []
    for check in verification.artifacts:
        lines += [f"{check.artifact}: {check.reason}"] if check.reason else []
        lines += [f"note: {check.artifact}: {note}" for note in check.notes]
    for file in verification.damaged:
        lines.append(f"{file.status}: {file.file}{f' ({file.detail})' if file.detail else ''}")
    intact = len(verification.files) - len(verification.damaged)
    artifacts = {check.artifact for check in verification.artifacts}  # several runtimes may check one artifact
    verified = artifacts - {check.artifact for check in verification.artifacts if check.status != "verified"}
    lines.append(
        f"{intact} of {len(verification.files)} files intact, {len(verified)} of {len(artifacts)} artifacts verified; "
        f"bundle.json is sha256 {verification.manifest_sha256}"
    )
    lines += verification.stale
    if (written := verification.recorded) is not None:  # by --write
        for record in written.records:
            unscored = f"without a validation score: {record.unscored}" if record.unscored else None
            reason = record.reason or unscored
            remark = f" ({reason})" if reason else ""
            lines.append(f"recorded: {record.artifact} on {record.device}: {record.status}{remark}")
        lines.append(f"written: {written.file}" if written.file is not None else str(written.reason))
    if not verification.manifest_protected:
        lines.append(
            "bundle.json has no checksum of itself, because an older version wrote it; compare its sha256 with that of "
            "the original, or export the run again"
        )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def print_calibration(calibration: Calibration, written: Path | None, console: Console) -> None:
    """Print the fitted cases, the cross-validated ones, the checked ones, the error, and the written profile if any."""
    columns: TableColumns[dict[str, Any]] = TableColumns(
        Column("run"),
        Column("artifact"),
        Column("batch × tokens", lambda row: f"{row['batch']} × {row['seq']}", number=True),
        Column("measured", "measured_ms", "ms"),
        Column("estimated", "estimated_ms", "ms", figure=lambda row: Figure(row["estimated_ms"], "estimated")),
        Column("estimated / measured", "ratio", layout="{:.2f}"),
        Column("log2", lambda row: log2(row["ratio"]) if row["ratio"] else None, layout="{:+.2f}"),
    )
    where = f"{calibration.processor}, {format_threads(calibration.threads)}"
    for title, cases in (
        ("fitted cases", calibration.fitted_on),
        ("cross-validation: each model estimated without its own measurements", calibration.left_out),
        ("validation: cases that were not fitted", calibration.validated_on),
    ):
        rows = [{**case.model_dump(), "ratio": None} for case in cases]
        for row in rows:
            if row["estimated_ms"] is not None and row["measured_ms"]:
                row["ratio"] = row["estimated_ms"] / row["measured_ms"]
        if cases:
            console.print(columns.terminal(f"{title}: {where}", rows))
    error = calibration.error
    text = "the error of these estimates is unknown; measure it with: edgeformer calibrate --validate-only"
    if calibration.validated_on:
        text = "the error of these estimates is unknown, because every measurement is unstable; measure again when idle"
    if error is not None:
        text = (
            f"estimates differ from measurements on {error.device} by a factor of {2**error.median_log2:.2f} (median) "
            f"and {2**error.worst_log2:.2f} (largest) in {error.cases} cases "
            f"(|log2| {error.median_log2:.2f} and {error.worst_log2:.2f})"
        )
    if written is not None:
        text += f"\nprofile {written}"
    console.print(text, soft_wrap=True, markup=False)
