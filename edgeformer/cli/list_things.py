"""Command list: recipes, device profiles and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdout


def command(
    kind: Annotated[
        Literal["recipes", "devices", "runs"], typer.Argument(metavar="{recipes|devices|runs}", help="What to list.")
    ],
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """List the shipped recipes, the hardware profiles, or the runs in artifacts/."""
    from edgeformer.cli.console import say
    from edgeformer.report.listing import (
        device_records,
        device_table,
        recipe_records,
        record_table,
        run_records,
        run_table,
    )

    if kind == "recipes":
        rows = recipe_records()
    else:
        rows = device_records(artifacts) if kind == "devices" else run_records(artifacts)
    if as_json:
        print_json({kind: rows})
    elif rows:
        table = {"devices": device_table, "runs": run_table}.get(kind)
        stdout().print(table(rows) if table is not None else record_table(kind, rows))
    else:
        say(f"no {kind} in {artifacts}; train one: edgeformer train quickstart")
