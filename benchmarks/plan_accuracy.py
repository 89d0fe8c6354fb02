"""How far `edgeformer plan` is off on a CPU: predicted peak against the resident peak of real steps, less a baseline.

Each size runs in two fresh child processes: one that loads all that training loads and trains nothing (the baseline),
and one that also builds the model and runs the training loop for a few steps on random tokens, validation and
checkpoint included. The difference of their peaks is what training took, and what `predict_peak` predicts.

    python benchmarks/plan_accuracy.py [--steps 2] [--json FILE] [--size "RECIPE key=value …"]…
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

_SMALLER = "model.loops=4 model.exits=[2] model.cycles=6 model.vocab_size=20000"
SIZES = (
    # The reserve was calibrated on these two (and seven smaller ones), …
    "crt_deep_rtx4050 training.precision=fp32 training.batch_size=1 training.accumulation=2 "
    "data.sequence_length=384 training.checkpointing=none",
    "crt_deep_rtx4050 training.precision=fp32 training.batch_size=2 training.accumulation=1 "
    "data.sequence_length=384 training.checkpointing=loop training.chunked_loss=false",
    # … and not on these.
    "crt_deep_rtx4050 training.precision=fp32 training.batch_size=1 training.accumulation=2 "
    "data.sequence_length=512 training.checkpointing=loop",
    f"crt_deep_rtx4050 training.precision=fp32 training.batch_size=4 training.accumulation=2 "
    f"data.sequence_length=256 training.checkpointing=none {_SMALLER}",
)
"""Sizes whose peak is above 2 GiB, and whose steps one thread computes within two minutes."""


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def train_steps(recipe: Any, steps: int, folder: Path) -> None:
    """``steps`` optimizer steps of the real training loop on random tokens, with validation and a checkpoint."""
    from edgeformer.artifacts.progress import SILENT
    from edgeformer.training.loop.checkpoint import Checkpoints
    from edgeformer.training.loop.loop import MetricsLog

    loop = loop_on_random_rows(recipe, steps, folder)
    loop.checkpoints = Checkpoints(folder)
    with closing(MetricsLog(folder, loop.position)) as log:
        loop.run(Event(), log, SILENT, steps)


def loop_on_random_rows(recipe: Any, steps: int, folder: Path) -> Any:
    """The real training loop with random tokens for an epoch of ``steps``; its checkpoints are to be set."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    from edgeformer.artifacts.manifest import DataSummary
    from edgeformer.artifacts.progress import SILENT
    from edgeformer.data.encoding import Prepared
    from edgeformer.tasks import get_task
    from edgeformer.training.loop.distributed import connect
    from edgeformer.training.loop.loop import TrainingLoop
    from edgeformer.training.loop.objective import Objective

    rows_per_step = recipe.training.effective_batch
    nothing = DataSummary(split="given", synthetic=True, rows={}, fingerprint="")
    train, validation = random_rows(recipe, rows_per_step * steps), random_rows(recipe, 1)
    data = Prepared(Tokenizer(BPE()), 0, train, validation, {}, nothing)
    task: Any = get_task(recipe.task)
    task.prepare = lambda *parameters: data  # this process trains nothing else
    processes = connect(recipe, "cpu", sharded=False)
    return TrainingLoop(Objective(recipe, folder, SILENT), processes)


def random_rows(recipe: Any, rows: int) -> Any:
    """Packed rows of random tokens, each one document of full length."""
    import numpy as np

    from edgeformer.data.batching import TextRows

    size = recipe.data.sequence_length + 1
    ids = np.random.default_rng(0).integers(1, recipe.model.vocab_size, rows * size, dtype=np.int32)
    starts = np.tile(np.arange(size, dtype=np.int32), rows) if recipe.data.mode == "packed" else None
    return TextRows(ids, np.arange(rows + 1) * size, starts, rows * (size - 1), 0, 0)


def child(kind: str, recipe_name: str, overrides: list[str], steps: int) -> None:
    """Load everything, train if asked to, print the peak."""
    import torch._dynamo  # the optimizer and checkpointing import it when they are first used

    import edgeformer.training.train  # noqa: F401
    from edgeformer.models import load_recipe

    recipe = load_recipe(recipe_name, overrides)
    torch.manual_seed(0)
    if kind == "train":
        with tempfile.TemporaryDirectory() as folder:
            train_steps(recipe, steps, Path(folder))
    print(json.dumps(peak_resident_bytes()))


def measured_bytes(size: str, steps: int) -> tuple[int, int]:
    """(baseline, peak) of the two children."""
    peaks = []
    for kind in ("baseline", "train"):
        command = [sys.executable, __file__, "--child", kind, "--steps", str(steps), "--size", size]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks.append(int(json.loads(done.stdout)))
    return peaks[0], peaks[1]


def predicted_bytes(size: str) -> int:
    """What `edgeformer plan --device host` predicts."""
    from edgeformer.models import load_recipe
    from edgeformer.training.loop.optimizer import resolve_precision
    from edgeformer.training.plan.memory import predict_peak

    recipe_name, *overrides = shlex.split(size)
    recipe = load_recipe(recipe_name, overrides)
    precision = resolve_precision(recipe.training.precision, "cpu")
    return predict_peak(recipe, device_kind="cpu", precision=precision).peak_bytes


def compare(size: str, steps: int) -> dict[str, Any]:
    """One row of the table."""
    predicted = predicted_bytes(size)
    baseline, peak = measured_bytes(size, steps)
    measured = peak - baseline
    row = {"size": size, "steps": steps, "baseline_bytes": baseline, "peak_bytes": peak}
    row |= {"predicted_bytes": predicted, "measured_bytes": measured, "ratio": round(predicted / measured, 4)}
    print(f"predicted {predicted / 2**30:.3f} GiB, measured {measured / 2**30:.3f} GiB, {row['ratio']:.3f}: {size}")
    return row


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="a recipe and its --set values, in one string")
    parser.add_argument("--steps", type=int, default=2, help="the optimizer's state exists from the second step on")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--child", choices=("baseline", "train"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = arguments.size or list(SIZES)
    if arguments.child:
        recipe_name, *overrides = shlex.split(sizes[0])
        child(arguments.child, recipe_name, overrides, arguments.steps)
        return
    rows = [compare(size, arguments.steps) for size in sizes]
    if arguments.json:
        import torch

        host = {"system": platform.platform(), "processor": platform.machine(), "threads": torch.get_num_threads()}
        document = {"torch": torch.__version__, "host": host, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
