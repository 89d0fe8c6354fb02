"""A folded language model beside its teacher: perplexity before and after its training, and bytes as GGUF.

    python -m benchmarks.folded_decoder score RUN --out FILE [--rows N]
    python -m benchmarks.folded_decoder table FILE

RUN: a finished run of a recipe with ``model.fold``. All perplexities are of its first N validation rows, or of all.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import SILENT
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import count_parameters
from edgeformer.models.language_loss import TokenLosses
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.runtimes.llamacpp.builder import write_gguf
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.tasks import get_task

ROWS = 8


@torch.inference_mode()
def perplexity(model: Any, rows: Any, limit: int, task: Any, pad: int) -> float:
    """Of the first rows of the validation set, in float32."""
    scorer, total, count = TokenLosses(model).eval(), 0.0, 0
    for start in range(0, limit, ROWS):
        numbers = list(range(start, min(start + ROWS, limit)))
        batch = {name: torch.from_numpy(array) for name, array in task.rows.batch(rows, numbers, pad).items()}
        inputs = {name: batch[name] for name in (*scorer.inputs, *scorer.optional) if name in batch}
        total += float(scorer(**inputs)[f"loss_exit{model.loops}"].double().sum())
        count += task.rows.weight({name: tensor.numpy() for name, tensor in batch.items()})
    return math.exp(total / count)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for the teacher, and one per fold."""

    def row(label: str, record: dict[str, Any], name: str, before: str, trained: str) -> list[str]:
        sizes = " / ".join(f"{record['bytes'][name][key] / 1e6:.1f}" for key in ("fp16", "int8", "int4"))
        return [label, f"{record['parameters'][name]:,}", before, f"{record['perplexity'][name]:.1f}", sizes, trained]

    rows = [row("teacher", records[0], "teacher", "–", "–")]
    for record in records:
        before = f"{record['perplexity']['before'] / 1e6:.1f} million"
        trained = f"{record['steps']} steps, {record['training_tokens']:,} tokens, {record['minutes']:.0f} min"
        rows.append(row(f"{record['layers']} layers × {record['iterations']}", record, "after", before, trained))
    header = ["model", "parameters", "perplexity before training", "after", "GGUF: FP16 / INT8 / INT4, MB", "training"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    scoring = commands.add_parser("score", help="score a run")
    scoring.add_argument("run", type=Path)
    scoring.add_argument("--out", type=Path, required=True, help="a record is added to its list")
    scoring.add_argument("--rows", type=int, metavar="N", help="validation rows that are scored")
    commands.add_parser("table", help="print the table of the results page").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(json.loads(arguments.file.read_text(encoding="utf-8"))["runs"]))
    else:
        score(arguments)


def score(arguments: argparse.Namespace) -> None:
    """Score a run, its start and its teacher, and add a record to the file."""
    run: Path = arguments.run
    recipe: Any = read_run_recipe(run)
    task, manifest = get_task(recipe.task), read_run(run)
    prepared = task.rows.prepare(recipe, run / "cache", SILENT)
    start = model_spec_of(recipe).adapter.build(recipe).eval()
    model_spec_of(recipe).adapter.start(start, recipe)
    models: dict[str, Any] = {
        "teacher": load_model(Path(recipe.training.teacher)),
        "before": start,
        "after": load_model(run),
    }
    rows = prepared.validation
    limit = min(arguments.rows or len(rows), len(rows))
    scores = {name: perplexity(model, rows, limit, task, prepared.pad) for name, model in models.items()}
    record: dict[str, Any] = {
        "layers": recipe.model.layers, "iterations": recipe.model.iterations, "fold": recipe.model.fold,
        "parameters": {name: count_parameters(model) for name, model in models.items()}, "perplexity": scores,
        "validation_tokens": int(rows.sizes(np.arange(limit)).sum()), "steps": manifest.steps,
        "training_tokens": int(prepared.train.sizes(np.arange(len(prepared.train))).sum()),
        "minutes": manifest.seconds / 60, "precision": manifest.precision,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        for name in ("teacher", "after"):
            for precision in ("fp16", "int8", "int4"):
                path = Path(folder) / "model.gguf"
                write_gguf(path, run / "model", models[name].gguf_contents(), precision)
                record.setdefault("bytes", {}).setdefault(name, {})[precision] = path.stat().st_size
    record |= {"host": describe_host(), "code_version": code_version(), "measured": now()}
    known = json.loads(arguments.out.read_text(encoding="utf-8"))["runs"] if arguments.out.is_file() else []
    write_json(arguments.out, {"runs": [*known, record]})
    print(json.dumps(record["perplexity"]))


if __name__ == "__main__":
    main()
