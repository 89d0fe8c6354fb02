"""Command train: train a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli import options as opt


def command(
    recipe: str = Argument(..., metavar="RECIPE", help="A recipe file, or the name of a shipped one."),
    overrides: opt.Set = None,
    data: opt.DataFolder = None,
    tokenizer: opt.TokenizerFile = None,
    name: str | None = Option(None, help="Name of the run. Default: the recipe's name and a number."),
    resume: bool = Option(False, "--resume", help="Go on with an interrupted run of this recipe."),
    accelerator: Literal["auto", "cpu", "cuda"] = Option("auto", help="Where to train."),
    max_steps: int | None = Option(None, min=1, help="Stop after this many optimizer steps."),
    as_device: str | None = Option(
        None, metavar="NAME", help="Cap a larger CUDA card to this profile's memory, e.g. rtx4050."
    ),
    allow_leak: opt.AllowLeak = False,
    ignore_memory: bool = Option(
        False, "--ignore-memory", help="Train although the prediction says that memory will not do."
    ),
    shard: bool = Option(
        False, "--shard", help="Each process keeps a part of weights and optimizer state only (FSDP2)."
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Train a [b]recipe[/b]; the result is a folder in artifacts/.

    Before the first step its peak memory is compared with what is free, and a language model is probed for leaks:
    outputs must not depend on later tokens. Ctrl-C, SIGTERM or a closed terminal stop after the current step and leave
    a run that --resume continues (exit code 130). A killed one goes on from its last checkpoint: one per epoch, and
    every training.checkpoint_minutes. Several processes train one run with torchrun or accelerate launch.

    Examples:
      edgeformer train quickstart
      edgeformer train my_recipe.yaml --set training.epochs=3 --set data.split=glue-dev
      edgeformer train crt_deep_rtx4050 --data ~/wikitext-103 --tokenizer ~/gpt2/tokenizer.json
      torchrun --nproc-per-node 2 -m edgeformer train crt_mini
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.cli.progress import show_progress
    from edgeformer.system.host import usable_cores

    # Unpinned, both OpenMP threads can land on one core of a small machine and stay there. Must be set before torch
    # is imported; a value of the user's own is left alone. The cores are counted before the main thread is pinned.
    usable_cores()
    if os.environ.get("WORLD_SIZE", "1") == "1":  # several processes would all be bound to the same first core
        os.environ.setdefault("OMP_PROC_BIND", "true")
    progress = show_progress()
    resolved = opt.resolve_recipe(recipe, overrides, data, tokenizer, progress)
    if allow_leak:
        if not hasattr(resolved, "allow_leak"):
            raise InputError(f"--allow-leak: {resolved.name} is no language model; only those are probed for leaks")
        resolved = resolved.model_copy(update={"allow_leak": True})
    profile = None
    if as_device is not None:
        profile = load_profile(as_device, own_profiles(artifacts), progress.message)
    with needs_extra("train", "training"):
        from edgeformer.training.train import TrainOptions, train
    options = TrainOptions(artifacts, name, resume, accelerator, max_steps, profile, ignore_memory, shard)
    folder = train(resolved, options, progress)
    if os.environ.get("RANK", "0") != "0":  # the main process prints the result
        return
    from edgeformer.cli.console import say
    from edgeformer.report.canvas import NO_PICTURE
    from edgeformer.report.plots import draw_learning_curve
    from edgeformer.report.tables import run_table
    from edgeformer.run import read_run

    manifest, curve = read_run(folder), draw_learning_curve(folder)
    if as_json:
        keys = {"run", "status", "parameters", "steps", "seconds", "test", "tests", "validation"}
        opt.print_json({"path": str(folder), **manifest.model_dump(mode="json", include=keys)})
        return
    opt.stdout().print(run_table(manifest))
    leak = " --allow-leak" if manifest.leaks else ""
    say(f"run            {folder}\nlearning curve {curve or NO_PICTURE}\nnext           edgeformer export --fp16{leak}")
