"""One model in every installed runtime: memory of the opened artifact, and time of a call, all of them in turns.

``measure`` and ``score`` (accuracy on SST's test set, differences from torch) add runs to a file. A run is exported by
 edgeformer export RUN --int8 --litert --executorch --keep-going.

Weights do not change time or memory, so a run that --max-steps ended stands for a trained one in both. Every artifact
and runtime is a process that stays open; in every round each of them computes every shape, and ratios are those of one
round. FILE keeps the runs that were measured earlier; delete one from it to measure it again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import markdown, read_record, run_script, stamp
from benchmarks.ladder import edgeformer
from benchmarks.ways import Way, environment, serve
from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.measurement.resident import measure_resident
from edgeformer.runtimes import OpenOptions, provider_facts, provider_of, requested_providers

SHAPES = ((1, 16), (1, 128), (16, 128))
CALLS_S = 0.15
"""Seconds of calls of one process, shape and round."""
SET = "sst-test"
BASELINE = ("onnx-fp32", "CPUExecutionProvider")


def candidates_of(bundle: Bundle) -> list[tuple[str, str]]:
    """Return (artifact, provider) of all built full artifacts; the baseline is the first one."""
    artifacts = [artifact for artifact in bundle.built() if artifact.role == "full" and not artifact.trimmed]
    return [(artifact.id, provider) for artifact in artifacts for provider in requested_providers(artifact, "all")]


def measure(file: Path, runs: list[Path], rounds: int = 7, threads: list[int] | None = None) -> None:
    """Measure exported runs, and add them to the file."""
    for folder in runs:
        document = read_record(file, runs={})
        if folder.name not in document["runs"]:
            document["runs"][folder.name] = record_of(folder, rounds, threads or [1, 2])
            write_json(file, {**document, **stamp()})


def record_of(folder: Path, rounds: int, threads: list[int]) -> dict[str, Any]:
    """Return sizes, memory and times of one exported run."""
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
    return record


def score(file: Path, runs: list[Path]) -> None:
    """Add the scores of trained and exported runs to the file."""
    for folder in runs:
        document = read_record(file)
        document["runs"][folder.name]["scores"] = scores_of(folder)
        write_json(file, document)


def scores_of(folder: Path) -> dict[str, Any]:
    """Return the scores of one run's artifacts."""
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
    return scores


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


def table(file: Path, which: str, threads: int = 1) -> None:
    """Print a table: memory, latency (with so many threads) or scores."""
    document = read_record(file)
    tables: dict[str, Callable[[dict[str, Any]], Table]]
    tables = {"memory": memory_rows, "scores": score_rows, "latency": partial(latency_rows, threads=threads)}
    print(markdown(*tables[which](document)))


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


if __name__ == "__main__":
    run_script(measure, score, table, child)
