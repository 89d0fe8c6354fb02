"""A try, not a feature: how small does a classifier get with 4-bit weights and tables, and what does that cost?

The graph with a trimmed vocabulary is quantised by ONNX Runtime (MatMulNBits and GatherBlockQuantized, operators
of its own that other runtimes do not know) and scored on the run's test sets, beside the same graph in FP32 and in INT8
as export makes it, whose bar on the validation split is not asked here.

Usage:
    python benchmarks/four_bits.py RUN_FOLDER [--block 32] [--keep N] [--max N] [--json FILE]
    python benchmarks/four_bits.py --table FILE…        # what such files hold, as Markdown
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from tabulate import tabulate
from tokenizers import Tokenizer

from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.data.trimming import Keeping
from edgeformer.families.tracing import cut_out
from edgeformer.run import Run
from edgeformer.stages.exporting.bundle_folder import trim_subject
from edgeformer.stages.exporting.exportable import open_exportable
from edgeformer.stages.exporting.int8 import gemm_as_matmul, quantized_graphs
from edgeformer.tasks import Origin
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.running import score_batches


def quantized(model: onnx_ir.Model, block: int, path: Path) -> None:
    """Write the graph with weights and tables in blocks of 4 bits, each block with a scale and a zero point."""
    config = DefaultWeightOnlyQuantConfig(
        block_size=block,
        is_symmetric=False,
        accuracy_level=4,  # activations in INT8
        op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
        bits=4,
    )
    quantizer = MatMulNBitsQuantizer(onnx_ir.to_proto(model), algo_config=config)
    quantizer.process()
    onnx.save(quantizer.model.model, str(path))


def table(found: list[dict[str, Any]]) -> str:
    """A line per vocabulary, precision and block; accuracy on every set."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in found:
        for row in one["rows"]:
            block = str(one["block"]) if row["artifact"] == "int4" else "–"
            key = (one["run"], f"{one['tokens']:,}", row["artifact"].upper(), block, f"{row['bytes'] / 1e6:.2f}")
            lines.setdefault(key, {})[row["split"]] = f"{row['accuracy']:.4f}"
    sets = list(dict.fromkeys(split for scores in lines.values() for split in scores))
    header = ["run", "tokens", "weights and tables", "block", "MB", *sets]
    return tabulate([[*key, *(scores.get(split, "–") for split in sets)] for key, scores in lines.items()],
                    headers=header, tablefmt="github", disable_numparse=True)  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--keep", type=int, default=0, help="as export's --vocab-keep")
    parser.add_argument("--max", type=int, help="as export's --vocab-max")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in asked.table]))
        return
    if asked.run is None:
        parser.error("name a run's folder, or --table with files")
    logging.disable(logging.INFO)  # of the quantizer, about every node
    run = Run.open(asked.run)
    tokenizer = Tokenizer.from_file(str(asked.run / "model" / "tokenizer.json"))
    small = trim_subject(open_exportable(run), run.manifest, tokenizer, Keeping(asked.keep, asked.max))
    subject, task = small.subject, small.subject.task
    graphs = subject.network.trace(subject.model, tuple(subject.inputs), steps=False)
    graph = cut_out(graphs.exits, {exit_logits(subject.last): "logits"})
    found: dict[str, Any] = {"run": run.folder.name, "block": asked.block, "keep": asked.keep, "max": asked.max}
    found |= {"tokens": len(small.trimmed.kept), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.onnx") for name in ("fp32", "int8", "int4")}
        onnx_ir.save(graph, paths["fp32"])
        bytes_graphs = quantized_graphs(graphs, Path(folder))
        onnx_ir.save(cut_out(bytes_graphs.exits, {exit_logits(subject.last): "logits"}), paths["int8"])
        quantized(products(graph), asked.block, paths["int4"])
        for split in run.manifest.tests:
            rows: Any = task.read_set(
                run.recipe.data, small.reader, split, Origin(None, run.manifest.data.fingerprints)
            )
            for name, path in paths.items():
                meter, batches = task.meter(()), task.call_batches(rows, 32, len(small.trimmed.kept))
                with OnnxSession(path) as session:
                    arrays = (task.batch(rows, numbers, small.reader.pad) for numbers in batches)
                    score_batches(session.run, arrays, meter, warm_up=False, advance=lambda rows: None)
                score: Any = meter.score()
                row = {"artifact": name, "bytes": path.stat().st_size, "split": split, "accuracy": score.accuracy}
                found["rows"].append(row)
                print(f"{name}  {row['bytes']:,} bytes  {split}  accuracy {score.accuracy:.4f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def products(model: onnx_ir.Model) -> onnx_ir.Model:
    """A copy whose products are all MatMul, as the quantizer wants them."""
    copied = model.clone()
    gemm_as_matmul(copied)
    return copied


if __name__ == "__main__":
    main()
