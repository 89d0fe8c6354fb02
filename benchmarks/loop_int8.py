"""A shared layer sees other activations in every loop: does INT8 with a scale per loop beat a dynamic one?
And weights of 4 bits: how long may the blocks be that share a scale?

For each run of a looped language model: FP32; dynamic, as ``edgeformer export --int8`` writes it (a scale per call,
found while running); static with a scale for each product of the unrolled graph, which is one for every loop while the
weight is stored once; and static with one scale for all loops of a weight, whose range takes in all of theirs. Ranges
come from rows of the training text. Then weights and tables in 4 bits, as ``--int4`` writes them, in blocks of several
sizes. For every one: bytes, stored parameters, perplexity of each exit on validation text, drift per loop on the golden
inputs; and its time over FP32's, all in turns. Several runs are several seeds: the table has means and the range.

Usage:
    python -m benchmarks.loop_int8 RUN… [--tokens 20000] [--calibration 64] [--rounds 9] [--json FILE]
    python -m benchmarks.loop_int8 --table FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat
from tabulate import tabulate

from benchmarks.int8_methods import clean, latency, static
from edgeformer.artifacts.progress import SILENT
from edgeformer.export.audit import audit_sharing
from edgeformer.export.graphs import write_graph
from edgeformer.export.judging import Exportable, measure_drift
from edgeformer.export.quantize import prepare, quantize_int4, quantize_int8
from edgeformer.export.run_source import open_exportable
from edgeformer.models.tracing import state_name
from edgeformer.run import Run
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system.host import cpu_name, default_threads, now
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.scoring import score_batches
from edgeformer.tasks.tokens import TokenTask

_BATCH = 8
_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"
_METHODS = {"MinMax": CalibrationMethod.MinMax, "Percentile": CalibrationMethod.Percentile}
_BLOCKS = (32, 64, 128)
# Products give FP32: what follows them (norms, sums over loops) is computed in it, as in dynamic graphs.
_OPTIONS = {"OpTypesToExcludeOutputQuantization": ["MatMul"]}


class Rows(CalibrationDataReader):  # type: ignore[misc]
    """Batches of whole training rows of one length, drawn with a fixed seed.

    Args:
        train: the training text.
        count: of rows.
    """

    def __init__(self, task: Any, train: Any, pad: int, count: int) -> None:
        sizes = train.sizes(np.arange(len(train)))
        largest = np.flatnonzero(sizes == sizes.max())
        rows, chosen = train.loaded(np.random.default_rng(0).permutation(largest)[:count])
        pieces = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
        batches = [{"input_ids": task.rows.batch(rows, piece, pad)["input_ids"]} for piece in pieces]
        self._batches: Iterator[dict[str, Any]] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, None after the last one."""
        return next(self._batches, None)


def merged_over_loops(source: Path, target: Path) -> None:
    """One scale for all products with the same weight: from the least to the greatest that any of them takes."""
    graph = onnx.load(str(source))
    stored = {tensor.name: tensor for tensor in graph.graph.initializer}
    makers = {name: node for node in graph.graph.node for name in node.output}
    groups: dict[str, list[tuple[str, str]]] = {}
    for node in graph.graph.node:
        if node.op_type != "MatMul" or not all(name in makers for name in node.input):
            continue
        data, weight = (makers[name] for name in node.input)
        if data.op_type == weight.op_type == _DEQUANTIZE and weight.input[0] in stored:
            groups.setdefault(weight.input[0], []).append((data.input[1], data.input[2]))
    for pairs in groups.values():
        stored_pairs = [[float(numpy_helper.to_array(stored[name])) for name in pair] for pair in pairs]
        low = min(-zero * scale for scale, zero in stored_pairs)
        high = max((255 - zero) * scale for scale, zero in stored_pairs)
        scale = (high - low) / 255
        for scale_name, zero_name in pairs:
            values = np.array(scale, np.float32), np.array(np.clip(round(-low / scale), 0, 255), np.uint8)
            for name, value in zip((scale_name, zero_name), values, strict=True):
                stored[name].CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(graph, str(target))


@dataclass(frozen=True)
class Case:
    """A run that is looked at, opened as export opens it."""

    run: Run
    subject: Exportable
    prepared: Any

    def build(self, folder: Path, calibration: int) -> dict[str, Path]:
        """Name → graph with all exits and states."""
        subject = self.subject
        traced = subject.adapter.trace(subject.model, tuple(subject.inputs), steps=False).exits
        paths = {name: folder / f"{name}.onnx" for name in ("fp32", "dynamic")}
        write_graph(traced, paths["fp32"])
        write_graph(quantize_int8(traced, folder), paths["dynamic"])
        prepared = folder / "prepared.onnx"
        write_graph(prepare(traced), prepared)
        for name, method in _METHODS.items():
            per_loop, shared = (folder / f"{way}_{name}.onnx" for way in ("per_loop", "all_loops"))
            rows = Rows(subject.task, self.prepared.train, self.prepared.pad, calibration)
            static(prepared, per_loop, rows, QuantFormat.QDQ, method, **_OPTIONS)
            merged_over_loops(per_loop, shared)
            paths |= {f"per loop, {name}": per_loop, f"one for all loops, {name}": shared}
        for block in _BLOCKS:
            paths[f"INT4, blocks of {block}"] = four_bits = folder / f"int4_{block}.onnx"
            write_graph(quantize_int4(traced, block), four_bits)
        return {name: clean(path) for name, path in paths.items()}

    def quality(self, path: Path, tokens: int) -> dict[str, Any]:
        """Perplexity of every exit on validation text, drift of every loop on the golden inputs, sizes."""
        subject, task = self.subject, self.subject.task
        rows = self.prepared.validation
        used = min(len(rows), int(np.searchsorted(np.cumsum(rows.lengths), tokens)) + 1)
        with OnnxSession(path) as session:
            states = session.run(subject.inputs)
            drift = measure_drift({loop: states[state_name(loop)] for loop in subject.states}, subject.states, "int8")
            perplexity = {}
            for exit_ in subject.exits:
                meter = task.meter((exit_,), data=subject.recipe.data)
                batches = task.rows.call_batches(rows, _BATCH, self.run.manifest.vocabulary, first=used)
                arrays = (task.rows.batch(rows, numbers, self.prepared.pad) for numbers in batches)
                answers = partial(exit_answers, session, exit_logits(exit_))
                score_batches(answers, arrays, meter, warm_up=False, advance=lambda rows: None)
                results: Any = meter.score()
                perplexity[str(exit_)] = results.perplexity
        sharing = audit_sharing(onnx.load(str(path)), subject.parameters)
        return {
            "bytes": path.stat().st_size,
            "stored_parameters": sharing.stored_parameters,
            "perplexity": perplexity,
            "drift": {str(loop.loop): loop.rms_error for loop in drift.loops},
        }


def exit_answers(session: OnnxSession, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logits of an exit, by the name of the only output that is scored."""
    return {"logits": session.run({"input_ids": inputs["input_ids"]})[name]}


def opened(folder: Path, cache: Path) -> Case:
    """A finished run of a language model, with its training text. Raises EdgeformerError, SystemExit."""
    run = Run.open(folder)
    run.require_finished()
    subject = open_exportable(run)
    if not isinstance(subject.task, TokenTask) or len(subject.states) < 2:
        raise SystemExit(f"{folder} is no looped language model's run")
    data = run.settled.data
    # Exported graphs take no positions: a document that shares its row with others would read them.
    alone = run.settled.model_copy(update={"data": data.model_copy(update={"mode": "paragraphs"})})
    return Case(run, subject, subject.task.rows.prepare(alone, cache, SILENT))


def table(results: dict[str, Any]) -> str:
    """A line per way; means over the runs, with the least and the most."""
    lines = []
    for way in results["runs"][0]["ways"]:
        rows = [run["ways"][way] for run in results["runs"]]
        last = list(rows[0]["perplexity"])[-1]
        lines.append([
            way, f"{rows[0]['bytes'] / 1e6:.2f}", _spread([row["perplexity"][last] for row in rows], 2),
            *(_spread([row["drift"][loop] for row in rows], 4) for loop in rows[0]["drift"]),
            f"{statistics.median(row['over_fp32'] for row in rows):.2f}",
        ])  # fmt: skip
    loops = [f"drift {loop}" for loop in results["runs"][0]["ways"]["fp32"]["drift"]]
    header = ["weights", "MB", "perplexity", *loops, "time / FP32"]
    return tabulate(lines, headers=header, tablefmt="github", disable_numparse=True)


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=20_000, help="of validation text")
    parser.add_argument("--calibration", type=int, default=64, help="training rows for the ranges of activations")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text(encoding="utf-8"))))
        return
    if not arguments.runs:
        parser.error("name the folders of runs, or --table with a file")
    results: dict[str, Any] = {"host": cpu_name(), "threads": arguments.threads, "measured": now(), "runs": []}
    results |= {
        "onnxruntime": onnxruntime.__version__,
        "tokens": arguments.tokens,
        "calibration": arguments.calibration,
    }
    for folder in arguments.runs:
        with tempfile.TemporaryDirectory() as place:
            case = opened(folder, Path(place, "cache"))
            paths = case.build(Path(place), arguments.calibration)
            ways = {name: case.quality(path, arguments.tokens) for name, path in paths.items()}
            for name, times in latency(paths, (1, 64), arguments.rounds, arguments.threads, ("input_ids",)).items():
                ways[name] |= times
            results["runs"].append({"run": folder.name, "seed": case.run.recipe.seed, "ways": ways})
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
