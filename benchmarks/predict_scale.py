"""`edgeformer predict --file` beside the bare session: throughput at the same batches, and peak memory by rows.

    python benchmarks/predict_scale.py ratio BUNDLE [--rows 4096] [--rounds 7] [--out FILE.json]
    python benchmarks/predict_scale.py memory BUNDLE [--rows 10000,100000,1000000] [--out FILE.json]
    python benchmarks/predict_scale.py table FILE.json --of ratio|memory

`ratio`: A B A B in one process, from a CSV file to a JSONL file against `session.run` alone on the very batches of it,
which were made before. `memory`: the command itself, a process per number of rows; its peak resident set, and whether
every row came out, in order. Both add to FILE.json what they found.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from tabulate import tabulate

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.row_files import JsonRows
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.unlabelled import Reading, unlabelled, windows
from edgeformer.inference.predict import open_predictor
from edgeformer.inference.predict_file import predict_file
from edgeformer.run import Location
from edgeformer.system.capability import installed_version
from edgeformer.system.host import cpu_name, usable_cores

LIBRARIES = ("onnxruntime", "tokenizers", "numpy")
MIB = 2**20


def write_texts(path: Path, rows: int, words: int | None = None) -> None:
    """A CSV of synthetic reviews, each with its number in front; every 1,000th row has no text.

    Args:
        words: of each review; None: all.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["number", "text"])
        for number, row in enumerate(islice(synthetic_reviews(rows, 1), rows)):
            text = str(row.text) if words is None else " ".join(str(row.text).split()[:words])
            writer.writerow([number, "" if number % 1000 == 999 else f"{number} {text}"])


def ratio(folder: Path, rows: int, rounds: int) -> dict[str, object]:
    """Rows per second of both, round by round."""
    location = Location(None, folder)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "texts.csv"
        write_texts(path, rows)
        with unlabelled(path, sys.stdin.buffer, Reading({})) as table, open_predictor(location) as model:
            read = [model.answering.read([row.text for row in rows]) for rows in windows(table.rows())]
            pad = model.answering.reader.pad
            batches = [collate(window.encoded, numbers, pad) for window in read for numbers in window.batches()]
            results: dict[str, list[tuple[float, float]]] = {"bare": [], "predict": []}
            for number in range(rounds + 1):
                started, used = time.perf_counter(), time.process_time()
                for inputs in batches:
                    model.run(inputs)
                between, used_between = time.perf_counter(), time.process_time()
                with (Path(work) / "answers.jsonl").open("wb") as out:
                    predict_file(model, table, JsonRows(out))
                if number:  # the first round warms up
                    results["bare"].append((between - started, used_between - used))
                    results["predict"].append((time.perf_counter() - between, time.process_time() - used_between))
    ratios = [a[0] / b[0] for a, b in zip(results["bare"], results["predict"], strict=True)]
    processor = [a[1] / b[1] for a, b in zip(results["bare"], results["predict"], strict=True)]
    tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
    return {
        **about(folder),
        "rows": rows,
        "calls": len(batches),
        "mean_tokens": tokens / rows,
        "bare_rows_per_s": statistics.median(rows / wall for wall, _ in results["bare"]),
        "predict_rows_per_s": statistics.median(rows / wall for wall, _ in results["predict"]),
        "predict_over_bare": spread(ratios),
        "predict_over_bare_by_processor_time": spread(processor),
    }


def memory(folder: Path, rows: int, words: int | None) -> dict[str, object]:
    """Peak resident set of the command on so many rows, and what came out; ``words`` of each text."""
    with tempfile.TemporaryDirectory() as work:
        path, out = Path(work) / "texts.csv", Path(work) / "answers.jsonl"
        write_texts(path, rows, words)
        command = [
            sys.executable,
            "-m",
            "edgeformer",
            "predict",
            str(folder),
            "--file",
            str(path),
            "--output",
            str(out),
        ]
        started = time.perf_counter()
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        errors = in_order = 0
        with out.open(encoding="utf-8") as answers:
            for number, line in enumerate(answers):
                answer = json.loads(line)
                errors += "error" in answer
                in_order += (
                    answer["text"].split(" ")[0] == str(number) if "error" not in answer else number % 1000 == 999
                )
    return {
        **about(folder),
        "rows": rows,
        "words": words,
        "answered_in_order": in_order,
        "without_answer": errors,
        "exit_code": os.waitstatus_to_exitcode(status),
        "peak_bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "rows_per_s": rows / seconds,
    }


def about(folder: Path) -> dict[str, object]:
    """The model."""
    bundle = Bundle.open(folder)
    return {"model": bundle.name, "parameters": bundle.manifest.parameters, "artifact": bundle.built()[0].id}


def spread(values: list[float]) -> dict[str, float | int]:
    """Median, least, most and number."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values)}


def host() -> dict[str, object]:
    """Where it was measured."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg(),
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in LIBRARIES}},
    }


def add(path: Path | None, kind: str, results: dict[str, object], remark: str | None) -> None:
    """Print, and add to a JSON file."""
    print(json.dumps(results, indent=2))
    if path is None:
        return
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document.setdefault(kind, []).append({**results, "host": host() | ({"remark": remark} if remark else {})})
    write_json(path, document)


def table(document: dict[str, Any], kind: str) -> str:
    """What was found of one kind, as Markdown."""
    options: dict[str, Any] = {"tablefmt": "pipe", "disable_numparse": True}
    if kind == "memory":
        rows = [
            [f"{m['parameters']:,}", f"{m['rows']:,}", f"{m['answered_in_order']:,}", f"{m['peak_bytes'] / MIB:.0f}",
             f"{m['rows_per_s']:,.0f}"]
            for m in document["memory"]
        ]  # fmt: skip
        return tabulate(rows, ["parameters", "rows", "answered, in order", "peak MiB", "rows/s"], **options)
    rows = [
        [f"{r['parameters']:,}", f"{r['rows']:,}", f"{r['bare_rows_per_s']:,.0f}", f"{r['predict_rows_per_s']:,.0f}",
         *(f"{r[key]['median']:.2f} ({r[key]['low']:.2f}–{r[key]['high']:.2f})"
           for key in ("predict_over_bare", "predict_over_bare_by_processor_time"))]
        for r in document["ratio"]
    ]  # fmt: skip
    heads = ["parameters", "rows", "bare rows/s", "predict rows/s", "predict ÷ bare", "the same by processor time"]
    return tabulate(rows, heads, **options)


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ratio", "memory", "table"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", type=int, help="memory: of each text; default: all")
    parser.add_argument("--of", choices=("ratio", "memory"), default="ratio")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--remark", help="what else ran on this machine")
    options = parser.parse_args()
    if options.what == "table":
        print(table(json.loads(options.path.read_text(encoding="utf-8")), options.of))
    elif options.what == "ratio":
        add(options.out, "ratio", ratio(options.path, int(options.rows or 4096), options.rounds), options.remark)
    else:
        for rows in (options.rows or "10000,100000,1000000").split(","):
            add(options.out, "memory", memory(options.path, int(rows), options.words), options.remark)


if __name__ == "__main__":
    main()
