"""Command plan: predict memory and time of a training."""

from pathlib import Path

import typer
from typer import Argument

from edgeformer.artifacts.errors import needs_extra
from edgeformer.cli import options as opt


def command(
    recipe: str = Argument(..., metavar="RECIPE", help="Recipe file, or the name of a shipped recipe."),
    device: opt.Device = None,
    overrides: opt.Set = None,
    data: opt.DataFolder = None,
    tokenizer: opt.TokenizerFile = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Predict peak memory and duration of training, and whether a device has enough memory.

    Traces one training step without data and without allocating its memory, which takes seconds. If training does not
    fit (exit code 3), plan prints the cheapest changes that make it fit, as --set values. The duration is a range:
    computed from the rates of the device profile, or with --device host from a few timed steps. It is for the training
    rows of the data on this machine, else for data.expected_rows of the recipe, else for 1,000 rows.

    Examples:
      edgeformer plan crt_deep_rtx4050 --device rtx4050
      edgeformer plan recurrent_sst2 --device host --set training.batch_size=256
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.report.tables import print_plan

    progress = opt.show_progress()
    resolved = opt.resolve_recipe(recipe, overrides, data, tokenizer, progress)
    profile = load_profile(device or resolved.target, own_profiles(artifacts), progress.message)
    with needs_extra("train", "planning"):
        from edgeformer.training.plan.plan import plan
    result = plan(resolved, profile, artifacts, progress)
    if as_json:
        opt.print_json(result)
    else:
        print_plan(result, opt.stdout())
    if not result.fits:
        raise typer.Exit(3)
