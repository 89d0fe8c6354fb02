"""edgeformer compare: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgeformer.cli.options import Artifacts, Json


def command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Two or more runs (names or folders).")],
    style: Annotated[
        Literal["plain", "markdown", "csv", "json"], typer.Option("--format", help="How to print the table.")
    ] = "plain",
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Put runs side by side: parameters, scores, sizes and the latency of their reports.

    Example:

      edgeformer compare baseline_sst2_fast-001 recurrent_sst2_fast-001 --format markdown
    """
    from edgeformer.cli.console import print_json
    from edgeformer.reporting.compare import compare_runs, format_comparison
    from edgeformer.schema.workspace import locate

    rows = compare_runs([locate(run, artifacts) for run in runs])
    if as_json or style == "json":
        print_json({"runs": rows})
    else:
        typer.echo(format_comparison(rows, style))
