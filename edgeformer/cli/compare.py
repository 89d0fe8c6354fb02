"""Command compare: runs, or two reports, side by side."""

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt

Style = Literal["plain", "markdown", "csv", "json"]


def command(
    runs: list[str] = Argument(
        ..., metavar="RUN RUN…", help="Two or more runs (names or folders), or reports (.json)."
    ),
    device: str | None = Option(None, help="Compare two runs row by row, by their reports for this device."),
    html: Path | None = Option(
        None, "--html", metavar="FILE", help="Reports: also write a page that compares devices."
    ),
    style: Style = Option("plain", "--format", help="Format of the table."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Compare runs, or reports.

    Runs are compared by parameters, scores, sizes and the latency of their newest reports. Two reports are compared row
    by row, as ratios; differences smaller than the noise are marked. Three or more, or two with --html,
    give a table of devices: measured times, verdicts, and the cheapest artifact for each. Reports of a browser page can
    be among them.

    Examples:
      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --format markdown
      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --device host
      edgeformer compare before/rtx4050.json after/rtx4050.json
      edgeformer compare host-on-pi.json host-on-jetson.json browser.json --html devices.html
    """
    from edgeformer.artifacts.report import read_report
    from edgeformer.report import compare, devices

    # 1. Runs
    files = [Path(name) for name in runs if name.endswith(".json")]
    if not files and device is None:
        locations = [opt.locate(run, artifacts) for run in runs]
        rows, note = compare.run_records(locations), compare.score_note(locations)
        if as_json or style == "json":
            opt.print_json({"runs": rows, "note": note})
            return
        opt.say(compare.format_comparison(rows, style))
        if note is not None:
            opt.say(note if style == "csv" else f"\n{note}", err=style == "csv")
        if style == "plain" and all(location.bundle is not None for location in locations[:2]) and len(locations) > 1:
            baseline, candidate = (location.argument for location in locations[:2])
            opt.say_next(f"edgeformer gate {candidate} --against {baseline}", "decides whether it is slower or worse")
        return
    # 2. A table of devices, from reports
    if files and len(files) == len(runs) and (html is not None or len(files) > 2):
        comparison = devices.compare_devices(devices.name_reports(files))
        if html is not None:
            devices.write_comparison(comparison, html)
        if as_json or style == "json":
            opt.print_json(comparison)
        elif style != "plain":
            opt.say(devices.format_devices(comparison, style))
        else:
            for table in devices.comparison_tables(comparison):
                opt.stdout().print(table)
        return
    # 3. Two reports, row by row
    if html is not None:
        raise InputError("--html: compares reports; name two or more report files (.json)")
    if len(runs) != 2:
        raise InputError(f"compare: needs two reports, not {len(runs)}; compare more than two runs by their names")
    if files and device is not None:
        raise InputError("--device: selects a report of each run, and these are report files; leave it out")
    if len(files) == 1:
        raise InputError(
            f"compare: {files[0]} is a report and the other argument is a run; give two reports or two runs"
        )
    if device is None:
        first, second = map(read_report, files)
    else:
        first, second = (compare.report_of(opt.locate(run, artifacts), device) for run in runs)
    compared = compare.compare_reports(first, second)
    if as_json or style == "json":
        opt.print_json(compared)
    else:
        opt.say(compare.format_pairs(compared, style))
