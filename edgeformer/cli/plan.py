"""edgeformer plan: will a recipe fit a device, before a step is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, Set
from edgeformer.schema.errors import InputError


def command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")],
    device: Annotated[
        str | None, typer.Option(help="Hardware profile. Default: the recipe's target.", show_default=False)
    ] = None,
    overrides: Set = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Count a recipe's parameters and the memory that training them takes at least. Works offline.

    Weights, gradients and optimizer state are exact; activations are not counted yet, so a recipe can be shown not to
    fit (exit code 3), but not to fit: then the answer is unknown.

    Example:

      edgeformer plan recurrent_sst2 --device rtx4050
    """
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.cli.needs import needs_extra
    from edgeformer.reporting.tables import plan_table
    from edgeformer.schema.shipped import load_profile, load_recipe

    resolved = load_recipe(recipe, overrides)
    chosen = device or resolved.target
    if chosen is None:
        raise InputError("--device: name a hardware profile; the recipe has no target (see: edgeformer list devices)")
    profile = load_profile(chosen)
    with needs_extra("train", "planning"):
        from edgeformer.stages.training.plan import plan
    result = plan(resolved, profile)
    if as_json:
        print_json(result)
    else:
        stdout().print(plan_table(result))
    if result.fits is False:
        raise typer.Exit(3)
