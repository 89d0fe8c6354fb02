"""One model in every installed runtime: memory of the opened artifact, and time of a call, all of them in turns.

    python -m benchmarks.runtimes measure FILE RUN…
    python -m benchmarks.runtimes score FILE RUN…     # accuracy on SST's test set, and differences from torch
    python -m benchmarks.runtimes table FILE memory|latency|scores

RUN: exported by edgeformer export RUN --int8 --litert --executorch --keep-going.

Weights do not change time or memory, so a run that --max-steps ended stands for a trained one in both. Every artifact
and runtime is a process that stays open; in every round each of them computes every shape, and ratios are those of one
round. FILE keeps the runs that were measured earlier; delete one from it to measure it again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.ladder import edgeformer
from benchmarks.ways import Way, environment, serve
from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.measurement.resident import measure_resident
from edgeformer.runtimes import OpenOptions, library_versions, provider_facts, provider_of, requested_providers
from edgeformer.system.host import code_version, describe_host, now

SHAPES = ((1, 16), (1, 128), (16, 128))
CALLS_S = 0.15
"""Seconds of calls of one process, shape and round."""
SET = "sst-test"
BASELINE = ("onnx-fp32", "CPUExecutionProvider")


def candidates_of(bundle: Bundle) -> list[tuple[str, str]]:
    """Return (artifact, provider) of all built full artifacts; the baseline is the first one."""
    artifacts = [artifact for artifact in bundle.built() if artifact.role == "full" and not artifact.trimmed]
    return [(artifact.id, provider) for artifact in artifacts for provider in requested_providers(artifact, "all")]


def measure(file: Path, folder: Path, rounds: int, threads: list[int]) -> None:
    """Measure one exported run, and add it to the file."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": {}}
    if folder.name in document["runs"]:
        return
    bundle = Bundle.open(folder / "bundle")
    record: dict[str, Any] = {"parameters": bundle.manifest.parameters, "artifacts": {}, "rejected": {}, "ms": {}}
    for artifact in bundle.artifacts:
        if artifact.status != "built":
            record["rejected"][artifact.id] = artifact.reason
    candidates = candidates_of(bundle)
    for name, provider in candidates:
        artifact = bundle.artifact(name)
        resident = measure_resident(bundle, [artifact], provider)[name]
        unique_bytes = None if artifact.sharing is None else artifact.sharing.unique_bytes
        record["artifacts"][f"{name} {provider}"] = {
            "label": provider_facts(provider).label, "precision": artifact.precision, "bytes": artifact.size_bytes,
            "unique_bytes": unique_bytes, "resident_bytes": None if resident.reason else resident.bytes,
            "mapped_bytes": resident.mapped_bytes, "reason": resident.reason,
        }  # fmt: skip
    for count in threads:
        with ExitStack() as stack:
            ways = {}
            for name, provider in candidates:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.runtimes",
                    "child",
                    str(folder),
                    name,
                    provider,
                    str(count),
                ]
                ways[f"{name} {provider}"] = Way(name, command, environment(count, torch_alone=False), stack)
            ms: dict[str, dict[str, list[float]]] = {}
            for _ in range(rounds):
                for shape in SHAPES:
                    for key, way in ways.items():
                        if not way.reason:
                            text = f"{shape[0]}×{shape[1]}"
                            ms.setdefault(key, {}).setdefault(text, []).append(way.ask(shape))
            record["ms"][str(count)] = ms
            record.setdefault("unavailable", {}).update({key: way.reason for key, way in ways.items() if way.reason})
    document["runs"][folder.name] = record
    document |= {"host": describe_host(), "versions": library_versions(), "code_version": code_version()}
    write_json(file, {**document, "measured": now()})


def score(file: Path, folder: Path) -> None:
    """Add the scores of one trained and exported run to the file."""
    document = json.loads(file.read_text(encoding="utf-8"))
    rows = edgeformer("evaluate", str(folder), "--artifact", "all", "--split", SET)["rows"]
    accuracies = {row["artifact"]: row for row in rows if row["exit"] is None}
    scores: dict[str, Any] = {}
    for artifact in Bundle.open(folder / "bundle").artifacts:
        if artifact.role == "full":
            row = accuracies.get(artifact.id, {})
            scores[artifact.id] = {
                "label": provider_facts(provider_of(artifact)).label, "precision": artifact.precision,
                "reason": artifact.reason, "error": artifact.parity and artifact.parity.max_abs_error,
                **{key: row.get(key) for key in ("n", "accuracy")},
            }  # fmt: skip
    document["runs"][folder.name]["scores"] = scores
    write_json(file, document)


def child(folder: Path, name: str, provider: str, threads: int) -> None:
    """Answer shapes with the median time of calls, in milliseconds."""

    def make() -> Any:
        bundle = Bundle.open(folder / "bundle")
        artifact = bundle.artifact(name)
        vocabulary = 1000
        session = bundle.session(artifact, OpenOptions(provider, threads, repeated_shapes=True, in_turns=True))

        def answer(shape: list[int]) -> float:
            ids = np.random.default_rng(0).integers(1, vocabulary, shape)
            inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            session.run(inputs)
            samples: list[float] = []
            while sum(samples) < CALLS_S or len(samples) < 3:
                start_s = time.perf_counter()
                session.run(inputs)
                samples.append(time.perf_counter() - start_s)
            return statistics.median(samples) * 1000

        return answer

    serve(name, make)


def table(document: dict[str, Any], which: str, threads: int) -> str:
    """Return a table in Markdown."""
    if which == "latency":
        headers, rows = latency_rows(document, threads)
    else:
        headers, rows = {"memory": memory_rows, "scores": score_rows}[which](document)
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


Table = tuple[list[str], list[list[str]]]
"""Headers and rows."""


def labels_of(run: str, artifact: str, facts: dict[str, Any]) -> list[str]:
    """Return the cells that name an artifact in a runtime."""
    label = "ONNX Runtime" if facts["label"] == "CPU" else facts["label"]
    quantizer = ""
    if facts["precision"] == "int8" and label.startswith("OpenVINO"):
        quantizer = ", by NNCF" if artifact.startswith("openvino") else ", ONNX Runtime's graph"
    return [run, label, facts["precision"].upper() + quantizer]


def memory_rows(document: dict[str, Any]) -> Table:
    """Return what the opened artifacts take."""
    rows = []
    for run, record in document["runs"].items():
        for key, facts in record["artifacts"].items():
            resident, unique = facts["resident_bytes"], facts["unique_bytes"]
            cells = [f"{value / 1e6:.1f}" if value else "–" for value in (facts["bytes"], unique, resident)]
            rows.append(
                [*labels_of(run, key, facts), *cells, f"{resident / unique:.2f}" if resident and unique else "–"]
            )
    headers = ["model", "runtime", "precision", "file, MB", "unique, MB", "in memory, MB", "in memory / unique"]
    return headers, rows


def latency_rows(document: dict[str, Any], threads: int) -> Table:
    """Return times, and their ratios to the FP32 graph in ONNX Runtime, round by round."""
    rows, shapes = [], [f"{batch}×{tokens}" for batch, tokens in SHAPES]
    for run, record in document["runs"].items():
        ms = record["ms"][str(threads)]
        for key, facts in record["artifacts"].items():
            cells = ["–"] * len(shapes)
            if key in ms:
                cells = [ratio_text(ms[key][shape], ms[" ".join(BASELINE)][shape]) for shape in shapes]
            rows.append([*labels_of(run, key, facts), *cells])
    return ["model", "runtime", "precision", *shapes], rows


def ratio_text(ms: list[float], baseline: list[float]) -> str:
    """Return the median time, and in parentheses median and quartiles of the ratio."""
    low, middle, high = np.quantile(np.divide(ms, baseline), (0.25, 0.5, 0.75))
    return f"{statistics.median(ms):.2f} ({middle:.2f}, {low:.2f}–{high:.2f})"


def score_rows(document: dict[str, Any]) -> Table:
    """Return accuracies, and their differences from the FP32 graph in ONNX Runtime in percentage points."""
    rows = []
    for run, record in document["runs"].items():
        scores = record.get("scores", {})
        for artifact, facts in scores.items():
            accuracy, error = facts["accuracy"], facts["error"]
            cells = [f"rejected: {facts['reason']}", "–"] if facts["reason"] else ["–", "–"]
            if accuracy is not None:
                cells = [f"{accuracy:.4f}", f"{100 * (accuracy - scores[BASELINE[0]]['accuracy']):+.2f}"]
            rows.append([*labels_of(run, artifact, facts), *cells, "–" if error is None else f"{error:.1e}"])
    return ["model", "runtime", "precision", "accuracy", "points over FP32", "largest error of a logit"], rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("runs", type=Path, nargs="+")
    measuring.add_argument("--rounds", type=int, default=7)
    measuring.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    showing.add_argument("which", choices=["memory", "latency", "scores"])
    showing.add_argument("--threads", type=int, default=1, help="of the table of latency")
    scoring = commands.add_parser("score")
    scoring.add_argument("file", type=Path)
    scoring.add_argument("runs", type=Path, nargs="+")
    answering = commands.add_parser("child")
    for name, kind in (("folder", Path), ("artifact", str), ("provider", str), ("threads", int)):
        answering.add_argument(name, type=kind)
    arguments = parser.parse_args()
    if arguments.command == "child":
        child(arguments.folder, arguments.artifact, arguments.provider, arguments.threads)
    elif arguments.command == "table":
        document = json.loads(arguments.file.read_text(encoding="utf-8"))
        print(table(document, arguments.which, arguments.threads))
    elif arguments.command == "score":
        for folder in arguments.runs:
            score(arguments.file, folder)
    else:
        for folder in arguments.runs:
            measure(arguments.file, folder, arguments.rounds, arguments.threads)
            print(f"{folder.name}: measured", file=sys.stderr)


if __name__ == "__main__":
    main()
