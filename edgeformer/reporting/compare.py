"""Runs side by side, from their manifests, bundles and reports."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Literal

from tabulate import tabulate

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.report import Report
from edgeformer.formats.scores import Score
from edgeformer.formats.workspace import read_manifest
from edgeformer.reporting.caution import LEAKS
from edgeformer.run import Location, read_run
from edgeformer.tasks.classification.scoring import ClassificationScore
from edgeformer.tasks.language_modeling.scoring import LanguageScore


def compare_runs(locations: Sequence[Location]) -> list[dict[str, Any]]:
    """One record per run; a figure that a run does not have is None. Sizes in bytes, times in ms on their host."""
    return [_record(location) for location in locations]


def _record(location: Location) -> dict[str, Any]:
    record: dict[str, Any] = {"run": location.name}
    if location.run is not None:
        manifest = read_run(location.run)
        record |= {
            "split": manifest.data.split + (" (SYNTHETIC)" if manifest.data.synthetic else ""),
            "parameters": manifest.parameters,
            **_scores(manifest),
            "train_seconds": manifest.seconds,
        }
    if location.bundle is not None:
        bundle = location.open_bundle().manifest
        record.setdefault("parameters", bundle.parameters)
        record |= {f"{a.id}_bytes": a.size_bytes for a in bundle.artifacts}
    return record | _latencies(location)


def _scores(manifest: RunManifest) -> dict[str, Any]:
    """Of the test set, then the main figure of the others. A leak is said beside the figures that it spoils."""
    others = list(manifest.tests.items())[1:]
    if manifest.task == "language-modeling":
        leaks = {"caution": LEAKS} if manifest.leaks else {}
        return {**leaks, **_language_scores(manifest.test), **{f"perplexity_{k}": _main(s) for k, s in others}}
    test = manifest.test if isinstance(manifest.test, ClassificationScore) else None
    return {
        "accuracy": test.accuracy if test else None,
        "f1": test.f1 if test else None,
        "loss": test.loss if test else None,
        **{f"accuracy_{name}": _main(score) for name, score in others},
    }


def _main(score: Score) -> float:
    found: float = getattr(score, "accuracy", 0.0) or getattr(score, "perplexity", 0.0)
    return found


def _language_scores(test: Score | None) -> dict[str, Any]:
    if not isinstance(test, LanguageScore):
        return {"perplexity": None, "word_perplexity": None, "loss": None}
    last = str(max(map(int, test.exits)))
    early = test.early_exit
    return {
        "perplexity": test.perplexity,
        "word_perplexity": test.word_perplexity,
        "loss": test.loss,
        **{f"perplexity_exit{loop}": e.perplexity for loop, e in test.exits.items() if loop != last},
        "perplexity_early_exit": early.perplexity if early else None,
        "early_exit_mean_loops": early.mean_loops if early else None,
    }


def _latencies(location: Location) -> dict[str, Any]:
    folder = location.run or location.bundle
    assert folder is not None
    found: dict[str, Any] = {}
    exported = location.open_bundle().manifest.created if location.bundle is not None else ""
    # The newest report wins where several hold the same row; all were measured on a host, never estimated.
    for path in sorted((folder / "reports").glob("*.json"), key=lambda p: p.stat().st_mtime):
        try:
            report = read_manifest(Report, path)
        except ArtifactError:
            continue
        if report.created < exported:
            continue  # of an earlier bundle
        found["measured_on"] = report.host.get("cpu")
        sweep = len({row.threads for row in report.rows if row.threads is not None}) > 1
        for row in report.rows:
            if row.where == "host" and row.phase != "cold" and row.latency_ms.status == "measured":
                unstable = "" if row.latency_ms.stable else "_unstable"
                decode = "_decode" if row.phase == "decode" else ""
                threads = f"_{row.threads}threads" if sweep and row.threads is not None else ""
                found[f"{row.artifact}{decode}_{row.batch}x{row.seq}{threads}{unstable}_p50_ms"] = row.latency_ms.p50
    return found


def format_comparison(rows: Sequence[dict[str, Any]], style: Literal["plain", "markdown", "csv", "json"]) -> str:
    """Figures down, runs across; CSV keeps one run per line for spreadsheets."""
    figures = list(dict.fromkeys(key for row in rows for key in row if key != "run"))
    figures.sort(key=lambda figure: figure != "caution")  # on top, whichever run brings it
    if style == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["run", *figures])
        writer.writerows([row["run"], *(row.get(figure) for figure in figures)] for row in rows)
        return text.getvalue().rstrip("\n")
    table = [[_label(figure), *(_shown(figure, row.get(figure)) for row in rows)] for figure in figures]
    headers = ["", *(str(row["run"]) for row in rows)]
    layout = "github" if style == "markdown" else "simple"
    align = ("left", *("right" for _ in rows))
    return tabulate(table, headers, tablefmt=layout, disable_numparse=True, colalign=align)


def _label(figure: str) -> str:
    return figure.replace("_bytes", " (MiB)").replace("_p50_ms", " p50 (ms)").replace("_", " ")


def _shown(figure: str, value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value / 2**20:.2f}" if figure.endswith("_bytes") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.0f}" if figure == "train_seconds" else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return str(value)
