"""A search over models: terminal tables and one HTML page."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.model_search import ModelSearch, SearchedModel
from edgeformer.artifacts.units import format_duration, format_time
from edgeformer.report.charts import draw_choice
from edgeformer.report.columns import DASH, Column, TableColumns
from edgeformer.report.context import candidate_columns, candidate_style, metric_named, ranked_candidates
from edgeformer.report.documents import render_template

PAGE_FILE = "search.html"
_BASIS = {
    "measured": "Times were measured on the device.",
    "estimated": "Times in italics or with ≈ are estimates for the device.",
    "host": "Times are those of this host: the device was neither measured nor estimated.",
}


def model_columns(result: ModelSearch) -> TableColumns[SearchedModel]:
    """Return the columns of the models; the score is that of a model's own weights on the validation rows."""

    def smallest(model: SearchedModel) -> int | None:
        candidates = result.search.candidates if result.search is not None else ()
        return min((c.size_bytes for c in candidates if c.artifact.startswith(f"{model.name}/")), default=None)

    def predicted(model: SearchedModel) -> str:
        if model.predicted_low_s is None or model.predicted_high_s is None:
            return DASH
        return f"{format_duration(model.predicted_low_s)} to {format_duration(model.predicted_high_s)}"

    def status(model: SearchedModel) -> Text:
        text = model.status if model.reason is None else f"{model.status}: {model.reason}"
        return Text(text, {"measured": "green", "failed": "red"}.get(model.status, "yellow"))

    return TableColumns(
        Column("model", "name"),
        Column("description", flows=True, leaves=2),
        Column("parameters", text=lambda model: f"{model.parameters:,}" if model.parameters else DASH, number=True),
        Column("predicted", text=lambda model: Text(predicted(model)), heading="training, predicted", leaves=1),
        Column("trained", heading="training", number=True,
               text=lambda model: Text(DASH if model.train_s is None else format_duration(model.train_s))),
        Column("score", layout="{:.4f}"),
        Column("size_bytes", smallest, "bytes", heading="smallest file"),
        Column("status", text=status, flows=True),
    )  # fmt: skip


def recommendation(result: ModelSearch) -> str:
    """Return which artifact to deploy and why, or why there is none."""
    if result.search is None:
        return "No model has been measured yet."
    if result.search.pick is None:
        text = f"No artifact keeps the limits: {result.search.reason}."
        if result.search.closest is None:
            return text
        closest, metric = result.search.candidates[result.search.closest], metric_named(result.search.metric)
        misses = closest.reason
        if (bound := result.search.bound) is not None and closest.score is not None and metric.is_share:
            misses = f"misses --min-score by {100 * (bound - closest.score):.1f} points; {misses}"
        return f"{text} Best: {closest.artifact}: {misses}."
    return f"Recommended: {result.search.reason}."


def test_text(result: ModelSearch) -> str:
    """Return the score of the recommended or best artifact on the test rows; empty: not scored."""
    test = next((test for test in result.tests if test.candidate == result.best), None)
    if test is None or result.search is None:
        return ""
    metric = metric_named(result.search.metric)
    interval = "" if test.low is None else f", 95% interval {metric.text(test.low)} to {metric.text(test.high)}"
    text = f"On {test.rows:,} test {test.unit} its {metric.name} is {metric.text(test.score)}{interval}."
    if len(result.tests) > 1:
        text += f" These rows have scored {len(result.tests)} recommendations of this search."
    return text


def print_model_search(result: ModelSearch, page: Path, console: Console) -> None:
    """Print the models, the front of the candidates, the recommendation and the page."""
    title = f"{result.name} for {result.device}"
    console.print(model_columns(result).terminal(title, result.models))
    if result.search is not None:
        rows = [row for row in ranked_candidates(result.search) if row.candidate.on_front or row.is_pick]
        title = f"Pareto front of {result.search.metric}, latency and size (all candidates are on the page)"
        console.print(candidate_columns(result.search, "front").terminal(title, rows))
    for text in (recommendation(result), test_text(result)):
        if text:
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    console.print(f"page    {page}", soft_wrap=True, markup=False, highlight=False)


def write_page(result: ModelSearch, folder: Path) -> Path:
    """Write the HTML page of a search and return its path."""
    candidates = None
    if result.search is not None:
        ranked = ranked_candidates(result.search)
        candidates = candidate_columns(result.search).html(ranked, map(candidate_style, ranked))
    page = folder / PAGE_FILE
    html = render_template(
        "search.html", result=result, created=format_time(result.created), recommendation=recommendation(result),
        test=test_text(result), picture=draw_choice(result.search) if result.search is not None else None,
        models=model_columns(result).html(result.models), candidates=candidates,
        basis=_BASIS[result.search.basis] if result.search is not None else "",
    )  # fmt: skip
    write_text(page, html)
    return page
