"""What a model card says of the texts: labels in each set with their shares, and how long the texts are."""

from __future__ import annotations

import yaml
from tabulate import tabulate

from edgeformer.artifacts.data_warnings import LEAKS
from edgeformer.artifacts.manifest import DataSummary, Lengths, RunManifest
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.units import format_duration, markdown, markdown_line
from edgeformer.models import model_spec_of
from edgeformer.tasks import Task, task_named

_MOST_LABELS = 6
"""More columns than a reader can compare: run.json has them all."""


def data_tables(data: DataSummary) -> str:
    """A table of labels and one of lengths as Markdown, each with a heading; nothing where nothing was counted."""
    tables = []
    labels = list(next(iter(data.label_rows.values()), {}))
    if labels and len(labels) <= _MOST_LABELS:
        rows = [[markdown(name), *_shares(counts, data.rows[name])] for name, counts in data.label_rows.items()]
        tables.append("## Labels\n\n" + _table(["set", "rows", *map(markdown, labels)], rows))
    if data.text_words:
        rows = [[markdown(name), *_lengths(data, name)] for name in data.text_words]
        header = ["set", "words: least", "median", "mean", "most", "tokens read: median", "most", "texts cut"]
        said = "Words of a text are counted once it is cleaned; tokens as the model reads them, special ones included."
        tables.append(f"## Lengths\n\n{_table(header, rows)}\n{said}\n")
    return "".join(f"{table}\n" for table in tables)


def _table(header: list[str], rows: list[list[str]]) -> str:
    align = ("left", *("right" for _ in header[1:]))
    return tabulate(rows, header, tablefmt="github", disable_numparse=True, colalign=align) + "\n"


def _shares(counts: dict[str, int], rows: int) -> list[str]:
    return [f"{rows:,}", *(f"{count:,} ({count / max(rows, 1):.2%})" for count in counts.values())]


def _lengths(data: DataSummary, name: str) -> list[str]:
    words, tokens = data.text_words[name], data.text_tokens.get(name)
    cut = data.truncated_rows.get(name, 0)
    return [
        f"{words.min:,}", _middle(words), f"{words.mean:.1f}", f"{words.max:,}",
        *(["", ""] if tokens is None else [_middle(tokens), f"{tokens.max:,}"]),
        f"{cut:,} ({cut / max(data.rows[name], 1):.1%})",
    ]  # fmt: skip


def _middle(lengths: Lengths) -> str:
    return f"{lengths.median:,.1f}".removesuffix(".0")


# The model card of a run: what the model is, what it was trained on, how good it is, what it is not.


CARD_FILE = "README.md"
"""Where model hubs look for it: beside the weights, and beside the graphs."""


def model_card(manifest: RunManifest, recipe: Recipe) -> str:
    """The card as Markdown with the front matter that model hubs read.

    Args:
        manifest: of the run.
        recipe: that it was trained with.
    """
    model_spec, task, data = model_spec_of(recipe), task_named(recipe.task), manifest.data
    front = {"library_name": "edgeformer", "pipeline_tag": task.pipeline_tag, "tags": list(model_spec.tags())}
    causality = [f"**Causality:** {_causality(manifest)}"] if task.writes_text else []
    counts = ", ".join(
        f"{name} {count:,} rows" + (f" of {data.tokens[name]:,} tokens" if name in data.tokens else "")
        for name, count in data.rows.items()
    )
    lines = [
        f"**Model:** {model_spec.card_line(recipe.model)}; {manifest.parameters:,} parameters",
        *causality,
        *task.card_lines(recipe),
        f"**Training:** {_training(manifest, recipe, task)}",
        f"**Data:** split {markdown(data.split)}; {markdown(counts)}",
    ]
    seen = [
        f"- {markdown(o.test_set)}: of {o.test_rows:,} texts, {o.duplicates:,} are also training texts and "
        f"{o.contained:,} more share a whole phrase with one.\n"
        for o in data.overlap
    ] or ["Not counted.\n"]
    items = "".join(f"- {line}\n" for line in lines)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {markdown(manifest.run)}\n\n"
        f"{markdown_line(recipe.description)}.\n\n"
        f"{_warnings(manifest)}{items}\n"
        f"## Scores\n\n{_scores(manifest, task)}\n"
        f"{data_tables(data)}"
        f"## Seen in training\n\n{''.join(seen)}\n"
        "The exact recipe is `recipe.yaml` in the run's folder; every version and the host are in `run.json`.\n"
    )


def _warnings(manifest: RunManifest) -> str:
    """What a reader must know before any figure."""
    text = ""
    if manifest.leaks:
        text += (
            f"> **{LEAKS}.** This model sees the tokens that it is asked to predict. Its loss and perplexity say "
            "nothing about how well it predicts text.\n\n"
        )
    if manifest.synthetic:
        text += (
            "> **Synthetic data.** This model was trained and tested on reviews written by a generator. "
            "Its scores say nothing about real text.\n\n"
        )
    return text


def _causality(manifest: RunManifest) -> str:
    found = manifest.causality
    if found is None:
        return "not probed"
    tried = f"{found.trials} random places in texts of {', '.join(map(str, found.lengths))} tokens, every exit"
    largest = max(found.largest_change.values())
    if found.leaks:
        return f"the probe ({tried}) saw outputs change with tokens up to {found.reach} positions later"
    return f"later tokens change no output (probe: {tried}; largest change {largest:.1e} of an output's spread)"


def _training(manifest: RunManifest, recipe: Recipe, task: Task) -> str:
    if not manifest.steps:
        return f"not here; {markdown(str(manifest.reason))}"
    epoch = manifest.best_epoch
    best = f"weights of epoch {epoch}" if epoch is not None else "weights of the last step, stopped in mid-epoch"
    return (
        f"{manifest.epochs} epochs, {manifest.steps:,} steps, {format_duration(manifest.seconds)} in "
        f"{manifest.precision} on {markdown(str(manifest.host.get('cpu')))}; {best}, chosen by validation "
        f"{task.selected_by(recipe.training)}; seed {recipe.seed}"
    )


def _scores(manifest: RunManifest, task: Task) -> str:
    scores = {"validation": manifest.validation, **manifest.tests}
    exits = any(score is not None and score.by_exit for score in scores.values())
    rows = [row for name, score in scores.items() if score is not None for row in _rows(name, score, task, exits)]
    if not rows:
        return "None yet.\n"
    header = ("set", *(("answered by",) if exits else ()), *(column.heading for column in task.columns))
    table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
    return f"{table}\n\n{task.score_note}\n"


def _rows(name: str, score: Score, task: Task, exits: bool) -> list[list[str]]:
    """A row of the full model, behind those of earlier exits and before that of early exit, where there are some."""
    full = [column.text(getattr(score, column.key, None)) for column in task.columns]
    name = markdown(name)
    if not exits:
        return [[name, *full]]
    *earlier, last = score.by_exit
    rows = [[name, f"loop {loop}", *_exit_cells(score, score.by_exit[loop], task)] for loop in earlier]
    rows.append([name, f"loop {last}", *full])
    early = score.leaving_early
    if early is not None:
        rows.append([name, f"by confidence ({early.mean_loops:.2f} loops)", *_exit_cells(score, early, task)])
    return rows


def _exit_cells(score: Score, exit_: object, task: Task) -> list[str]:
    """What is known of one exit: its own figures, and how many rows or tokens they are of."""
    found = {"n": score.n, **dict(exit_)}  # type: ignore[call-overload]
    return [column.text(found.get(column.key)) for column in task.columns]
