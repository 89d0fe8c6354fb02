"""Score the weights that a classifier had after its last epoch beside those that its training kept.

    python -m benchmarks.last_epoch measure FILE NAME=RUN… [--split random-split]
    python -m benchmarks.last_epoch table FILE

Paper A keeps the epoch with the lowest validation loss. The last epoch's weights are those of the run's newest
checkpoint. FILE is one JSON; a name and set that it has already is replaced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from benchmarks._named_runs import Records, command_line
from edgeformer.artifacts.workspace import MODEL_FOLDER
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.models.weights import WEIGHTS
from edgeformer.run import TORCH, Location, read_run
from edgeformer.system.host import code_version, describe_host, now

SCORES = ("accuracy", "f1", "precision", "recall")


def scores(folder: Path, split: str) -> dict[str, Any]:
    """Return the scores of a run's model on one of its sets."""
    rows = evaluate(Location(folder, None), EvaluateOptions(TORCH, split)).rows
    row = next(row for row in rows if (row.artifact, row.split) == (TORCH, split))
    return {"n": row.n, **{name: getattr(row, name) for name in SCORES}}


def measure(folder: Path, split: str) -> dict[str, Any]:
    """Return the scores with the kept weights and with those of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    with TemporaryDirectory() as place:
        copy = Path(place) / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("checkpoints", "bundle", "tensorboard"))
        shutil.copyfile(newest / WEIGHTS, copy / MODEL_FOLDER / WEIGHTS)
        last = scores(copy, split)
    run = read_run(folder)
    facts = {"host": describe_host(), "code_version": code_version(), "measured": now()}
    epochs = {"best_epoch": run.best_epoch, "epoch": json.loads((newest / "state.json").read_text())["epoch"]}
    return {"recipe": run.recipe, **epochs, "kept": scores(folder, split), "last": last, **facts}


def table(runs: Records) -> str:
    """Return the scores in Markdown."""
    rows = [
        [name, split, record["best_epoch"], *(f"{record['kept'][score]:.4f}" for score in SCORES[:2]),
         record["epoch"], *(f"{record['last'][score]:.4f}" for score in SCORES[:2])]
        for name, records in runs.items()
        for split, record in records.items()
    ]  # fmt: skip
    header = ["model", "set", "kept epoch", "its accuracy", "F1", "last epoch", "its accuracy", "F1"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    command_line(__doc__, measure, table)
