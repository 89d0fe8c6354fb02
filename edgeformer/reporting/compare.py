"""Runs side by side, from their manifests, bundles and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from edgeformer.formats.caution import LEAKS
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.report import Report
from edgeformer.formats.workspace import read_manifest
from edgeformer.reporting.columns import DASH, Column, Columns
from edgeformer.run import Location, read_run
from edgeformer.tasks import task_named

Style = Literal["plain", "markdown", "csv"]
Record = dict[str, Any]
_IN_F1 = ("precision", "recall")
"""F1 says both, in one line."""


def run_record(location: Location) -> Record:
    """A run's figures; one that it does not have is None. Sizes in bytes, times in ms on their host."""
    record: Record = {"run": location.name}
    if location.run is not None:
        manifest = read_run(location.run)
        record["split"] = manifest.data.split + (" (SYNTHETIC)" if manifest.data.synthetic else "")
        record["parameters"] = manifest.parameters
        record |= {**_scores(manifest), "train_seconds": manifest.seconds}
    if location.bundle is not None:
        bundle = location.open_bundle().manifest
        record.setdefault("parameters", bundle.parameters)
        record |= {f"{a.id}_bytes": a.size_bytes for a in bundle.artifacts}
    return record | _latencies(location)


def _scores(manifest: RunManifest) -> Record:
    """Of the test set and its exits, then the metric on the others. A leak is said beside the figures it spoils."""
    task, test = task_named(manifest.task), manifest.test
    name = task.metric.name
    others = [column.key for column in task.columns if column.key not in (name, "n", "loss", *_IN_F1)]
    keys = (name, *others, "loss")
    exits: Record = {}
    if test is not None and test.by_exit:
        exits = {f"{name}_exit{loop}": getattr(test.by_exit[loop], name, None) for loop in list(test.by_exit)[:-1]}
        exits[f"{name}_early_exit"] = getattr(test.leaving_early, name, None)
        exits["early_exit_mean_loops"] = getattr(test.leaving_early, "mean_loops", None)
    return {
        **({"caution": LEAKS} if manifest.leaks else {}),
        **{key: getattr(test, key, None) for key in keys},
        **exits,
        **{f"{name}_{other}": task.metric.of(score) for other, score in list(manifest.tests.items())[1:]},
    }


class _Measured(NamedTuple):
    """What a run's scores are scores of."""

    task: str
    labels: str
    data: str


def score_note(locations: Sequence[Location]) -> str | None:
    """Why the scores of these runs do not rank them: other tasks, labels or test data; None: they are of the same.

    Args:
        locations: of the runs; bundles without their run have no scores.
    """
    runs = [(location.name, read_run(location.run)) for location in locations if location.run is not None]
    found = [(name, _measured(manifest)) for name, manifest in runs if manifest.tests]
    for field, called in zip(_Measured._fields, ("tasks", "labels", "test sets"), strict=True):
        values = [(name, getattr(measured, field)) for name, measured in found]
        if len({value for _, value in values}) > 1:
            shown = "; ".join(f"{name}: {value}" for name, value in values)
            return f"scores do not rank these runs, whose {called} differ: {shown}"
    return None


def _measured(manifest: RunManifest) -> _Measured:
    data, test = manifest.data, next(iter(manifest.tests))
    of, rows = data.fingerprints.get(test, data.fingerprint)[:8], data.rows.get(test, 0)
    labels = dict.fromkeys(label for by_label in data.label_rows.values() for label in by_label)
    return _Measured(manifest.task, ", ".join(labels), f"{test}, {rows:,} rows, sha256 {of}")


def _latencies(location: Location) -> Record:
    found: Record = {}
    exported = location.open_bundle().manifest.created if location.bundle is not None else ""
    # The newest report wins where several hold the same row; all were measured on a host, never estimated.
    # Not those with a dot in front, which a killed process left unfinished.
    for path in sorted(location.reports.glob("[!.]*.json"), key=lambda p: p.stat().st_mtime):
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


def format_comparison(rows: Sequence[Record], style: Style) -> str:
    """Figures down, runs across; CSV keeps one run per line for spreadsheets.

    Args:
        rows: of :func:`run_record`.
        style: how the table is written.
    """
    figures = list(dict.fromkeys(key for row in rows for key in row if key != "run"))
    figures.sort(key=lambda figure: figure != "caution")  # on top, whichever run brings it
    if style == "csv":
        return Columns.of_records(["run", *figures]).csv(rows).rstrip("\n")
    columns: Columns[str] = Columns([Column("figure", str, heading="", text=_label), *map(_of_run, rows)])
    return columns.markdown(figures) if style == "markdown" else columns.plain(figures)


def _of_run(row: Record) -> Column[str]:
    return Column("run", row.get, heading=str(row["run"]), text=lambda name: _shown(name, row.get(name)), number=True)


def _label(figure: str) -> str:
    return figure.replace("_bytes", " (MiB)").replace("_p50_ms", " p50 (ms)").replace("_", " ")


def _shown(figure: str, value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value / 2**20:.2f}" if figure.endswith("_bytes") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.0f}" if figure == "train_seconds" else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return str(value)
