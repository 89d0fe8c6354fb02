"""Terminal tables of runs, bundles, scores, plans and capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from edgeformer.formats.manifest import BundleManifest, RunManifest
from edgeformer.formats.report import Plan
from edgeformer.formats.scores import EvaluationRow
from edgeformer.formats.units import format_bytes, format_duration
from edgeformer.reporting.caution import LEAKS, cautions
from edgeformer.tasks.classification.scoring import ClassificationScore
from edgeformer.tasks.language_modeling.scoring import LanguageScore

DASH = "–"
_COLOURS = {
    **dict.fromkeys(("pass", "built", "available", "verified"), "green"),
    **dict.fromkeys(("fail", "rejected", "failed", "damaged"), "red"),
}


def coloured(status: str) -> str:
    """A status word in its colour."""
    return f"[{_COLOURS.get(status, 'yellow')}]{status}[/]"


def new_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A table in the house style; columns named in ``right`` hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _number(value: float | None, places: int = 4) -> str:
    return DASH if value is None else f"{value:,.{places}f}"


def _score_cells(score: ClassificationScore | EvaluationRow) -> list[str]:
    values = (score.accuracy, score.precision, score.recall, score.f1, score.loss)
    return [f"{score.n:,}", *map(_number, values)]


_SCORES = ("rows", "accuracy", "precision", "recall", "F1", "loss")
_LANGUAGE = ("tokens", "loss", "perplexity", "per word")


def _language_cells(score: LanguageScore | EvaluationRow) -> list[str]:
    """Tokens, nats per token, perplexity per token and per word."""
    perplexities = (score.perplexity, score.word_perplexity)
    return [f"{score.n:,}", _number(score.loss), *(_number(value, 2) for value in perplexities)]


def run_table(manifest: RunManifest) -> Table:
    """Scores of a finished run on its validation and test sets."""
    trained = f"{manifest.steps:,} steps in {format_duration(manifest.seconds)}, best epoch {manifest.best_epoch}"
    parts = [f"{manifest.parameters:,} parameters", trained if manifest.steps else "not trained here"]
    title = f"{manifest.run}: {', '.join([*parts, *cautions(manifest)])}"
    scores = {"validation": manifest.validation, **manifest.tests}
    sets = [(name if name == "validation" else f"test: {name}", s) for name, s in scores.items() if s is not None]
    if manifest.task == "language-modeling":
        return _language_table(title, [(name, s) for name, s in sets if isinstance(s, LanguageScore)])
    table = new_table(title, "set", *_SCORES, right=_SCORES)
    for name, score in sets:
        if isinstance(score, ClassificationScore):
            table.add_row(name, *_score_cells(score))
    return table


def _language_table(title: str, sets: Sequence[tuple[str, LanguageScore]]) -> Table:
    """The last loop's scores, and the perplexity of every earlier exit and of early exit by confidence."""
    last = max((max(map(int, score.exits)) for _, score in sets), default=0)
    exits = sorted({int(loop) for _, score in sets for loop in score.exits} - {last})
    columns = (*_LANGUAGE, *(f"exit {loop}" for loop in exits), "early exit")
    table = new_table(title, "set", *columns, right=columns)
    for name, score in sets:
        earlier = [_number(score.exits[str(loop)].perplexity, 2) for loop in exits]
        early = score.early_exit
        left = f"{early.perplexity:,.2f} ({early.mean_loops:.2f} loops)" if early else DASH
        table.add_row(name, *_language_cells(score), *earlier, left)
    if not sets:
        table.caption = "no scores: evaluate it first"
        table.caption_justify = "left"
    return table


def artifact_table(bundle: BundleManifest) -> Table:
    """What a bundle holds, how each artifact compares with torch FP32, and how good it is."""
    synthetic = " (trained on SYNTHETIC data)" if bundle.synthetic else ""
    leaks = f" · {LEAKS}" if bundle.leaks else ""
    measure = "perplexity" if bundle.task == "language-modeling" else "accuracy"
    columns = (
        "artifact",
        "file",
        "size",
        "parameters stored",
        "max error vs torch",
        "top-1 agreement",
        measure,
        "status",
    )
    table = new_table(f"{bundle.run}: bundle{synthetic}{leaks}", *columns, right=columns[2:7])
    for artifact in bundle.artifacts:
        sharing, parity = artifact.sharing, artifact.parity
        stored = f"{sharing.stored_parameters:,} of {sharing.unique_parameters:,}" if sharing else DASH
        error = f"{parity.max_abs_error:.1e}" if parity and parity.max_abs_error is not None else DASH
        agreement = f"{parity.top1_agreement:.1%}" if parity and parity.top1_agreement is not None else DASH
        size = format_bytes(artifact.size_bytes)
        score = artifact.validation or artifact.score
        figure = _number(getattr(score, measure), 4 if measure == "accuracy" else 2) if score else DASH
        status = coloured(artifact.status)
        table.add_row(artifact.id, artifact.file or DASH, size, stored, error, agreement, figure, status)
    table.caption = _scored_on(bundle)
    table.caption_justify = "left"
    return table


def _scored_on(bundle: BundleManifest) -> str | None:
    """What the scores of the artifacts are scores on."""
    for artifact in bundle.artifacts:
        if artifact.validation is not None:
            unit = "rows" if isinstance(artifact.validation, ClassificationScore) else "tokens"
            return f"scores on {artifact.validation.n:,} {unit} of the validation split"
        if artifact.score is not None:
            return f"scores on the golden inputs only ({artifact.score.n:,})"
    return None


def evaluation_table(name: str, rows: Sequence[EvaluationRow]) -> Table:
    """Scores per artifact, with the time per sample."""
    language = any(row.perplexity is not None for row in rows)
    scores = _LANGUAGE if language else _SCORES
    exits = language or any(row.exit is not None for row in rows)
    columns = ("artifact", "set", *(("exit",) if exits else ()), *scores, "ms/sample")
    where = f" (times: {rows[0].host}, {rows[0].provider}, batch {rows[0].batch})" if rows and rows[0].host else ""
    leaks = f" · {LEAKS}" if any(row.leaks for row in rows) else ""
    table = new_table(f"{name}: scores{where}{leaks}", *columns, right=columns[2:])
    for row in rows:
        exit_ = (("last" if row.exit is None else str(row.exit)),) if exits else ()
        cells = _language_cells(row) if language else _score_cells(row)
        table.add_row(row.artifact, row.split, *exit_, *cells, _number(row.ms_per_sample, 3))
    return table


def prediction_table(name: str, artifact: str, predictions: Sequence[dict[str, Any]]) -> Table:
    """Label and probability per text."""
    early = any(prediction["loops"] is not None for prediction in predictions)
    columns = ("label", "probability", *(["loops"] if early else []), "text")
    table = new_table(f"{name} · {artifact}", *columns, right=("probability", "loops"))
    for prediction in predictions:
        note = " [yellow](cut to the model's length)[/]" if prediction["truncated"] else ""
        text = escape(str(prediction["text"])) + note
        loops = [str(prediction["loops"])] if early else []
        table.add_row(f"[bold]{escape(prediction['label'])}[/]", f"{prediction['probability']:.3f}", *loops, text)
    return table


def plan_table(plan: Plan) -> Table:
    """What a recipe's training memory is made of, and its share of the device's budget."""
    title = f"{plan.recipe} on {plan.device}: {plan.parameters:,} parameters, {plan.precision}"
    columns = ("memory at the peak (predicted)", "size", "of the budget", "")
    table = new_table(title, *columns, right=columns[1:3])
    for name, value in plan.breakdown.model_dump().items():
        table.add_row(name, *_share_cells(value, plan.budget_bytes))
    table.add_section()
    table.add_row("peak", *_share_cells(plan.peak_bytes, plan.budget_bytes))
    table.add_row("budget", format_bytes(plan.budget_bytes), "", f"[dim]{escape(plan.budget_source)}[/]")
    table.caption = f"{coloured(plan.status)}: {escape(plan.reason)}"
    table.caption_justify = "left"
    return table


_BAR = 30


def _share_cells(value: int, budget: int) -> tuple[str, str, str]:
    share = value / budget if budget else float("inf")
    bar = "█" * min(_BAR, round(_BAR * min(1.0, share)))
    return format_bytes(value), f"{share:.1%}", f"[red]{bar}▶[/]" if share > 1 else bar


def suggestion_table(plan: Plan) -> Table:
    """Changes of a recipe that does not fit, as they are typed, with the peak that each is predicted to have."""
    columns = ("change", "predicted peak", "fits", "what it costs")
    table = new_table(
        "What to change (the first row that fits is the cheapest that was found)", *columns, right=columns[1:2]
    )
    for suggestion in plan.suggestions:
        flags = escape("\n".join(f"--set {pair}" for pair in suggestion.set))
        fits = "[green]yes[/]" if suggestion.fits else "no"
        table.add_row(flags, format_bytes(suggestion.peak_bytes), fits, escape(suggestion.note))
    return table


def capability_table(capabilities: Sequence[dict[str, Any]]) -> Table:
    """What works on this machine, and the remedy for what does not."""
    table = new_table("What works on this machine", "what", "status", "version", "details")
    for found in capabilities:
        details = escape(str(found["detail"]))
        if found["remedy"]:
            details = f"{details}\n[dim]→ {escape(str(found['remedy']))}[/]".strip()
        table.add_row(escape(str(found["name"])), coloured(found["status"]), found["version"] or DASH, details)
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
