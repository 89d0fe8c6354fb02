"""Samples per second of training with and without padding on this CPU, by the paper's protocol and by the fast one.

The paper's protocol shuffles batches of 16 rows of SST-2, the fast one sorts batches of 64 by length. Two trainers of
the same recipe take turns on the same batches, A B B A, each case in a process of its own, so that other work on the
machine slows both alike. ``padded`` is ``model.attention: sdpa``, ``unpadded`` is ``auto``. The ratio is that of the
medians over blocks of steps; ``by_padding`` has it by share of padding, with ``--least-padding 0`` also where a batch
has little of it, from which ``LEAST_PADDING`` in edgeformer/data/batching.py is chosen.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import chain, cycle
from json import dumps, loads
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.frame import run_script, stamp
from benchmarks.ways import environment
from edgeformer.artifacts.files import write_json

CASES = ("recurrent_sst2", "baseline_sst2", "recurrent_sst2_fast", "baseline_sst2_fast")
"""Light and baseline model by the paper's protocol, then by the fast one."""
BLOCK, WARM_UP = 8, 4
"""Steps of each trainer that are timed together, and steps that are not timed."""


def measure(name: str, data: Path, seconds: float, changes: list[str], least_padding: float | None) -> dict[str, Any]:
    """Train ``name`` both ways in turns for so many seconds; return samples per second, and the ratio by padding."""
    import torch

    from benchmarks.studies.jobs import load_local_data, with_local_data
    from edgeformer.artifacts.progress import SILENT
    from edgeformer.data.batching import LEAST_PADDING, concatenate
    from edgeformer.models import load_recipe
    from edgeformer.models.blocks.segments import choose_attention
    from edgeformer.training.loop import objective as objective_module
    from edgeformer.training.loop.checkpoint import Position
    from edgeformer.training.loop.distributed import connect
    from edgeformer.training.loop.objective import Objective
    from edgeformer.training.loop.step import Stepper

    least = LEAST_PADDING if least_padding is None else least_padding
    vars(objective_module)["concatenate"] = partial(concatenate, least_padding=least)
    recipe: Any = with_local_data(load_recipe(name, changes), [data], load_local_data())
    processes = connect(recipe, "cpu", sharded=False)
    objectives, steppers = {}, {}
    with TemporaryDirectory() as folder:
        for way, attention in (("padded", "sdpa"), ("unpadded", "auto")):
            model = recipe.model.model_copy(update={"attention": attention})
            variant = recipe.model_copy(update={"model": model})
            objective = objectives[way] = Objective(variant, Path(folder), SILENT)
            objective.attention = choose_attention(variant, "cpu", processes.precision)
            steppers[way] = Stepper(objective, processes, len(objective.steps(0)))
            steppers[way].model.train()
    plan, train = objectives["padded"].steps(0), objectives["padded"].prepared.train
    lengths = train.sizes(np.arange(len(train)))
    size, times, paddings = recipe.training.batch_size, {way: list[float]() for way in steppers}, list[float]()
    ended = None
    for number, rows in enumerate(plan):
        for way in (*steppers,) if number % 2 else (*reversed(steppers),):
            started = time.perf_counter()
            steppers[way].take(rows, Position(batch_size=size))
            times[way].append(time.perf_counter() - started)
        paddings.append(1 - float(lengths[rows].mean() / lengths[rows].max()))
        ended = ended or (time.perf_counter() + seconds if number + 1 == WARM_UP else None)
        if ended is not None and time.perf_counter() > ended:
            break
    steps = {way: np.array(values[WARM_UP:]) for way, values in times.items()}
    blocks = {way: _blocks(values) for way, values in steps.items()}
    ratios = blocks["padded"] / blocks["unpadded"]
    padding = np.array(paddings[WARM_UP:])
    bins = np.minimum((padding * 10).astype(int), 9)
    return {
        "precision": processes.precision,
        "steps": len(padding),
        "padding": float(padding.mean()),
        "samples_per_s": {way: BLOCK * size / statistics.median(values) for way, values in blocks.items()},
        "unpadded_over_padded": {
            "median": statistics.median(blocks["padded"]) / statistics.median(blocks["unpadded"]),
            "low": float(np.quantile(ratios, 0.1)),
            "high": float(np.quantile(ratios, 0.9)),
        },
        "by_padding": {
            f"{10 * each} to {10 * each + 10} %": {
                "steps": int((bins == each).sum()),
                "unpadded_over_padded": float(np.median((steps["padded"] / steps["unpadded"])[bins == each])),
            }
            for each in np.unique(bins).tolist()
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _blocks(seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sums of blocks of steps, without the rest."""
    count = max(1, len(seconds) // BLOCK)
    return np.array([part[:BLOCK].sum() for part in np.array_split(seconds[: count * BLOCK], count)])


def main(
    data: Annotated[Path, typer.Option(help="folder of the public data")], minutes: float = 9, threads: int = 2,
    case: Annotated[list[str] | None, typer.Option(help="a recipe; default: all four")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="of every recipe")] = None,
    least_padding: float | None = None, json: Path | None = None,
    seconds: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:  # fmt: skip
    """Compare every case in a process of its own."""
    changes, cases = set_ or [], case or [*CASES]
    if seconds is not None:  # a child process
        print(dumps(measure(cases[0], data, seconds, changes, least_padding)))
        return
    seconds = 60 * minutes / len(cases) - 20  # imports and data
    results = {}
    for name in cases:
        words = ["--case", name, "--data", str(data), "--seconds", str(seconds)]
        words += chain(*zip(cycle(["--set"]), changes, strict=False))
        words += ["--least-padding", str(least_padding)] if least_padding is not None else []
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.unpadded_training", *words], check=True, stdout=subprocess.PIPE,
            text=True, env={**os.environ, **environment(threads, torch_alone=True)},
        )  # fmt: skip
        result = results[name] = loads(child.stdout.splitlines()[-1])
        ratio, speeds = result["unpadded_over_padded"], result["samples_per_s"]
        print(
            f"{name}, {result['precision']}, {result['padding']:.0%} padding: {speeds['padded']:.0f} → "
            f"{speeds['unpadded']:.0f} samples/s, {ratio['median']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})",
            flush=True,
        )
    if json is not None:
        write_json(json, {**stamp(), "least_padding": least_padding, "cases": results})


if __name__ == "__main__":
    run_script(main)
