"""Model card of a run: model, training, data, scores and their limits."""

from __future__ import annotations

from typing import Any

import yaml
from tabulate import tabulate

from edgeformer.artifacts.manifest import LEAKS, DataSummary, RunManifest
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_duration, markdown, markdown_line
from edgeformer.models import model_spec_of
from edgeformer.tasks import Task, get_task

CARD_FILE = "README.md"
"""File name that model hubs expect, beside weights and graphs."""
_MAX_LABEL_COLUMNS = 6
"""A table with more columns is unreadable; run.json has them all."""


def model_card(manifest: RunManifest, recipe: Recipe) -> str:
    """Write the card of a run as Markdown with the front matter that model hubs read."""
    model_spec, task, data = model_spec_of(recipe), get_task(recipe.task), manifest.data
    front = {"library_name": "edgeformer", "pipeline_tag": task.pipeline_tag, "tags": list(model_spec.tags)}
    warnings = ""
    if manifest.leaks:
        warnings += (
            f"> **{LEAKS}.** This model sees the tokens that it predicts. Its loss and perplexity say "
            "nothing about how well it predicts text.\n\n"
        )
    if manifest.synthetic:
        warnings += (
            "> **Synthetic data.** This model was trained and tested on reviews written by a generator. "
            "Its scores say nothing about real text.\n\n"
        )
    counts = ", ".join(
        f"{name} {count:,} rows" + (f" of {data.tokens[name]:,} tokens" if name in data.tokens else "")
        for name, count in data.rows.items()
    )
    facts = [f"**Model:** {model_spec.card_line(recipe.model)}; {manifest.parameters:,} parameters"]
    if task.writes_text and (probe := manifest.causality) is None:
        facts.append("**Causality:** not probed")
    elif task.writes_text and probe is not None:
        trials = f"{probe.trials} random places in texts of {', '.join(map(str, probe.lengths))} tokens, every exit"
        largest = max(probe.largest_change.values())
        result = f"later tokens change no output (probe: {trials}; largest change {largest:.1e} of an output's spread)"
        if probe.leaks:
            result = f"the probe ({trials}) saw outputs change with tokens up to {probe.reach} positions later"
        facts.append(f"**Causality:** {result}")
    facts += task.card_lines(recipe)
    training = f"not here; {markdown(str(manifest.reason))}"
    if manifest.steps:
        epoch = manifest.best_epoch
        weights = f"weights of epoch {epoch}" if epoch is not None else "weights of the last step, stopped in mid-epoch"
        training = (
            f"{manifest.epochs} epochs, {manifest.steps:,} steps, {format_duration(manifest.seconds)} in "
            f"{manifest.precision} on {markdown(str(manifest.host.get('cpu')))}; {weights}, chosen by validation "
            f"{task.selected_by(recipe.training)}; seed {recipe.seed}"
        )
    facts += [f"**Training:** {training}", f"**Data:** split {markdown(data.split)}; {markdown(counts)}"]
    overlaps = [
        f"- {markdown(overlap.test_set)}: of {overlap.test_rows:,} texts, {overlap.duplicates:,} are also training "
        f"texts and {overlap.contained:,} more share a whole phrase with one.\n"
        for overlap in data.overlap
    ]
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {markdown(manifest.run)}\n\n"
        f"{markdown_line(recipe.description)}.\n\n"
        f"{warnings}{''.join(f'- {fact}{chr(10)}' for fact in facts)}\n"
        f"## Scores\n\n{_score_table(manifest, task)}\n"
        f"{data_tables(data)}"
        f"## Seen in training\n\n{''.join(overlaps) or 'Not counted.' + chr(10)}\n"
        "The exact recipe is `recipe.yaml` in the run's folder; every version and the host are in `run.json`.\n"
    )


def _score_table(manifest: RunManifest, task: Task) -> str:
    """Return one row per set, or one per set and exit, in loop order, then one for early exit by confidence."""
    scores = {name: score for name, score in {"validation": manifest.validation, **manifest.tests}.items() if score}
    if not scores:
        return "None yet.\n"
    has_exits = any(score.by_exit for score in scores.values())
    rows = []
    for name, score in scores.items():
        full = {column.key: getattr(score, column.key, None) for column in task.columns}
        results: dict[str, dict[str, Any]] = {f"loop {loop}": dict(result) for loop, result in score.by_exit.items()}
        if score.by_exit:
            results[f"loop {[*score.by_exit][-1]}"] = full
            if (early := score.leaving_early) is not None:
                results[f"by confidence ({early.mean_loops:.2f} loops)"] = dict(early)
        for answered_by, values in (results or {"": full}).items():
            cells = [column.text({"n": score.n, **values}.get(column.key)) for column in task.columns]
            rows.append([markdown(name), *([answered_by] if has_exits else []), *cells])
    header = ("set", *(("answered by",) if has_exits else ()), *(column.heading for column in task.columns))
    return f"{tabulate(rows, header, tablefmt='github', disable_numparse=True)}\n\n{task.score_note}\n"


def data_tables(data: DataSummary) -> str:
    """Return Markdown tables of labels and text lengths, each with a heading; empty if nothing was counted."""

    def table(header: list[str], rows: list[list[str]]) -> str:
        align = ("left", *("right" for _ in header[1:]))
        return tabulate(rows, header, tablefmt="github", disable_numparse=True, colalign=align) + "\n"

    def number(value: float) -> str:
        return f"{value:,.1f}".removesuffix(".0")

    text = ""
    labels = list(next(iter(data.label_rows.values()), {}))
    if labels and len(labels) <= _MAX_LABEL_COLUMNS:
        rows = [
            [
                markdown(name),
                f"{data.rows[name]:,}",
                *(f"{count:,} ({count / max(data.rows[name], 1):.2%})" for count in counts.values()),
            ]
            for name, counts in data.label_rows.items()
        ]
        text += f"## Labels\n\n{table(['set', 'rows', *map(markdown, labels)], rows)}\n"
    if data.text_words:
        rows = []
        for name, words in data.text_words.items():
            tokens, cut = data.text_tokens.get(name), data.truncated_rows.get(name, 0)
            rows.append(
                [
                    markdown(name), f"{words.min:,}", number(words.median), f"{words.mean:.1f}", f"{words.max:,}",
                    *(["", ""] if tokens is None else [number(tokens.median), f"{tokens.max:,}"]),
                    f"{cut:,} ({cut / max(data.rows[name], 1):.1%})",
                ]
            )  # fmt: skip
        header = ["set", "words: least", "median", "mean", "most", "tokens read: median", "most", "texts cut"]
        text += (
            f"## Lengths\n\n{table(header, rows)}\n"
            "Words of a text are counted once it is cleaned; tokens as the model reads them, special ones included.\n\n"
        )
    return text
