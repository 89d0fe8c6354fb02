"""Measured rows in the format of the published measurements that estimates are fitted to."""

import csv
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.report import Report
from edgeformer.bundle import Bundle
from edgeformer.runtimes import on_gpu, opener_of, provider_facts

COLUMNS = (
    "model", "architecture", "profile", "device", "runtime", "version", "input", "precision", "batch", "threads",
    "statistic", "value", "unit", "confidence", "date", "source", "note",
)  # fmt: skip
_STATISTICS = {
    "steady": "median latency",
    "prefill": "median latency of a prompt",
    "decode": "median latency per token",
}


def append_published(report: Report, bundle: Bundle, path: Path) -> int:
    """Add a row per measured and repeatable time to a CSV file, with a header if it is new, and return their number.

    They have no name of the run, no paths, and nothing that identifies its owner. Raises InputError: the file has other
    columns. OSError: it cannot be read or written.
    """
    header = ",".join(COLUMNS)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if text and text.splitlines()[0] != header:
        raise InputError(f"--publish {path}: its first line is not that of measurements; give a new file")
    manifest, versions = bundle.manifest, report.host.get("versions", {})
    loops = f", {manifest.loops} loops" if manifest.loops is not None else ""
    measured = [row for row in report.rows if row.where == "host" and row.phase != "cold"]
    rows: list[dict[str, Any]] = []
    for row in measured:
        if row.latency_ms.status != "measured" or not row.latency_ms.stable:
            continue
        artifact = bundle.artifact(row.artifact)
        opener = opener_of(artifact, row.provider)
        rows.append({
            "model": f"edgeformer {manifest.task}",
            "architecture": f"{manifest.parameters} parameters{loops}; {artifact.role} graph",
            "profile": report.device if report.on_target and report.device != "host" else "",
            "device": report.host.get("gpu" if on_gpu(row.provider) else "cpu"),
            "runtime": provider_facts(row.provider).label,
            "version": versions.get(next(iter(opener.distributions), ""), ""), "input": f"sequence {row.seq}",
            "precision": row.precision.upper(), "batch": row.batch, "threads": row.threads or "",
            "statistic": _STATISTICS[row.phase], "value": row.latency_ms.p50, "unit": "ms", "confidence": "high",
            "date": report.created[:10],
            "source": f"edgeformer {versions.get('edgeformer', manifest.code_version)}",
            "note": f"{row.latency_ms.n} calls",
        })  # fmt: skip
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not text:
            writer.writeheader()
        writer.writerows(rows)
    return len(rows)
