"""Command compare: runs, or two reports, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.options import Artifacts, Json, print_json

if TYPE_CHECKING:
    from edgeformer.artifacts.report import Report

Style = Literal["plain", "markdown", "csv", "json"]


def command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Two or more runs (names or folders), or two report files (.json)."),
    ],
    device: Annotated[str | None, typer.Option(help="Compare the rows of two runs' reports for this device.")] = None,
    style: Annotated[Style, typer.Option("--format", help="How to print the table.")] = "plain",
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Put runs side by side: parameters, scores, sizes and the latency of their reports.

    Times are those of one host: that of a run's newest report. Those of another provider than the usual one have its
    name, and the threads where they are not the same in all runs.

    Two reports are compared row by row, with ratios; a difference that is smaller than the noise is marked as such.

    Examples:

      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --format markdown

      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --device host

      edgeformer compare before/rtx4050.json after/rtx4050.json
    """
    from edgeformer.cli.console import say
    from edgeformer.report.compare import compare_reports, format_comparison, format_pairs, run_records, score_note
    from edgeformer.run import locate

    reports = _reports(runs, device, artifacts)
    if reports is None:
        locations = [locate(run, artifacts) for run in runs]
        rows, note = run_records(locations), score_note(locations)
        if as_json or style == "json":
            print_json({"runs": rows, "note": note})
            return
        say(format_comparison(rows, style))
        if note is not None:
            say(note if style == "csv" else f"\n{note}", err=style == "csv")
        return
    compared = compare_reports(*reports)
    if as_json or style == "json":
        print_json(compared)
    else:
        say(format_pairs(compared, style))


def _reports(arguments: list[str], device: str | None, artifacts: Path) -> tuple[Report, Report] | None:
    """Return the two reports named by the arguments, or None if the arguments are runs."""
    from edgeformer.artifacts.report import read_report
    from edgeformer.report.compare import report_of
    from edgeformer.run import locate

    files = [argument for argument in arguments if argument.endswith(".json")]
    if not files and device is None:
        return None
    if len(arguments) != 2:
        raise InputError(f"compare: reports are compared two at a time, not {len(arguments)}")
    if files and device is not None:
        raise InputError("--device: chooses among a run's reports; report files are what they are, leave it out")
    if len(files) == 1:
        raise InputError(f"compare: {files[0]} is a file and the other argument is not; give two reports or two runs")
    if files:
        return read_report(Path(files[0])), read_report(Path(files[1]))
    assert device is not None
    first, second = (report_of(locate(run, artifacts), device) for run in arguments)
    return first, second
