"""How small does a classifier get with 4-bit weights and tables, and what does that cost?

The graph with a trimmed vocabulary as ``export --int4`` makes it, in blocks of any size, scored on the run's test sets
beside the same graph in FP32 and in INT8; export's bars on the validation split are not asked here.

Usage:
    python benchmarks/four_bits.py RUN_FOLDER [--block 32] [--keep N] [--max N] [--json FILE]
    python benchmarks/four_bits.py --table FILE…        # what such files hold, as Markdown
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir
from tabulate import tabulate
from tokenizers import Tokenizer

from edgeformer.data.trimming import Keeping
from edgeformer.export.quantize import quantize_int4, quantized_graphs
from edgeformer.export.run_source import open_exportable, trim_subject
from edgeformer.models.tracing import extract_outputs
from edgeformer.run import Run
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks import Origin
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.scoring import score_batches


def table(results: list[dict[str, Any]]) -> str:
    """A line per vocabulary, precision and block; accuracy on every set."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for case_figures in results:
        for row in case_figures["rows"]:
            block = str(case_figures["block"]) if row["artifact"] == "int4" else "–"
            key = (
                case_figures["run"],
                f"{case_figures['tokens']:,}",
                row["artifact"].upper(),
                block,
                f"{row['bytes'] / 1e6:.2f}",
            )
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
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in arguments.table]))
        return
    if arguments.run is None:
        parser.error("name a run's folder, or --table with files")
    run = Run.open(arguments.run)
    tokenizer = Tokenizer.from_file(str(arguments.run / "model" / "tokenizer.json"))
    small = trim_subject(open_exportable(run), run.manifest, tokenizer, Keeping(arguments.keep, arguments.max))
    subject, task = small.subject, small.subject.task
    graphs = subject.adapter.trace(subject.model, tuple(subject.inputs), steps=False)
    graph = extract_outputs(graphs.exits, {exit_logits(subject.exits[-1]): "logits"})
    results: dict[str, Any] = {
        "run": run.folder.name,
        "block": arguments.block,
        "keep": arguments.keep,
        "max": arguments.max,
    }
    results |= {"tokens": len(small.trimmed.kept), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.onnx") for name in ("fp32", "int8", "int4")}
        onnx_ir.save(graph, paths["fp32"])
        bytes_graphs = quantized_graphs(graphs, "int8", Path(folder))
        onnx_ir.save(extract_outputs(bytes_graphs.exits, {exit_logits(subject.exits[-1]): "logits"}), paths["int8"])
        onnx_ir.save(quantize_int4(graph, arguments.block), paths["int4"])
        for split in run.manifest.tests:
            rows: Any = task.rows.read_set(run.recipe.data, small.reader, split, Origin(run.manifest.data.fingerprints))
            for name, path in paths.items():
                meter, batches = task.meter(()), task.rows.call_batches(rows, 32, len(small.trimmed.kept))
                with OnnxSession(path) as session:
                    arrays = (task.rows.batch(rows, numbers, small.reader.pad) for numbers in batches)
                    score_batches(session.run, arrays, meter, warm_up=False, advance=lambda rows: None)
                score: Any = meter.score()
                row = {"artifact": name, "bytes": path.stat().st_size, "split": split, "accuracy": score.accuracy}
                results["rows"].append(row)
                print(f"{name}  {row['bytes']:,} bytes  {split}  accuracy {score.accuracy:.4f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
