"""Runs side by side, from their manifests, bundles and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from edgeformer.backends import default_provider, provider_of
from edgeformer.formats.caution import LEAKS
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.report import Report, Row
from edgeformer.formats.workspace import read_manifest
from edgeformer.reporting.columns import DASH, Column, Columns
from edgeformer.run import Location, read_run
from edgeformer.tasks import task_named

Style = Literal["plain", "markdown", "csv"]
Record = dict[str, Any]
_IN_F1 = ("precision", "recall")
"""F1 says both, in one line."""


def run_records(locations: Sequence[Location]) -> list[Record]:
    """Figures of runs; one that a run does not have is None. Sizes in bytes, times in ms on their host.

    A time's name has the provider where that is not the usual one, and the threads where the runs' times are of several
    numbers of them: what has one name was measured in one way.

    Args:
        locations: of the runs, or of bundles without their run.
    """
    timed = [_timed(location) for location in locations]
    counts = {row.threads for one in timed for row in one.rows if row.threads is not None}
    return [
        _told(location) | one.record(threads=len(counts) > 1) for location, one in zip(locations, timed, strict=True)
    ]


def _told(location: Location) -> Record:
    """What the manifests of a run and its bundle say."""
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
    return record


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


@dataclass(frozen=True)
class _Timed:
    """What the reports of a run measured on one host.

    Attributes:
        host: that of the newest report.
        rows: the newest ones last, which win where several are of the same; measured, never estimated.
        usual: artifact → the provider that need not be named; another one is ONNX Runtime's of processors.
        left_out: reports of other hosts, in words.
    """

    host: Mapping[str, Any]
    rows: Sequence[Row]
    usual: Mapping[str, str]
    left_out: Sequence[str]

    def record(self, threads: bool) -> Record:
        """The figures; ``threads``: name their number in each."""
        found: Record = {"measured_on": self.host.get("cpu")} if self.host else {}
        if self.left_out:
            found["reports_left_out"] = "; ".join(self.left_out)
        for row in self.rows:
            usual = row.provider == (self.usual.get(row.artifact) or default_provider("cpu"))
            parts = [row.artifact, "decode" if row.phase == "decode" else "", f"{row.batch}x{row.seq}"]
            parts += ["" if usual else row.provider]
            parts += [f"{row.threads}threads" if threads and row.threads is not None else ""]
            parts += ["" if row.latency_ms.stable else "unstable"]
            found["_".join([*filter(None, parts), "p50_ms"])] = row.latency_ms.p50
        return found


def _timed(location: Location) -> _Timed:
    manifest = location.open_bundle().manifest if location.bundle is not None else None
    reports: list[tuple[str, Report]] = []
    # Not those with a dot in front, which a killed process left unfinished.
    for path in sorted(location.reports.glob("[!.]*.json")):
        try:
            report = read_manifest(Report, path)
        except ArtifactError:
            continue
        if manifest is None or report.created >= manifest.created:  # else of an earlier bundle
            reports.append((path.name, report))
    reports.sort(key=lambda named: named[1].created)
    host = reports[-1][1].host if reports else {}
    there = [report for _, report in reports if _machine(report.host) == _machine(host)]
    rows = [row for report in there for row in report.rows if row.where == "host" and row.phase != "cold"]
    return _Timed(
        host=host,
        rows=[row for row in rows if row.latency_ms.status == "measured"],
        usual={one.id: provider_of(one, kind="cpu") for one in manifest.artifacts} if manifest is not None else {},
        left_out=[
            f"{name}, of {_machine(report.host)}" for name, report in reports if _machine(report.host) != _machine(host)
        ],
    )


def _machine(host: Mapping[str, Any]) -> str:
    """A host in words, by which two reports' are told apart."""
    return f"{host.get('cpu')} with {host.get('cores')} cores ({host.get('system')})"


def format_comparison(rows: Sequence[Record], style: Style) -> str:
    """Figures down, runs across; CSV keeps one run per line for spreadsheets.

    Args:
        rows: of :func:`run_records`.
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
