"""Scores of a trained looped model with more loops, or on longer texts, than it was trained with.

    python -m benchmarks.beyond_training measure FILE RUN… --split SET [--loops 1 2 3 4] [--lengths 128 256 512]
    python -m benchmarks.beyond_training table FILE

Weights stay as they are: a copy of the run gets another ``model.iterations`` or ``data.sequence_length`` in its recipe
and is scored again. Positions are rotations (RoPE), which have no parameters. A CRT cannot be asked this: its loops
and positions have learned vectors of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from tabulate import tabulate

from benchmarks.ladder import edgeformer
from edgeformer.artifacts.documents import to_yaml
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.workspace import BUNDLE_FOLDER, RECIPE_FILE
from edgeformer.run import TORCH
from edgeformer.system.host import code_version, describe_host, now


def score(run: Path, split: str, loops: int | None, length: int | None) -> dict[str, Any]:
    """Return the scores of a run's own weights after the last loop."""
    with TemporaryDirectory() as name:
        folder = Path(name) / run.name
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns(BUNDLE_FOLDER, "checkpoints"))
        recipe = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
        if loops is not None:
            recipe["model"]["iterations"] = loops
        if length is not None:
            recipe["data"]["sequence_length"] = length
        (folder / RECIPE_FILE).write_text(to_yaml(recipe), encoding="utf-8")
        rows = edgeformer("evaluate", str(folder), "--artifact", TORCH, "--split", split)["rows"]
    (row,) = [row for row in rows if row["exit"] is None]
    return {key: row[key] for key in ("n", "loss", "accuracy", "perplexity")}


def measure(file: Path, run: Path, split: str, loops: list[int], lengths: list[int]) -> None:
    """Score a run with every number of loops, and on every length, and add it to the file."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": {}}
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text(encoding="utf-8"))
    document["runs"][run.name] = {
        "split": split, "trained_loops": recipe["model"]["iterations"],
        "trained_length": recipe["data"].get("sequence_length"),
        "loops": {str(count): score(run, split, count, None) for count in loops},
        "lengths": {str(length): score(run, split, None, length) for length in lengths},
    }  # fmt: skip
    write_json(file, {**document, "host": describe_host(), "code_version": code_version(), "measured": now()})


def table(document: dict[str, Any]) -> str:
    """Return all scores in Markdown; those of the training's own loops and length are bold."""
    rows = []
    for run, record in document["runs"].items():
        for kind, trained in (("loops", record["trained_loops"]), ("lengths", record["trained_length"])):
            for value, scores in record[kind].items():
                name = "perplexity" if scores["perplexity"] is not None else "accuracy"
                text = f"{scores[name]:.2f}" if name == "perplexity" else f"{scores[name]:.4f}"
                unit = "loops" if kind == "loops" else "tokens"
                cells = [f"{value} {unit}" if value != "1" else "1 loop", text]
                rows.append([run, record["split"], *(f"**{c}**" if int(value) == trained else c for c in cells), name])
    return tabulate(rows, ["model", "set", "with", "score", ""], tablefmt="github", disable_numparse=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("runs", type=Path, nargs="+")
    measuring.add_argument("--split", required=True)
    measuring.add_argument("--loops", type=int, nargs="*", default=[])
    measuring.add_argument("--lengths", type=int, nargs="*", default=[])
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(json.loads(arguments.file.read_text(encoding="utf-8"))))
    else:
        for run in arguments.runs:
            measure(arguments.file, run, arguments.split, arguments.loops, arguments.lengths)


if __name__ == "__main__":
    main()
