"""edgeformer list: recipes, device profiles and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdout


def command(
    what: Annotated[Literal["recipes", "devices", "runs"], typer.Argument(help="What to list.")],
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

    if what == "recipes":
        rows = recipe_records()
    else:
        rows = device_records(artifacts) if what == "devices" else run_records(artifacts)
    if as_json:
        print_json({what: rows})
    elif rows:
        drawn = {"devices": device_table, "runs": run_table}.get(what)
        stdout().print(drawn(rows) if drawn is not None else record_table(what, rows))
    else:
        say(f"no {what} in {artifacts}; train one: edgeformer train quickstart")
