"""Records of finished SST-2 runs, which the ladder compares.

Runs whose names differ in ``-seedN`` alone are the same model.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from edgeformer.artifacts.scores import EVALUATION_FILE
from edgeformer.bundle import Bundle
from edgeformer.run import read_run

SETS = ("glue-dev", "sst-test")
ARTIFACT_KEYS = {"id", "size_bytes", "status", "parity", "sharing"}


def collect(folders: list[Path]) -> list[dict[str, Any]]:
    """One record per run, from its manifests."""
    records = []
    for folder in folders:
        run = read_run(folder)
        keys = {"run", "recipe", "parameters", "seconds", "steps", "epochs", "best_epoch", "precision", "tests"}
        record = run.model_dump(
            mode="json", include=keys | {"validation", "versions", "code_version", "host", "started"}
        )
        record["run"] = folder.name  # what it is called now, whatever it was trained as
        record["split"], record["rows"] = run.data.split, run.data.rows
        record["overlap"] = [overlap.model_dump() for overlap in run.data.overlap]
        if (folder / "bundle" / "bundle.json").is_file():
            artifacts = Bundle.open(folder / "bundle").manifest.artifacts
            record["artifacts"] = [a.model_dump(mode="json", include=ARTIFACT_KEYS) for a in artifacts]
            record["evaluation"] = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))["rows"]
        records.append(record)
    return records


def read(sources: list[str]) -> list[dict[str, Any]]:
    """The runs of several files that were tested on all sets."""
    files = [json.loads(Path(source).read_text(encoding="utf-8")) for source in sources]
    records = [record for documents in files if isinstance(documents, list) for record in documents]
    return [record for record in records if all(split in record["tests"] for split in SETS)]


def by_model(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Name without its seed → the runs of it."""
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        figures[re.sub(r"-seed\d+$", "", record["run"])].append(record)
    return figures


def accuracies(runs: list[dict[str, Any]], artifact: str, split: str) -> list[float]:
    """Of every run that has it, of the whole model; of its own weights as training ended with."""
    if artifact == "torch":
        return [run["tests"][split]["accuracy"] for run in runs if split in run["tests"]]
    rows = [row for run in runs for row in run.get("evaluation", []) if row["exit"] is None]
    return [row["accuracy"] for row in rows if row["artifact"] == artifact and row["split"] == split]


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation where there are several."""
    if not values:
        return "–"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
