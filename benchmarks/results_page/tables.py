"""Tables of docs/results/: what a script of benchmarks/ prints, or rows of a JSON whose script prints none."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

from benchmarks.frame import ROOT, markdown
from benchmarks.studies.results import kept_documents

FOLDER = ROOT / "benchmarks" / "results" / "cpu-2core"
MIB, GIB = 2**20, 2**30


@cache
def result(name: str) -> Any:
    """A committed JSON by its name without the ending."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def printed(command: str) -> str:
    """What ``python benchmarks/SCRIPT …`` prints, run in this process from the repository's root."""
    _, script, *arguments = shlex.split(command)
    paths = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in arguments]
    start, output = sys.argv, StringIO()
    sys.argv = [script, *paths]
    try:
        with redirect_stdout(output):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv = start
    return output.getvalue().rstrip()


def closed(name: str) -> str:
    """Return a table that a former script printed, as it was printed last."""
    return (FOLDER.parent / "closed" / f"{name}.md").read_text(encoding="utf-8").rstrip()


def spread(value: dict[str, float], unit: str = "×") -> str:
    """A ratio, or what else has a median, with its range where that was kept."""
    range_ = f" ({value['low']:.2f}–{value['high']:.2f})" if "low" in value else ""
    return f"{value['median']:.2f}{unit}{range_}"


def light_sizes() -> str:
    """FP32 file of the light recurrent encoder, by the code that exported it; the newest is of today's graphs."""
    bundle = result("2026-11-21-bundle-recurrent-sst2-fast")
    runs = {run["run"]: run for run in result("2026-11-21-sst2")}
    trained = runs["recurrent_sst2_fast-001"]
    table = json.loads((FOLDER.parent / "studies" / "table13.json").read_text(encoding="utf-8"))
    row = next(row for row in table["rows"] if (row["run"], row["at"]) == ("light", "fp32"))
    study = kept_documents()[row["keys"][0]]
    methods, today = (
        result("2026-11-21-int8-methods"),
        json.loads((FOLDER.parent / "graph_size.json").read_text("utf-8")),
    )
    sizes = [
        (bundle["created"], "bundle of `recurrent_sst2_fast`", _size(bundle["artifacts"], "onnx-fp32")),
        (methods["host"]["measured"], "[INT8 methods](int8.md)", methods["methods"]["fp32"]["bytes"]),
        (trained["started"], "[SST-2](sst2.md), FP16 against FP32", _size(trained["artifacts"], "onnx-fp32")),
        (
            study["finished"],
            "studies [table6](studies/table6.md) and [table13](studies/table13.md)",
            int(row["cells"]["size_bytes"]["mean"]),
        ),
        (today["measured"], "newest: `benchmarks/graph_size.py`", today["size_bytes"]["onnx-fp32"]),
    ]
    return markdown(
        ["measured", "result", "bytes"], [[day[:10], place, f"{size:,}"] for day, place, size in sorted(sizes)]
    )


def _size(artifacts: list[dict[str, Any]], name: str) -> int:
    return int(next(artifact["size_bytes"] for artifact in artifacts if artifact["id"] == name))


def drift() -> str:
    """Of crt_mini's artifacts, loop by loop."""
    artifacts = result("2026-11-21-bundle-crt-mini")["artifacts"]
    kept = {artifact["id"]: artifact["drift"]["loops"] for artifact in artifacts if artifact["drift"]}
    loops = max(map(len, kept.values()))
    rows = [[name, *(f"{loop['rms_error']:.1e}" for loop in figures)] for name, figures in kept.items()]
    return markdown(["artifact", *(f"loop {number + 1}" for number in range(loops))], rows)


def plan() -> str:
    """Predicted and measured peak memory of training."""

    def cells(row: dict[str, Any]) -> list[str]:
        sizes = (f"{row[key] / GIB:.3f}" for key in ("predicted_bytes", "measured_bytes"))
        return [row["size"], *sizes, f"{row['ratio']:.3f}"]

    header = ["recipe and changes", "predicted GiB", "measured GiB", "ratio"]
    return markdown(header, map(cells, result("2026-11-23-plan-accuracy")["rows"]))


def deployed() -> str:
    """Sizes and scores of the whole graph of three models, precision by precision."""
    rows = []
    for name, file, score, places in (
        ("`recurrent_sst2_fast`", "2026-11-21-bundle-recurrent-sst2-fast", "accuracy", 4),
        ("`crt_mini`", "2026-11-21-bundle-crt-mini", "perplexity", 2),
        ("`crt_deep_rtx4050` (untrained)", "2026-11-24-bundle-crt-deep-4-bits", "", 0),
    ):
        artifacts = {artifact["id"]: artifact for artifact in result(file)["artifacts"]}
        for key in ("onnx-fp32", "onnx-fp16", "onnx-int8", "onnx-int8-trim", "onnx-int4"):
            if artifact := artifacts.get(key):
                size = artifact["size_bytes"]
                value = f"{score} {artifact['validation'][score]:.{places}f}" if score else "–"
                share = f"{size / artifacts['onnx-fp32']['size_bytes']:.3f}"
                rows.append([name, f"`{key}`", f"{size:,}", share, value])
    return markdown(["model", "artifact", "bytes", "÷ FP32", "score"], rows)


TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in (light_sizes, drift, plan, deployed)}
