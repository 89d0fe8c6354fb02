"""Hand-made reports for the tests of documents, and helpers that render them."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from edgeformer.artifacts import report as reports
from edgeformer.artifacts.device import EstimateError
from edgeformer.artifacts.report import Candidate, Check, Choice, Latency, Memory, Report, Row, SizeParts, Verdict
from edgeformer.report.context import ReportContext
from edgeformer.report.documents import as_html, as_markdown, print_report

MIB = 2**20
ERROR_ON_CPU = EstimateError(
    kind="cpu", device="Some CPU", cases=12, median_log2=0.2, worst_log2=0.5, created="2026-11-21"
)
CHECKED_ON_CPU = reports.EstimateEvidence(
    source="the calibrated profile", kind="cpu", processor="Some CPU", measured="2026-11-21", cases=12,
    median_error=0.15, worst_error=0.41, applies=False, why_not="it is of a CPU",
)  # fmt: skip


def measured(p50: float = 20.0, **other: Any) -> Latency:
    quantiles = tuple(p50 * (0.9 + 0.2 * index / 40) for index in range(41))
    facts = {"p90": p50 * 1.05, "mean": p50, "cv": 0.02, "n": 200, "stable": True, "quantiles_ms": quantiles, **other}
    return Latency(status="measured", p50=p50, **facts)


def estimated(low: float = 0.5, high: float = 2.0) -> Latency:
    middle = (low * high) ** 0.5
    return Latency(status="estimated", p50=middle, low=low, high=high, reason="roofline over 12 kernels")


def made_row(latency: Latency, where: str = "host", **other: Any) -> Row:
    """A steady row of the FP32 graph at 1 × 128."""
    memory = Memory(status="measured", peak=30 * MIB)
    if latency.status == "estimated":
        memory = Memory(status="estimated", peak=400 * MIB, low=300 * MIB, high=500 * MIB)
    facts: dict[str, Any] = {
        "artifact": "onnx-fp32", "precision": "fp32", "provider": "CPUExecutionProvider", "where": where,
        "phase": "steady", "batch": 1, "seq": 128, "latency_ms": latency, "memory_bytes": memory,
        "size_bytes": 20 * MIB, "energy_mj": reports.Energy(status="unavailable", reason="no energy counter"),
        "work": reports.Work(operations=4e8, bytes_moved=3e7, weight_bytes=2e7, operators=90, kernels=40),
    }  # fmt: skip
    return Row.model_validate({**facts, **other})


LATENCY = Check(
    name="latency", artifact="onnx-fp32", limit=5.0, value=1.0, unit="ms", status="pass", basis="estimated",
    low=0.5, high=2.0,
)  # fmt: skip
SIZE = Check(
    name="size", artifact="onnx-fp32", limit=100 * MIB, value=20 * MIB, unit="bytes", status="pass", basis="measured"
)
BANDWIDTH = {"value": 192e9, "source": "a data sheet", "verified": False}
PEAKS = {"fp32": {"value": 9e12, "source": "cores × clock × 2", "verified": False}}
PROFILE = {"name": "card", "title": "A card", "kind": "cuda", "bandwidth_bytes_per_s": BANDWIDTH, "peaks": PEAKS}


def made_search() -> Choice:
    """Two candidates; the slower one is too large."""
    common = {"provider": "CUDAExecutionProvider", "threads": None, "latency_status": "estimated", "exit": None}
    common |= {"precision": "fp32", "trimmed": False, "memory_bytes": 400 * MIB, "on_front": True}
    candidates = (
        Candidate(artifact="onnx-fp32", score=0.91, latency_ms=1.0, size_bytes=20 * MIB, feasible=True, **common),
        Candidate(
            artifact="onnx-fp32-big", score=0.92, latency_ms=3.0, size_bytes=200 * MIB, feasible=False,
            reason="size 200 MiB is above 100 MiB", **common,
        ),
    )  # fmt: skip
    return Choice(
        metric="accuracy", bound=0.9, minimize="latency", candidates=candidates, pick=0, reason="the only one that fits"
    )


def made_report(*rows: Row, **other: Any) -> Report:
    """A report for a GPU that this host does not have; default rows: measured, unavailable and estimated."""
    absent = Latency(status="unavailable", reason="the model refused 8 × 999")
    default_rows = (
        made_row(measured()),
        made_row(absent, batch=8, memory_bytes=Memory(status="unavailable", reason="it never ran")),
        made_row(estimated(), "device", provider="CUDAExecutionProvider"),
    )
    facts: dict[str, Any] = {
        "device": "rtx4050", "device_title": "NVIDIA GeForce RTX 4050 Laptop GPU", "on_target": False,
        "host": {"cpu": "Some CPU", "cores": 2, "system": "Linux", "threads": 2, "versions": {"onnxruntime": "1.31"}},
        "run": "mine-001", "bundle": "bundle", "created": "2026-11-21T00:00:00+00:00", "synthetic": False,
        "parameters": 1234, "rows": rows or default_rows, "verdict": Verdict(status="pass", checks=(SIZE, LATENCY)),
        "estimate_error": ERROR_ON_CPU, "estimate_evidence": (CHECKED_ON_CPU,), "estimated_for": "cuda",
        "profile": PROFILE,
        "sizes": (SizeParts(artifact="onnx-fp32", embeddings=12 * MIB, block=7 * MIB, heads=MIB // 2, other=MIB // 2),),
    }  # fmt: skip
    return Report.model_validate({**facts, **other})


ARTIFACT_NAMES = [
    f"onnx-{precision}-{part}" for precision in ("fp32", "fp16", "int8") for part in ("full", "exit10", "step")
]
ARTIFACT_NAMES += ["tensorrt-rtx-fp16", "tensorrt-rtx-fp16-exit1"]


def crowded_report() -> Report:
    """Eleven artifacts, measured on this host with much noise and estimated for the device."""
    rows = []
    for i, name in enumerate(ARTIFACT_NAMES):
        warnings = (f"the calls vary by {i}.5% (above 2.5% is noisy)", "drifted: 1 to 2 ms")
        rows.append(made_row(measured(stable=False, warnings=warnings), artifact=name, threads=2))
    device = {"provider": "CPUExecutionProvider", "threads": 4}
    rows += [made_row(estimated(10.5, 98.5), "device", artifact=name, **device) for name in ARTIFACT_NAMES]
    checks = [check.model_copy(update={"artifact": name}) for name in ARTIFACT_NAMES for check in (SIZE, LATENCY)]
    return made_report(*rows, verdict=Verdict(status="pass", checks=tuple(checks)))


def rendered(content: RenderableType | Callable[[Console], None], width: int = 160) -> str:
    """Text of a table, or of what a function prints, in a terminal of ``width`` columns."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    if callable(content):
        content(console)
    else:
        console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal_of(report: Report, width: int = 180, files: Sequence[Path] = ()) -> str:
    return rendered(lambda console: print_report(report, files, console), width)


def markdown_of(report: Report) -> str:
    return as_markdown(ReportContext(report))


def html_of(report: Report) -> str:
    return as_html(ReportContext(report))


def copy_run(run: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(run, folder)
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**document, **changes}), encoding="utf-8")
    return folder
