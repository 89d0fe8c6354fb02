"""The model card of a language model."""

from __future__ import annotations

import yaml
from tabulate import tabulate

from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.scores import LanguageScore
from edgeformer.formats.units import format_duration
from edgeformer.reporting.caution import overlaps, warnings


def language_card(manifest: RunManifest, recipe: LanguageRecipe) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    front = {
        "library_name": "edgeformer",
        "pipeline_tag": "text-generation",
        "tags": ["weight-sharing", "recurrent-depth", "early-exit", "edge", "onnx"],
    }
    m, d = recipe.model, recipe.data
    exits = f"exits after {', '.join(map(str, m.exits))} ({m.heads} heads)" if m.exits else "no early exit"
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {manifest.run}\n\n{recipe.description}.\n\n"
        f"{warnings(manifest)}"
        f"- **Model:** one shared block × {m.loops} loops, {m.cycles} TRM cycles ({m.trm}), {exits}; width "
        f"{m.hidden_size}, {m.attention_heads} heads, FFN {m.ffn_size}, {m.norm} norm; {manifest.vocabulary:,} tokens; "
        f"{manifest.parameters:,} parameters\n"
        f"- **Causality:** {_causality(manifest)}\n"
        f"- **Length:** {d.sequence_length} tokens at a time ({d.mode}); takes at most {m.max_positions}\n"
        f"- **Training:** {_training(manifest, recipe)}\n\n"
        f"## Scores\n\n{_scores(manifest)}\n"
        f"## Seen in training\n\n{overlaps(manifest)}\n"
        "The exact recipe is `recipe.yaml` in the run's folder; every version and the host are in `run.json`.\n"
    )


def _causality(manifest: RunManifest) -> str:
    found = manifest.causality
    if found is None:
        return "not probed"
    tried = f"{found.trials} random places in texts of {', '.join(map(str, found.lengths))} tokens, every exit"
    largest = max(found.largest_change.values())
    if found.leaks:
        return f"the probe ({tried}) saw outputs change with tokens up to {found.reach} positions later"
    return f"later tokens change no output (probe: {tried}; largest change {largest:.1e} of an output's spread)"


def _training(manifest: RunManifest, recipe: LanguageRecipe) -> str:
    if not manifest.steps:
        return f"not here; {manifest.reason}"
    tokens = ", ".join(f"{name} {count:,}" for name, count in manifest.data.tokens.items())
    return (
        f"{manifest.epochs} epochs, {manifest.steps:,} steps, {format_duration(manifest.seconds)} in "
        f"{manifest.precision} on {manifest.host.get('cpu')}; weights of epoch {manifest.best_epoch}, chosen by "
        f"validation loss; seed {recipe.seed}; tokens: {tokens}"
    )


def _scores(manifest: RunManifest) -> str:
    scores = {"validation": manifest.validation, **manifest.tests}
    rows = [row for name, score in scores.items() if isinstance(score, LanguageScore) for row in _rows(name, score)]
    if not rows:
        return "None yet.\n"
    header = ("set", "answered by", "tokens", "loss", "perplexity", "per word")
    return (
        f"{tabulate(rows, header, tablefmt='github', disable_numparse=True)}\n\n"
        "Loss is in nats per token. Perplexity per token depends on the tokenizer, per word it does not. *By "
        "confidence*: every token leaves at the first exit that is sure enough; loops are a mean, and no time.\n"
    )


def _rows(name: str, score: LanguageScore) -> list[tuple[str, ...]]:
    loops = sorted(map(int, score.exits))
    word = f"{score.word_perplexity:,.2f}" if score.word_perplexity is not None else "–"
    rows: list[tuple[str, ...]] = []
    for loop in loops:
        found, per_word = score.exits[str(loop)], word if loop == loops[-1] else "–"
        rows.append((name, f"loop {loop}", f"{score.n:,}", f"{found.loss:.4f}", f"{found.perplexity:,.2f}", per_word))
    early = score.early_exit
    if early is not None:
        by = f"by confidence ({early.mean_loops:.2f} loops)"
        rows.append((name, by, f"{score.n:,}", f"{early.loss:.4f}", f"{early.perplexity:,.2f}", "–"))
    return rows
