"""Command list: recipes, device profiles, runtimes and runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Argument

from edgeformer.cli import options as opt

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgeformer.report.columns import Record

_NEXT = {
    "recipes": "edgeformer train NAME",
    "devices": "edgeformer profile --device NAME",
    "runtimes": "edgeformer doctor",
    "runs": "edgeformer profile {name}",
}
"""Next command after each list."""


def command(
    kind: Literal["recipes", "devices", "runtimes", "runs"] = Argument(
        ...,
        metavar="{recipes|devices|runtimes|runs}",
        help="Shipped recipes, device profiles, runtimes, or the runs in DIR.",
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """List the shipped recipes, the device profiles, the runtimes, or the runs."""
    from edgeformer.report import listing

    rows: list[Record]
    table: Callable[[list[Record]], RenderableType]
    if kind == "recipes":
        rows, table = listing.recipe_records(), partial(listing.RECIPES.terminal, kind)
    elif kind == "devices":
        rows, table = listing.device_records(artifacts), listing.device_table
    elif kind == "runtimes":
        rows, table = listing.runtime_records(), partial(listing.RUNTIMES.terminal, kind)
    else:
        rows, table = listing.run_records(artifacts), listing.run_table
    if as_json:
        opt.print_json({kind: rows})
    elif rows:
        opt.stdout().print(table(rows))
        opt.say_next(_NEXT[kind].format(name=rows[-1].get("run")))
    else:
        opt.say(f"no {kind} in {artifacts}; train one: edgeformer train quickstart")
