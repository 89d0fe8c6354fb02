"""Command train: train a recipe."""

import os
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli import options as opt


def command(
    recipe: str = Argument(..., metavar="RECIPE", help="Recipe file, or the name of a shipped recipe."),
    overrides: opt.Set = None,
    data: opt.DataFolder = None,
    tokenizer: opt.TokenizerFile = None,
    name: str | None = Option(None, help="Name of the run. Default: the recipe's name and a number."),
    resume: bool = Option(False, "--resume", help="Resume an interrupted run of this recipe."),
    accelerator: Literal["auto", "cpu", "cuda"] = Option(
        "auto", help="Processor to train on; auto: a CUDA card if there is one."
    ),
    max_steps: int | None = Option(None, min=1, help="Stop after this many optimizer steps."),
    as_device: str | None = Option(
        None, metavar="NAME", help="Limit the memory of a larger CUDA card to that of this profile, e.g. rtx4050."
    ),
    allow_leak: opt.AllowLeak = False,
    ignore_memory: bool = Option(
        False, "--ignore-memory", help="Train even if the predicted memory exceeds the free memory."
    ),
    shard: bool = Option(
        False, "--shard", help="With several processes: divide weights and optimizer state among them (FSDP2)."
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Train a [b]recipe[/b] and write a run.

    Before the first step, train compares the predicted peak memory with the free memory, and checks that a language
    model does not see future tokens. Ctrl-C, SIGTERM or a closed terminal stop the run after the current step with exit
    code 130; --resume continues it. A checkpoint is saved after every epoch and every training.checkpoint_minutes; a
    killed run continues from the last one. To train with several processes, start train with torchrun or accelerate.

    Examples:
      edgeformer train quickstart
      edgeformer train my_recipe.yaml --set training.epochs=3 --set data.split=glue-dev
      edgeformer train crt_deep_rtx4050 --data ~/wikitext-103 --tokenizer ~/gpt2/tokenizer.json
      torchrun --nproc-per-node 2 -m edgeformer train crt_mini
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.system.host import usable_cores

    # 1. Pin the threads
    # Unpinned, both OpenMP threads can land on one core of a small machine and stay there. Must be set before torch
    # is imported; a value of the user's own is left alone. The cores are counted before the main thread is pinned.
    # Several processes would all be bound to the same first core: those of torchrun, and trainings side by side that
    # have a part of the cores each.
    usable_cores()
    if os.environ.get("WORLD_SIZE", "1") == "1" and "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OMP_PROC_BIND", "true")
    # 2. Train
    progress = opt.show_progress()
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
    # 3. Print the run
    from edgeformer.artifacts.recipe import FitConfig
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
    precision = "--fp16" if resolved.target else "--int8"  # a CPU computes FP16 in FP32
    opt.say(f"run            {folder}")
    if not isinstance(resolved.training, FitConfig) and resolved.training.epochs:  # a fit has no epochs
        opt.say(f"learning curve {curve or NO_PICTURE}")
    opt.say(f"next           edgeformer export {precision}{leak}")
