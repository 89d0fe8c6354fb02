"""Collect finished language-model runs into one JSON, and print the tables of docs/results/language-models.md.

Usage:
    python benchmarks/language_results.py collect results.json RUN_FOLDER…
    python benchmarks/language_results.py table results.json    # one line per run
    python benchmarks/language_results.py exits results.json    # one line per run and exit
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.workspace import RECIPE_FILE
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.tasks.language_modeling import LanguageRecipe

KEYS = {"run", "recipe", "parameters", "seconds", "steps", "epochs", "best_epoch", "precision", "leaks", "causality"}
MORE = {"validation", "tests", "memory", "versions", "code_version", "host", "started"}


def collect(folders: list[Path]) -> list[dict[str, Any]]:
    """One record per run, from its manifest and recipe."""
    records = []
    for folder in folders:
        run, recipe = read_run(folder), load_recipe(str(folder / RECIPE_FILE))
        if not isinstance(recipe, LanguageRecipe):
            raise InputError(f"{folder}: is no language model; see benchmarks/sst2_results.py")
        record = run.model_dump(mode="json", include=KEYS | MORE)
        model: Any = recipe.model
        record |= {"mode": recipe.data.mode, "causal": model.causal, "data": run.data.model_dump(mode="json")}
        records.append({**record, "score_padding": recipe.training.score_padding})
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: what was trained, how, and what it scores."""
    rows = []
    for record in records:
        score = record["validation"]
        words = score["word_perplexity"]
        verdict = "**leaks future tokens: void**" if record["leaks"] else "valid"
        rows.append(
            [
                record["run"],
                f"{record['parameters']:,}",
                "yes" if record["causal"] else "no",
                "counted" if record["score_padding"] else "masked" if record["mode"] == "paragraphs" else "none",
                f"{record['steps']:,}",
                f"{record['seconds'] / 60:.1f}",
                f"{score['perplexity']:.2f}",
                "–" if words is None else f"{words:.1f}",
                verdict,
            ]
        )
    header = ["run", "parameters", "causal", "padding", "steps", "minutes", "per token", "per word", "verdict"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def exits_table(records: list[dict[str, Any]]) -> str:
    """Markdown: perplexity per token of every exit on validation and test, and of early exit."""
    rows = []
    for record in records:
        for name, score in {"validation": record["validation"], **record["tests"]}.items():
            exits = {loop: f"{results['perplexity']:.2f}" for loop, results in score["exits"].items()}
            early = score["early_exit"]
            rows.append(
                {
                    "run": record["run"] + (" (leaks)" if record["leaks"] else ""),
                    "set": name,
                    "tokens": f"{score['n']:,}",
                    **{f"loop {loop}": value for loop, value in exits.items()},
                    "early exit": f"{early['perplexity']:.2f} at {early['mean_loops']:.2f} loops" if early else "–",
                }
            )
    return tabulate(rows, "keys", tablefmt="github", disable_numparse=True)


def main() -> None:
    """Command line."""
    match sys.argv[1:]:
        case ["collect", target, *folders] if folders:
            records = collect([Path(folder) for folder in folders])
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
        case ["table", source]:
            print(table(json.loads(Path(source).read_text(encoding="utf-8"))))
        case ["exits", source]:
            print(exits_table(json.loads(Path(source).read_text(encoding="utf-8"))))
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
