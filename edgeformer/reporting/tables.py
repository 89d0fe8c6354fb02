"""Terminal tables of runs, bundles, scores, plans and capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from edgeformer.schema.evaluation import EvaluationRow
from edgeformer.schema.manifest import BundleManifest, ClassificationScore, RunManifest
from edgeformer.schema.planning import Plan
from edgeformer.schema.units import format_bytes, format_duration

DASH = "–"
_COLOURS = {"pass": "green", "built": "green", "available": "green", "fail": "red", "rejected": "red"}


def coloured(status: str) -> str:
    """A status word in its colour."""
    return f"[{_COLOURS.get(status, 'yellow')}]{status}[/]"


def new_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A table in the house style; columns named in ``right`` hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _score_cells(score: ClassificationScore | EvaluationRow) -> list[str]:
    values = (score.accuracy, score.precision, score.recall, score.f1, score.loss)
    return [f"{score.n:,}", *(f"{value:.4f}" for value in values)]


_SCORES = ("rows", "accuracy", "precision", "recall", "F1", "loss")


def run_table(manifest: RunManifest) -> Table:
    """Scores of a finished run on its validation and test sets."""
    synthetic = ", SYNTHETIC data" if manifest.data.synthetic else ""
    title = (
        f"{manifest.run}: {manifest.parameters:,} parameters, {manifest.steps:,} steps in "
        f"{format_duration(manifest.seconds)}, best epoch {manifest.best_epoch}{synthetic}"
    )
    table = new_table(title, "set", *_SCORES, right=_SCORES)
    scores = {"validation": manifest.validation, **manifest.tests}
    for name, score in scores.items():
        if score is not None:
            table.add_row(name if name == "validation" else f"test: {name}", *_score_cells(score))
    return table


def artifact_table(bundle: BundleManifest) -> Table:
    """What a bundle holds, and how each artifact compares with torch FP32."""
    synthetic = " (trained on SYNTHETIC data)" if bundle.synthetic else ""
    columns = ("artifact", "file", "size", "parameters stored", "max error vs torch", "top-1 agreement", "status")
    table = new_table(f"{bundle.run}: bundle{synthetic}", *columns, right=columns[2:6])
    for artifact in bundle.artifacts:
        sharing, parity = artifact.sharing, artifact.parity
        stored = f"{sharing.stored_parameters:,} of {sharing.unique_parameters:,}" if sharing else DASH
        error = f"{parity.max_abs_error:.1e}" if parity and parity.max_abs_error is not None else DASH
        agreement = f"{parity.top1_agreement:.1%}" if parity and parity.top1_agreement is not None else DASH
        size = format_bytes(artifact.size_bytes)
        status = coloured(artifact.status)
        table.add_row(artifact.id, artifact.file or DASH, size, stored, error, agreement, status)
    return table


def evaluation_table(name: str, rows: Sequence[EvaluationRow]) -> Table:
    """Scores per artifact, with the time per sample."""
    columns = ("artifact", "set", *_SCORES, "ms/sample")
    where = f" (times: {rows[0].host}, {rows[0].provider}, batch {rows[0].batch})" if rows else ""
    table = new_table(f"{name}: scores{where}", *columns, right=columns[2:])
    for row in rows:
        time = f"{row.ms_per_sample:.3f}" if row.ms_per_sample is not None else DASH
        table.add_row(row.artifact, row.split, *_score_cells(row), time)
    return table


def prediction_table(name: str, artifact: str, predictions: Sequence[dict[str, Any]]) -> Table:
    """Label and probability per text."""
    table = new_table(f"{name} · {artifact}", "label", "probability", "text", right=("probability",))
    for prediction in predictions:
        note = " [yellow](cut to the model's length)[/]" if prediction["truncated"] else ""
        text = escape(str(prediction["text"])) + note
        table.add_row(f"[bold]{escape(prediction['label'])}[/]", f"{prediction['probability']:.3f}", text)
    return table


def plan_table(plan: Plan) -> Table:
    """Training memory of a recipe against a device."""
    table = new_table(
        f"{plan.recipe} on {plan.device}: {plan.parameters:,} parameters", "memory", "size", right=("size",)
    )
    for name, value in plan.breakdown.model_dump().items():
        table.add_row(name, format_bytes(value) if value is not None else "not counted yet")
    table.add_section()
    table.add_row("at least", format_bytes(plan.at_least_bytes))
    table.add_row("budget", format_bytes(plan.budget_bytes))
    answer = {True: "yes", False: "no", None: "unknown"}[plan.fits]
    table.add_row("fits", answer)
    table.caption = plan.reason
    table.caption_justify = "left"
    return table


def capability_table(capabilities: Sequence[dict[str, Any]]) -> Table:
    """What works on this machine, and the remedy for what does not."""
    table = new_table("What works on this machine", "what", "status", "version", "details")
    for found in capabilities:
        details = escape(str(found["detail"]))
        if found["remedy"]:
            details = f"{details}\n[dim]→ {escape(str(found['remedy']))}[/]".strip()
        table.add_row(found["name"], coloured(found["status"]), found["version"] or DASH, details)
    return table


def plain_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Any list of equal-shaped records."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = new_table(title, *(name.replace("_bytes", "").replace("_", " ") for name in columns))
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    return table


def _cell(name: str, value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
