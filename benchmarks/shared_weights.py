"""Ways to keep weights that a graph shares once in ONNX Runtime's memory too: what each takes in memory and time.

    python -m benchmarks.shared_weights FILE [--rounds 7]
    python -m benchmarks.shared_weights FILE --table

A 3 × 2 encoder (width 384, FFN 1,536, 1,000 tokens) with random weights, in FP32 with one thread, beside one of six
layers. Every way is a process that stays open; all take turns in every round, and ratios are those of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from tabulate import tabulate

from benchmarks.ways import ROOT, Way, environment, serve
from edgeformer.artifacts.files import write_json
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.memory import release_heap

WIDTH, WORDS = 384, 1000
SHAPES = ((1, 16), (1, 128), (16, 128))
CALLS_S = 0.15
WAYS = {
    "shared": "shared weights",
    "trimmed": "shared, and freed memory returned to the system after opening (`malloc_trim`)",
    "stacked": "six layers with weights of their own",
    "unpacked": "shared, without prepacking (`session.disable_prepacking`)",
    "steps": "shared, the block as a graph that the host calls twice",
    "loop": "shared, the block in an ONNX Loop",
    "saved": "shared, prepacked weights saved and mapped (`session.save_external_prepacked_constant_initializers`)",
}


def write_graphs(folder: Path) -> None:
    """Write the graphs of all ways."""
    import onnx_ir
    import onnxruntime
    import torch

    from edgeformer.models import load_recipe, model_spec_of
    from edgeformer.models.tracing import extract_outputs

    for name, layers, iterations in (("shared", 3, 2), ("stacked", 6, 1)):
        sizes = {"hidden_size": WIDTH, "ffn_size": 1536, "heads": 6, "vocab_size": WORDS}
        sizes |= {"layers": layers, "iterations": iterations}
        recipe = load_recipe(
            str(ROOT / "recipes/recurrent_sst2_fast.yaml"), [f"model.{key}={value}" for key, value in sizes.items()]
        )
        torch.manual_seed(0)
        adapter = model_spec_of(recipe).adapter
        graphs = adapter.trace(adapter.build(recipe).eval(), ("input_ids", "attention_mask"), steps=True)
        last = f"logits_exit{iterations}"
        onnx_ir.save(extract_outputs(graphs.exits, {last: "logits"}), folder / f"{name}.onnx")
        if name == "shared":
            for part, graph in graphs.steps.items():
                onnx_ir.save(graph, folder / f"{part}.onnx")
    write_loop(folder)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this processor
    options.optimized_model_filepath = str(folder / "saved.onnx")
    for key, value in {
        "optimized_model_external_initializers_file_name": "saved.bin",
        "optimized_model_external_initializers_min_size_in_bytes": "1024",
        "save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(f"session.{key}", value)
    onnxruntime.InferenceSession(str(folder / "shared.onnx"), options, providers=["CPUExecutionProvider"])


def write_loop(folder: Path) -> None:
    """Write a graph whose Loop holds the block once."""
    import onnx
    from onnx import TensorProto, compose, helper, numpy_helper

    def part(name: str, old: str, new: str) -> Any:
        model = onnx.load(str(folder / f"{name}.onnx"))
        renamed = compose.add_prefix(model, f"{name}_", rename_inputs=False, rename_outputs=False)
        for node in renamed.graph.node:
            node.input[:] = [new if value == old else value for value in node.input]
        return renamed

    embed, block, readout = part("embed", "", ""), part("loop", "state", "carried"), part("readout", "state", "final")
    state = [TensorProto.FLOAT, ["batch", "sequence", WIDTH]]
    body = helper.make_graph(
        [*block.graph.node, helper.make_node("Identity", ["go"], ["go_on"])], "body",
        [helper.make_tensor_value_info("iteration", TensorProto.INT64, []),
         helper.make_tensor_value_info("go", TensorProto.BOOL, []), helper.make_tensor_value_info("carried", *state)],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("next_state", *state)],
        list(block.graph.initializer),
    )  # fmt: skip
    loop = helper.make_node("Loop", ["iterations", "true", "state"], ["final"], body=body)
    constants = [numpy_helper.from_array(np.array(value), name) for name, value in (("iterations", 2), ("true", True))]
    whole = onnx.load(str(folder / "shared.onnx")).graph
    stored = [*embed.graph.initializer, *readout.graph.initializer, *constants]
    nodes = [*embed.graph.node, loop, *readout.graph.node]
    graph = helper.make_graph(nodes, "loop", list(whole.input), list(readout.graph.output), stored)
    model = helper.make_model(graph, opset_imports=list(block.opset_import), ir_version=10)
    onnx.save(model, str(folder / "whole_loop.onnx"))


def child(name: str, folder: Path) -> None:
    """Answer ``memory`` with bytes, and a shape with the median time of calls in milliseconds."""
    import onnxruntime

    def memory() -> tuple[int, int]:
        maps = psutil.Process().memory_maps(grouped=False)
        mapped = sum(area.rss - area.anonymous for area in maps if area.path.startswith(str(folder)))
        return sum(area.anonymous for area in maps), mapped

    def inputs(shape: Any) -> dict[str, Any]:
        ids = np.random.default_rng(0).integers(1, WORDS, shape)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def make() -> Callable[[Any], Any]:
        before = memory()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if name == "unpacked":
            options.add_session_config_entry("session.disable_prepacking", "1")
        file = {"unpacked": "shared", "trimmed": "shared", "loop": "whole_loop"}.get(name, name)
        files = ["embed", "loop", "readout"] if name == "steps" else [file]
        sessions = [
            onnxruntime.InferenceSession(str(folder / f"{file}.onnx"), options, providers=["CPUExecutionProvider"])
            for file in files
        ]
        if name == "trimmed":
            release_heap()

        def run(feed: dict[str, Any]) -> Any:
            if name != "steps":
                return sessions[0].run(None, feed)[0]
            (state,) = sessions[0].run(None, {"input_ids": feed["input_ids"]})
            for _ in range(2):
                (state,) = sessions[1].run(None, {"state": state, "attention_mask": feed["attention_mask"]})
            return sessions[2].run(None, {"state": state})[0]

        logits = run(inputs((1, 16))).ravel().tolist()
        after = memory()

        def answer(request: Any) -> Any:
            if request == "memory":
                return {"anonymous": after[0] - before[0], "mapped": after[1] - before[1], "logits": logits}
            feed, samples = inputs(request), list[float]()
            run(feed)
            while sum(samples) < CALLS_S or len(samples) < 3:
                start_s = time.perf_counter()
                run(feed)
                samples.append(time.perf_counter() - start_s)
            return statistics.median(samples) * 1000

        return answer

    serve(name, make)


def measure(file: Path, rounds: int) -> None:
    """Measure all ways."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_graphs(folder)
        command = [sys.executable, "-m", "benchmarks.shared_weights", str(file), "--folder", name, "--child"]
        ways = {way: Way(way, [*command, way], environment(1, torch_alone=False), stack) for way in WAYS}
        record: dict[str, Any] = {way: {"ms": {}, **ways[way].ask("memory")} for way in WAYS}
        record["saved"]["bytes"] = (folder / "saved.bin").stat().st_size
        for _ in range(rounds):
            for shape in SHAPES:
                for way, process in ways.items():
                    record[way]["ms"].setdefault(f"{shape[0]}×{shape[1]}", []).append(process.ask(shape))
        for way in WAYS:
            if way != "stacked" and not np.allclose(record[way]["logits"], record["shared"]["logits"], atol=1e-4):
                raise SystemExit(f"{way}: other answers than the shared graph's")
        unique_bytes = (folder / "shared.onnx").stat().st_size
    document = {"ways": record, "unique_bytes": unique_bytes, "host": describe_host(), "code_version": code_version()}
    write_json(file, {**document, "threads": 1, "measured": now()})


def table(document: dict[str, Any]) -> str:
    """Return the ways in Markdown: memory, and time over that of the shared graph."""
    rows = []
    for way, words in WAYS.items():
        record = document["ways"][way]
        total = record["anonymous"] + record["mapped"]
        cells = [
            words,
            f"{total / 1e6:.1f}",
            f"{record['mapped'] / 1e6:.1f}",
            f"{total / document['unique_bytes']:.2f}",
        ]
        for shape, ms in record["ms"].items():
            low, middle, high = np.quantile(np.divide(ms, document["ways"]["shared"]["ms"][shape]), (0.25, 0.5, 0.75))
            cells.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
        rows.append(cells)
    headers = ["way", "in memory, MB", "of these mapped, MB", "in memory / stored once"]
    return tabulate(
        rows, [*headers, *(f"time {batch}×{seq}" for batch, seq in SHAPES)], "github", disable_numparse=True
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", action="store_true", help="print the file as a table")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.folder)
    elif arguments.table:
        print(table(json.loads(arguments.file.read_text(encoding="utf-8"))))
    else:
        measure(arguments.file, arguments.rounds)


if __name__ == "__main__":
    main()
