"""Collect finished SST-2 runs into one JSON, and print the table of docs/results/sst2.md from it.

Usage:
    python benchmarks/sst2_results.py collect results.json RUN_FOLDER…
    python benchmarks/sst2_results.py table results.json       # scores
    python benchmarks/sst2_results.py artifacts results.json   # size, sharing, parity
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from edgeformer.artifacts.scores import EVALUATION_FILE
from edgeformer.bundle import Bundle
from edgeformer.run import read_run

# Paper A, Table 6 (final version): accuracy on its own random split, seed unknown.
PUBLISHED = {25_912_706: "0.9061", 10_972_162: "0.9021"}


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


ARTIFACT_KEYS = {"id", "size_bytes", "status", "parity", "sharing"}


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one line per run and test set, the published figure beside the random split."""
    rows = []
    for record in records:
        for name, score in record["tests"].items():
            published = PUBLISHED.get(record["parameters"], "") if name == "random-split" else ""
            trained = f"{record['split']}, {record['epochs']} epochs, {record['seconds'] / 60:.1f} min"
            values = [f"{score[key]:.4f}" for key in ("accuracy", "f1", "precision", "recall")]
            rows.append(
                [record["recipe"], f"{record['parameters']:,}", trained, name, f"{score['n']:,}", *values, published]
            )
    header = [
        "recipe",
        "parameters",
        "trained on",
        "tested on",
        "rows",
        "accuracy",
        "F1",
        "precision",
        "recall",
        "paper",
    ]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def artifacts_table(records: list[dict[str, Any]]) -> str:
    """Markdown: size, sharing, parity and test score of every exported artifact."""
    rows = []
    for record in records:
        scores = {(row["artifact"], row["split"]): row for row in record.get("evaluation", [])}
        for artifact in record.get("artifacts", []):
            sharing, parity = artifact["sharing"], artifact["parity"]
            score = scores.get((artifact["id"], record["split"]))
            rows.append(
                [
                    record["run"],
                    artifact["id"],
                    f"{artifact['size_bytes']:,}",
                    f"{sharing['stored_parameters']:,} of {sharing['unique_parameters']:,}",
                    f"{parity['max_abs_error']:.1e}",
                    f"{parity['top1_agreement']:.1%}",
                    f"{score['accuracy']:.4f}" if score else "–",
                ]
            )
    header = ["run", "artifact", "bytes", "parameters stored", "max error vs torch", "top-1 agreement", "accuracy"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Command line."""
    match sys.argv[1:]:
        case ["collect", target, *folders] if folders:
            records = collect([Path(folder) for folder in folders])
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
        case ["table", source]:
            print(table(json.loads(Path(source).read_text(encoding="utf-8"))))
        case ["artifacts", source]:
            print(artifacts_table(json.loads(Path(source).read_text(encoding="utf-8"))))
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
