"""Pretrained encoders and their folds on SST-2: one table and one figure, from the runs that were trained and exported.

Usage:
    python benchmarks/sst2_results.py collect results.json RUN_FOLDER…   # as for every other SST-2 run
    python benchmarks/fold_results.py table results.json…                # means over seeds, sizes
    python benchmarks/fold_results.py figure figure.png results.json…   # accuracy against size; and four_bits.py's

Runs whose names differ in ``-seedN`` alone are the same model. Every bundle must have been made with ``--fp16 --int8
--vocab-trim`` and scored on both sets (``edgeformer evaluate RUN --artifact all --split glue-dev``, and sst-test).
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tabulate import tabulate

RESULTS = Path(__file__).parent / "results" / "cpu-2core"
SETS = ("glue-dev", "sst-test")
EXPORTED_AS = {"recurrent_sst2_fast-glue-dev": "2026-11-21-bundle-recurrent-sst2-fast.json"}
"""A run that was not exported → the bundle of the same model with the same data under another split: its sizes."""
SIZES = {"FP32": "onnx-fp32", "FP16": "onnx-fp16", "INT8": "onnx-int8", "INT8 + trim": "onnx-int8-trim"}
TRIMMED_AS = {"fp32": "FP32 + trim", "int8": "INT8 + trim", "int4": "INT4 + trim"}
"""What four_bits.py measures, which always has a smaller vocabulary."""
MARKERS = {"FP32": "o", "FP16": "s", "INT8": "^", "FP32 + trim": "P", "INT8 + trim": "D", "INT4 + trim": "*"}


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


def size(runs: list[dict[str, Any]], artifact: str) -> int | None:
    """Bytes of an artifact of a model; those of several seeds differ in nothing but numbers."""
    documents = [item for run in runs for item in run.get("artifacts", [])]
    if (twin := EXPORTED_AS.get(runs[0]["run"])) is not None:
        documents = json.loads((RESULTS / twin).read_text(encoding="utf-8"))["artifacts"]
    figures = [item["size_bytes"] for item in documents if item["id"] == artifact]
    return max(figures, default=None)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a line per model, in the order of the file; without the columns that no model has."""
    rows = []
    for name, runs in by_model(records).items():
        sizes = [size(runs, artifact) for artifact in SIZES.values()]
        rows.append(
            [
                name,
                f"{runs[0]['parameters']:,}",
                len(runs),
                *(spread(accuracies(runs, "torch", split)) for split in SETS),
                *("–" if bytes_ is None else f"{bytes_ / 1e6:.1f}" for bytes_ in sizes),
                *(spread(accuracies(runs, "onnx-int8-trim", split)) for split in SETS),
            ]
        )
    header = ["model", "parameters", "seeds", *SETS, *(f"{name}, MB" for name in SIZES)]
    header += [f"{split}, INT8 + trim" for split in SETS]
    columns = [column for column in zip(header, *rows, strict=True) if {*column[1:]} != {"–"}]
    return tabulate([*zip(*columns, strict=True)], "firstrow", tablefmt="github", disable_numparse=True)


def lines(records: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """Model → artifacts: size in MB, accuracy on sst-test (mean over seeds), precision. Only what was exported."""
    figures = {}
    for name, runs in by_model(records).items():
        points = []
        for precision, artifact in SIZES.items():
            bytes_, values = size(runs, artifact), accuracies(runs, artifact, "sst-test")
            if precision == "FP32":  # all seeds, exported or not: export changes no answer of it
                values = accuracies(runs, "torch", "sst-test")
            if bytes_ is not None and values:
                points.append((bytes_ / 1e6, mean(values), precision))
        if points:
            figures[name] = points
    return figures


def trimmed_lines(sources: list[str]) -> dict[str, list[tuple[float, float, str]]]:
    """As :func:`lines`, from files of four_bits.py: a model with a smaller vocabulary, down to four bits."""
    figures = {}
    for source in sources:
        documents = json.loads(Path(source).read_text(encoding="utf-8"))
        if isinstance(documents, dict):
            name = re.sub(r"-seed\d+$", "", documents["run"]) + f", {documents['tokens']:,} tokens"
            figures[name] = [
                (row["bytes"] / 1e6, row["accuracy"], TRIMMED_AS[row["artifact"]])
                for row in documents["rows"]
                if row["split"] == "sst-test"
            ]
    return figures


def figure(figures: dict[str, list[tuple[float, float, str]]], path: Path) -> None:
    """Accuracy on sst-test against the size of every artifact; a line joins what is one model in several precisions."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    displayed, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for number, (name, points) in enumerate(figures.items()):
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=f"C{number}", alpha=0.6, label=name)
        for x, y, precision in points:
            axes.plot(x, y, MARKERS[precision], color=f"C{number}")
    axes.set_xscale("log")
    axes.set_xticks([5, 10, 20, 50, 100])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size of the artifact, MB (logarithmic)")
    axes.set_ylabel("accuracy on sst-test (FP32: mean over seeds, else one seed)\n(axis does not start at 0)")
    displayed.legend(loc="outside right upper", fontsize=8)
    handles = [axes.plot([], [], marker, color="grey", label=name)[0] for name, marker in MARKERS.items()]
    displayed.legend(handles=handles, loc="outside right lower", fontsize=8)
    axes.grid(alpha=0.3)
    displayed.savefig(path, dpi=120)
    plt.close(displayed)


def main() -> None:
    """Command line."""
    match sys.argv[1:]:
        case ["table", *sources] if sources:
            print(table(read(sources)))
        case ["figure", target, *sources] if sources:
            figure({**lines(read(sources)), **trimmed_lines(sources)}, Path(target))
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
