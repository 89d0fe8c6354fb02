"""Score classifiers computed in FP16, beside FP32, in torch: on a CUDA card if there is one, else on the CPU.

    python -m benchmarks.half_precision measure FILE NAME=RUN… [--split random-split]
    python -m benchmarks.half_precision table FILE

All weights, and the inputs and results of all operations but norms, are FP16; norms compute in FP32. How a product sums
within is torch's choice. It is not the exported FP16 graph, which ONNX Runtime computes in FP32 on a CPU. FILE is one
JSON; a name and set that it has already is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import SILENT
from edgeformer.inference.evaluate import EvaluateOptions, Evaluator
from edgeformer.inference.predict import select_candidates
from edgeformer.models.weights import load_model
from edgeformer.run import TORCH, Location, read_run
from edgeformer.runtimes.torch import RUNTIME
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.tasks.classification import score

Records = dict[str, dict[str, Any]]
"""Name of a run → set → record."""


def score_run(folder: Path, split: str) -> dict[str, Any]:
    """Return the scores of a run on one of its sets in both formats, and how far they differ."""
    (candidate,) = select_candidates(Location(folder, None), TORCH)
    rows = Evaluator(EvaluateOptions(TORCH, split), SILENT).labelled_rows(candidate)
    reader, task = candidate.reader(), candidate.owner.task
    data: Any = candidate.owner.data
    logits = {name: np.empty((len(rows), len(data.labels))) for name in ("fp32", "fp16")}
    device = RUNTIME.device(None)
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        session = TorchSession(load_model(folder).to(device, dtype))
        for numbers in task.call_batches(rows, EvaluateOptions.batch, reader.vocabulary):
            logits[name][numbers] = session.run(task.batch(rows, numbers, reader.pad))["logits"]
    differing = int((logits["fp32"].argmax(axis=1) != logits["fp16"].argmax(axis=1)).sum())
    largest = float(np.abs(logits["fp32"] - logits["fp16"]).max())
    scores = {name: score(values, rows.labels).model_dump() for name, values in logits.items()}
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    facts = {"host": describe_host(), "gpu": gpu, "code_version": code_version(), "measured": now()}
    compared = {"differing": differing, "largest_logit_difference": largest}
    return {"recipe": read_run(folder).recipe, **scores, **compared, **facts}


def table(runs: Records) -> str:
    """Return the scores in Markdown."""
    rows = [
        [
            run, split, f"{record['fp32']['accuracy']:.4f}", f"{record['fp16']['accuracy']:.4f}",
            f"{record['differing']:,} of {record['fp32']['n']:,}", f"{record['largest_logit_difference']:.4f}",
            record["gpu"] or record["host"]["cpu"],
        ]
        for run, records in runs.items()
        for split, record in records.items()
    ]  # fmt: skip
    names = [
        "model",
        "set",
        "accuracy in FP32",
        "in FP16",
        "other answers",
        "largest difference of a logit",
        "computed by",
    ]
    return tabulate(rows, names, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Add runs to the file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, showing = commands.add_parser("measure"), commands.add_parser("table")
    for command in (measuring, showing):
        command.add_argument("file", type=Path)
    measuring.add_argument("runs", nargs="+", metavar="NAME=RUN")
    measuring.add_argument("--split", default="random-split")
    arguments = parser.parse_args()
    file: Path = arguments.file
    runs: Records = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else {}
    if arguments.command == "table":
        print(table(runs))
        return
    for name, _, folder in (run.rpartition("=") for run in arguments.runs):
        runs.setdefault(name, {})[arguments.split] = score_run(Path(folder), arguments.split)
        write_json(file, {"runs": runs})
        print(table({name: runs[name]}))


if __name__ == "__main__":
    main()
