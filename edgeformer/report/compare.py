"""Two profile reports side by side: the rows that both have, their ratio, and whether it is more than noise."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from edgeformer.artifacts.data_warnings import LEAKS
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import RunManifest
from edgeformer.artifacts.report import Latency, Report, Row, read_report
from edgeformer.artifacts.units import markdown
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.report.columns import DASH, Column, Columns
from edgeformer.report.context import latency_text as latency_words
from edgeformer.report.context import thread_text as thread_words
from edgeformer.run import Location, read_run
from edgeformer.runtimes import default_provider, provider_facts, provider_of
from edgeformer.tasks import task_named

RUN_TO_RUN = 0.10
"""Two runs of the same measurement may differ by this much: what a row that is called stable promises."""

_IN_BROWSERS = "onnxruntime-web"

_OF_A_MEDIAN = 1.96 * math.sqrt(math.pi / 2)
"""Half the 95 % interval of a median, in standard deviations over √n."""


def report_of(location: Location, device: str) -> Report:
    """The report of a run for a device.

    Args:
        location: the run, or a bundle without one.
        device: the profile's name.

    Raises:
        ArtifactError: there is none.
    """
    path = location.reports / f"{device}.json"
    if not path.is_file():
        made = f"make it: edgeformer profile {location.argument} --device {device}"
        others = sorted(other.name for other in location.reports.glob(f"{glob.escape(device)}-*.json"))
        if others:
            made += f"; or compare files: those there answer other questions ({', '.join(others)})"
        raise ArtifactError(f"{path.parents[1]}: has no report for {device}; {made}")
    return read_report(path)


def compare_reports(first: Report, second: Report) -> Record:
    """Every row of both, matched by artifact, where, phase, batch and sequence length.

    Where a report has several rows of one shape (a sweep over threads or runtimes), these tell rows apart too.

    Args:
        first: report A.
        second: report B, of which it is said whether it is slower or faster.

    Returns:
        ``a`` and ``b`` (what each report is), ``notes``, and ``rows``: the shape, ``a_ms`` and ``b_ms`` (p50), their
        ``ratio`` b/a, ``noise`` (smallest relative difference that says something), ``mark`` and ``status`` of both.
    """
    names = ["artifact", "where", "phase", "batch", "seq"]
    if any(len({_key(row, names) for row in report.rows}) < len(report.rows) for report in (first, second)):
        names += ["provider", "threads"]
    ours, theirs = ({_key(row, names): row for row in report.rows} for report in (first, second))
    return {
        "a": _about(first),
        "b": _about(second),
        "rows": [dict(key) | _pair(ours.get(key), theirs.get(key)) for key in {**ours, **theirs}],
        "notes": _notes(first, second),
    }


def _about(report: Report) -> Record:
    # Of the machine, not of the device that it was judged for: one machine has one name in both reports.
    parts = [report.host.get(part) for part in ("cpu", "gpu")]
    host = " with ".join(str(part) for part in parts if part) or report.device_title
    return {"run": report.run, "device": report.device, "measured_on": host, "created": report.created}


def _key(row: Row, names: Sequence[str]) -> tuple[tuple[str, object], ...]:
    return tuple((name, getattr(row, name)) for name in names)


def _pair(a: Row | None, b: Row | None) -> Record:
    sides = {"a": a.latency_ms if a else None, "b": b.latency_ms if b else None}
    ratio, noise, mark = _ratio(sides["a"], sides["b"])
    return {
        **{f"{side}_status": latency.status if latency else None for side, latency in sides.items()},
        **{f"{side}_ms": latency.p50 if latency else None for side, latency in sides.items()},
        "ratio": ratio,
        "noise": noise,
        "mark": mark,
        **{f"{side}_shown": latency_words(latency) if latency else DASH for side, latency in sides.items()},
    }


def _ratio(a: Latency | None, b: Latency | None) -> tuple[float | None, float | None, str]:
    """Ratio b/a, the noise that it is held against, and a word: faster, slower, noise, or why neither."""
    if a is None or b is None:
        return None, None, "only in one report"
    if not a.p50 or not b.p50:
        return None, None, "a time is not known"
    ratio = b.p50 / a.p50
    if a.status != b.status:
        return ratio, None, "an estimate beside a measurement"
    if a.status == "estimated":
        return ratio, None, _estimates(a, b, ratio)
    sampling = _OF_A_MEDIAN * math.hypot(*((latency.cv or 0.0) / math.sqrt(max(1, latency.n)) for latency in (a, b)))
    noise = max(RUN_TO_RUN, sampling)
    if a.n <= 1 or b.n <= 1:
        return ratio, None, "one call each: no spread is known"
    if a.stable is False or b.stable is False:
        return ratio, noise, "not stable"
    # Of the larger over the smaller, so that it does not matter which report comes first.
    if max(ratio, 1 / ratio) - 1 < noise:
        return ratio, noise, "within the noise"
    return ratio, noise, "slower" if ratio > 1 else "faster"


def _estimates(a: Latency, b: Latency, ratio: float) -> str:
    if None in (a.low, a.high, b.low, b.high):
        return "estimates without a range"
    apart = (a.high or 0) < (b.low or 0) or (b.high or 0) < (a.low or 0)
    return f"estimated {'slower' if ratio > 1 else 'faster'}" if apart else "within the estimates' ranges"


def _notes(first: Report, second: Report) -> list[str]:
    sides = [
        {
            "measured on different machines": report.host.get("cpu"),
            "judged for different devices": report.device,
            "measured with different threads": report.host.get("threads"),
            "measured with different versions of ONNX Runtime": _runtime_version(report),
            "computed by different providers": _providers(report),
        }
        for report in (first, second)
    ]
    return [f"{what}: {a} and {b}" for (what, a), b in zip(sides[0].items(), sides[1].values(), strict=True) if a != b]


def _runtime_version(report: Report) -> object:
    """As a browser or this machine had it; None: the report does not say."""
    versions = report.host.get("versions")
    return versions.get(_IN_BROWSERS, versions.get("onnxruntime")) if isinstance(versions, dict) else None


def _providers(report: Report) -> str:
    """What computed the rows that were measured."""
    found = {provider_facts(row.provider).label for row in report.rows if row.latency_ms.status == "measured"}
    return " and ".join(sorted(found)) or "nothing"


def format_pairs(compared: Record, style: Style) -> str:
    """The comparison as text; CSV holds the rows only, every figure in full.

    Args:
        compared: of :func:`compare_reports`.
        style: how the table is written.
    """
    rows = compared["rows"]
    if style == "csv":
        names = dict.fromkeys(name for row in rows for name in row if name not in ("a_shown", "b_shown"))
        return Columns.of_records(names).csv(rows).rstrip("\n")
    table = (
        (_PAIRS.markdown(rows) if style == "markdown" else _PAIRS.plain(rows)) if rows else "The reports hold no rows."
    )
    lines = [
        f"{side.upper()}: {about['run']} for {about['device']}, measured on {about['measured_on']}, {about['created']}"
        for side, about in (("a", compared["a"]), ("b", compared["b"]))
    ]
    lines += [f"note: {note}" for note in compared["notes"]]
    head = "\n".join(f"- {markdown(line)}" for line in lines) if style == "markdown" else "\n".join(lines)
    return f"{head}\n\n{table}"


def _name(row: Record) -> str:
    threads = f", {thread_words(row['threads'])}" if row.get("threads") is not None else ""
    return f"{row['artifact']} {row['batch']} × {row['seq']}{threads}"


def _formatted(name: str, layout: str) -> Any:
    return lambda row: layout.format(row[name]) if row[name] is not None else DASH


_PAIRS: Columns[Record] = Columns(
    [
        Column("row", _name, heading=""),
        Column("where", itemgetter("where")),
        Column("phase", itemgetter("phase")),
        Column("a", itemgetter("a_shown"), heading="A, p50", number=True),
        Column("b", itemgetter("b_shown"), heading="B, p50", number=True),
        Column("ratio", itemgetter("ratio"), heading="B / A", text=_formatted("ratio", "{:.2f}"), number=True),
        Column("noise", itemgetter("noise"), text=_formatted("noise", "±{:.0%}"), number=True),
        Column("mark", itemgetter("mark"), heading="B is"),
    ]
)


# Runs side by side, from their manifests, bundles and reports.


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
