"""Two reports side by side, row by row, and runs side by side from their manifests, bundles and reports."""

import glob
import math
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Literal

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.artifacts.report import Latency, Report, Row, read_report
from edgeformer.artifacts.units import format_threads, format_time, markdown
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.report.columns import DASH, Column, Record, TableColumns, figure_text
from edgeformer.report.context import names_of_rows
from edgeformer.run import Location, read_run
from edgeformer.runtimes import default_provider, provider_facts, provider_of
from edgeformer.tasks import get_task

Style = Literal["plain", "markdown", "csv"]

RUN_TO_RUN = 0.10  # two runs of the same measurement may differ by this much; rows called stable keep to it
_MEDIAN_INTERVAL = 1.96 * math.sqrt(math.pi / 2)  # half the 95% interval of a median, in standard deviations / √n


def report_of(location: Location, device: str) -> Report:
    """Return the report of a run or bundle for a device. Raises ArtifactError if there is none."""
    path = location.reports / f"{device}.json"
    if path.is_file():
        return read_report(path)
    remedy = f"write it with: edgeformer profile {location.argument} --device {device}"
    files = sorted(file.name for file in location.reports.glob(f"{glob.escape(device)}-*.json"))
    if files:
        remedy += f", or compare two report files, e.g. {', '.join(files)}"
    raise ArtifactError(f"{path.parents[1]}: has no report for {device}; {remedy}")


def compare_reports(first: Report, second: Report) -> Record:
    """Compare every row of two reports, matched by artifact, where, phase, batch and sequence length.

    If a report has several rows of one shape (thread counts or runtimes), provider and threads are matched too. Return
    ``a`` and ``b`` (the reports), ``notes``, and ``rows``: the shape, ``a_ms`` and ``b_ms`` (p50), ``ratio`` b/a,
    ``noise`` (smallest significant relative difference), ``mark`` (b is slower…) and ``status`` of both.
    """
    # 1. The rows of both.
    names = names_of_rows((first.rows, second.rows), "artifact", "where", "phase", "batch", "seq")
    shape_of = attrgetter(*names)
    rows_a, rows_b = ({shape_of(row): row.latency_ms for row in report.rows} for report in (first, second))
    rows = []
    for shape in {**rows_a, **rows_b}:
        sides = {"a": rows_a.get(shape), "b": rows_b.get(shape)}
        ratio, noise, mark = _compare_latency(sides["a"], sides["b"])
        shown = {side: str(figure_text(x.figure, "ms")) if x is not None else DASH for side, x in sides.items()}
        rows.append({
            **dict(zip(names, shape, strict=True)),
            **{f"{side}_status": latency.status if latency else None for side, latency in sides.items()},
            **{f"{side}_ms": latency.p50 if latency else None for side, latency in sides.items()},
            "ratio": ratio, "noise": noise, "mark": mark,
            **{f"{side}_shown": text for side, text in shown.items()},
        })  # fmt: skip
    # 2. Other differences between the reports.
    identities: list[Record] = []
    conditions: list[Record] = []  # what should be equal in both, by the note for when it is not
    for report in (first, second):
        # The machine, not the device that it was judged for: one machine has one name in both reports.
        parts = [report.host.get(part) for part in ("cpu", "gpu")]
        host = " with ".join(str(part) for part in parts if part) or report.device_title
        versions = report.host.get("versions")
        versions = versions if isinstance(versions, dict) else {}
        providers = {provider_facts(row.provider).label for row in report.rows if row.latency_ms.status == "measured"}
        identity = {"run": report.run, "device": report.device, "measured_on": host, "created": report.created}
        identities.append(identity)
        conditions.append({
            "measured on different machines": report.host.get("cpu"),
            "judged for different devices": report.device,
            "measured with different threads": report.host.get("threads"),
            "measured with different versions of ONNX Runtime":
                versions.get("onnxruntime-web", versions.get("onnxruntime")),
            "computed by different providers": " and ".join(sorted(providers)) or "nothing",
        })  # fmt: skip
    facts = [(note, fact, conditions[1][note]) for note, fact in conditions[0].items()]
    notes = [f"{note}: {fact} and {other}" for note, fact, other in facts if fact != other]
    return {"a": identities[0], "b": identities[1], "rows": rows, "notes": notes}


def _compare_latency(a: Latency | None, b: Latency | None) -> tuple[float | None, float | None, str]:
    """Return the ratio b/a, the noise, and a mark: faster, slower, within the noise, or why none of these."""
    if a is None or b is None:
        return None, None, "only in one report"
    if not a.p50 or not b.p50:
        return None, None, "a time is missing"
    ratio = b.p50 / a.p50
    direction = "slower" if ratio > 1 else "faster"
    if a.status != b.status:
        return ratio, None, "an estimate and a measurement"
    if a.status == "estimated":
        overlap = (a.high or a.p50) >= (b.low or b.p50) and (b.high or b.p50) >= (a.low or a.p50)
        return ratio, None, "within the ranges of the estimates" if overlap else f"estimated {direction}"
    if a.n <= 1 or b.n <= 1:
        return ratio, None, "a single call, so the noise is unknown"
    sampling = _MEDIAN_INTERVAL * math.hypot(*((latency.cv or 0.0) / math.sqrt(latency.n) for latency in (a, b)))
    noise = max(RUN_TO_RUN, sampling)
    if a.stable is False or b.stable is False:
        return ratio, noise, "unstable"
    # Larger over smaller: the order of the reports does not matter.
    return ratio, noise, "within the noise" if max(ratio, 1 / ratio) - 1 < noise else direction


_PAIRS: TableColumns[Record] = TableColumns(
    Column("row", heading=""),
    Column("where"),
    Column("phase"),
    Column("a", "a_shown", heading="A, p50", number=True),
    Column("b", "b_shown", heading="B, p50", number=True),
    Column("ratio", heading="B / A", layout="{:.2f}"),
    Column("noise", layout="±{:.0%}"),
    Column("mark", heading="B is"),
)


def format_pairs(compared: Record, style: Style) -> str:
    """Format the result of :func:`compare_reports`; CSV has the rows only, with all digits."""
    rows, is_markdown = compared["rows"], style == "markdown"
    if style == "csv":
        names = dict.fromkeys(name for row in rows for name in row if name not in ("a_shown", "b_shown"))
        return TableColumns(*map(Column, names)).csv(rows).rstrip("\n")
    lines = [
        f"{side.upper()}: {report['run']} for {report['device']}, measured on {report['measured_on']}, "
        f"{format_time(report['created'])}"
        for side, report in (("a", compared["a"]), ("b", compared["b"]))
    ]
    lines += [f"note: {note}" for note in compared["notes"]]
    head = "\n".join(f"- {markdown(line)}" if is_markdown else line for line in lines)
    table = "The reports have no rows."
    named_rows = []
    for row in rows:
        threads = f", {format_threads(row['threads'])}" if row.get("threads") is not None else ""
        named_rows.append({**row, "row": f"{row['artifact']} {row['batch']} × {row['seq']}{threads}"})
    if rows:
        table = _PAIRS.markdown(named_rows) if is_markdown else _PAIRS.plain(named_rows)
    return f"{head}\n\n{table}"


def run_records(locations: Sequence[Location]) -> list[Record]:
    """Return figures of runs, or of bundles without a run; sizes in bytes, times in ms on their host.

    The name of a time has the provider if it is not the artifact's usual one, and the threads if the runs were measured
    with different thread counts: times of one name were measured in one way.
    """
    records: list[Record] = []
    rows_of: list[tuple[Record, list[Row], dict[str, str]]] = []
    for location in locations:
        record: Record = {"run": location.name}
        bundle = location.open_bundle().manifest if location.bundle is not None else None
        if location.run is not None:
            manifest = read_run(location.run)
            record["split"] = manifest.data.split + (" (SYNTHETIC)" if manifest.data.synthetic else "")
            record["parameters"] = manifest.parameters
            # Scores of the test set and its exits, and the metric on the other test sets; a leak first.
            task, test = get_task(manifest.task), manifest.test
            name = task.metric.name
            # F1 summarises precision and recall.
            omitted = (name, "n", "loss", "precision", "recall")
            keys = [column.name for column in task.columns if column.name not in omitted]
            record |= {"caution": LEAKS} if manifest.leaks else {}
            record |= {key: getattr(test, key, None) for key in (name, *keys, "loss")}
            if test is not None and test.by_exit:
                exits = list(test.by_exit.items())[:-1]
                record |= {f"{name}_exit{loop}": getattr(score, name, None) for loop, score in exits}
                record[f"{name}_early_exit"] = getattr(test.leaving_early, name, None)
                record["early_exit_mean_loops"] = getattr(test.leaving_early, "mean_loops", None)
            further_tests = list(manifest.tests.items())[1:]
            record |= {f"{name}_{other}": task.metric.of(score) for other, score in further_tests}
            record["train_seconds"] = manifest.seconds
        if bundle is not None:
            record.setdefault("parameters", bundle.parameters)
            record |= {f"{artifact.id}_bytes": artifact.size_bytes for artifact in bundle.artifacts}
        reports: list[tuple[str, Report]] = []  # of the bundle as it is now, oldest first
        for path in sorted(location.reports.glob("[!.]*.json")):  # a leading dot: a temporary file
            with suppress(ArtifactError):
                report = read_manifest(Report, path)
                if bundle is None or report.created >= bundle.created:  # else it measured an earlier bundle
                    reports.append((path.name, report))
        reports.sort(key=lambda entry: entry[1].created)
        machine = _machine(reports[-1][1]) if reports else ""
        if reports and reports[-1][1].host:
            record["measured_on"] = reports[-1][1].host.get("cpu")
        left_out = [(name, report) for name, report in reports if _machine(report) != machine]
        if left_out:
            record["reports_left_out"] = "; ".join(f"{name}, of {_machine(report)}" for name, report in left_out)
        rows = [
            row for _, report in reports if _machine(report) == machine for row in report.rows if row.where == "host"
        ]
        rows = [row for row in rows if row.phase != "cold" and row.latency_ms.status == "measured"]
        usual = {a.id: provider_of(a, kind="cpu") for a in bundle.artifacts} if bundle is not None else {}
        rows_of.append((record, rows, usual))
        records.append(record)
    has_several_threads = len({row.threads for _, rows, _ in rows_of for row in rows if row.threads is not None}) > 1
    for record, rows, usual in rows_of:
        for row in rows:  # newer rows replace older ones
            is_usual = row.provider == (usual.get(row.artifact) or default_provider("cpu"))
            threads = f"{row.threads}threads" if has_several_threads and row.threads is not None else ""
            parts = [row.artifact, "" if row.phase == "steady" else row.phase, f"{row.batch}x{row.seq}"]
            parts += ["" if is_usual else row.provider, threads, "" if row.latency_ms.stable else "unstable"]
            record["_".join([*filter(None, parts), "p50_ms"])] = row.latency_ms.p50
    return records


def _machine(report: Report) -> str:
    return f"{report.host.get('cpu')} with {report.host.get('cores')} cores ({report.host.get('system')})"


def score_note(locations: Sequence[Location]) -> str | None:
    """Return why the scores of these runs do not rank them (other tasks, labels or test data); None if they do."""
    facts: dict[str, list[tuple[str, str]]] = {"tasks": [], "labels": [], "test sets": []}
    for location in locations:
        if location.run is None or not (manifest := read_run(location.run)).tests:
            continue
        data, test = manifest.data, next(iter(manifest.tests))
        labels = dict.fromkeys(label for by_label in data.label_rows.values() for label in by_label)
        sha256 = data.fingerprints.get(test, data.fingerprint)[:8]
        facts["tasks"].append((location.name, manifest.task))
        facts["labels"].append((location.name, ", ".join(labels)))
        facts["test sets"].append((location.name, f"{test}, {data.rows.get(test, 0):,} rows, sha256 {sha256}"))
    for name, values in facts.items():
        if len({value for _, value in values}) > 1:
            differing = "; ".join(f"{run}: {value}" for run, value in values)
            return f"note: do not compare the scores, because the {name} differ: {differing}"
    return None


def format_comparison(rows: Sequence[Record], style: Style) -> str:
    """Format the records of :func:`run_records`: figures down, runs across; in CSV a run per line."""
    figures = list(dict.fromkeys(key for row in rows for key in row if key != "run"))
    figures.sort(key=lambda figure: figure != "caution")
    if style == "csv":
        names: TableColumns[Record] = TableColumns(*map(Column, ["run", *figures]))
        return names.csv(rows).rstrip("\n")

    lines: list[Record] = []
    for figure in figures:
        label = figure.replace("_bytes", " (MiB)").replace("_p50_ms", " p50 (ms)").replace("_", " ")
        line: Record = {"figure": label}
        for index, row in enumerate(rows):
            value = row.get(figure)
            if isinstance(value, int):
                value = f"{value / 2**20:.2f}" if figure.endswith("_bytes") else f"{value:,}"
            elif isinstance(value, float):
                places = 0 if figure == "train_seconds" else 4 if abs(value) < 10 else 2
                value = f"{value:.{places}f}"
            line[str(index)] = value
        lines.append(line)
    columns: TableColumns[Record] = TableColumns(
        Column("figure", heading=""),
        *(Column("run", str(i), heading=str(row["run"]), number=True) for i, row in enumerate(rows)),
    )
    return columns.markdown(lines) if style == "markdown" else columns.plain(lines)
