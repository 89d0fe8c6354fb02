"""Command compare: runs, or two reports, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt

Style = Literal["plain", "markdown", "csv", "json"]


def command(
    runs: list[str] = Argument(
        ..., metavar="RUN RUN…", help="Two or more runs (names or folders), or two reports (.json)."
    ),
    device: str | None = Option(None, help="Compare the rows of two runs' reports for this device."),
    style: Style = Option("plain", "--format", help="Format of the table."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Compare runs, or two reports.

    Runs are compared by parameters, scores, sizes and the latency of their newest reports. Two reports are compared row
    by row, as ratios; differences smaller than the noise are marked.

    Examples:
      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --format markdown
      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --device host
      edgeformer compare before/rtx4050.json after/rtx4050.json
    """
    from edgeformer.artifacts.report import read_report
    from edgeformer.cli.console import say
    from edgeformer.report.compare import (
        compare_reports,
        format_comparison,
        format_pairs,
        report_of,
        run_records,
        score_note,
    )
    from edgeformer.run import locate

    files = [Path(name) for name in runs if name.endswith(".json")]
    if not files and device is None:
        locations = [locate(run, artifacts) for run in runs]
        rows, note = run_records(locations), score_note(locations)
        if as_json or style == "json":
            opt.print_json({"runs": rows, "note": note})
            return
        say(format_comparison(rows, style))
        if note is not None:
            say(note if style == "csv" else f"\n{note}", err=style == "csv")
        return
    if len(runs) != 2:
        raise InputError(f"compare: reports are compared two at a time, not {len(runs)}")
    if files and device is not None:
        raise InputError("--device: chooses among a run's reports; report files are what they are, leave it out")
    if len(files) == 1:
        raise InputError(f"compare: {files[0]} is a file and the other argument is not; give two reports or two runs")
    if device is None:
        first, second = map(read_report, files)
    else:
        first, second = (report_of(locate(run, artifacts), device) for run in runs)
    compared = compare_reports(first, second)
    if as_json or style == "json":
        opt.print_json(compared)
    else:
        say(format_pairs(compared, style))
