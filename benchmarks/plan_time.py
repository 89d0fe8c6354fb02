"""What share of this processor's rate finished trainings reached: the range of `plan`'s time rests on it.

python benchmarks/plan_time.py RUN… [--json FILE]

Give finished runs of this machine, trained with nothing else running. The rate is that of FP32 products, measured now
with as many threads as each run had.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from edgeformer.artifacts.files import write_json
from edgeformer.models import read_run_recipe
from edgeformer.run import Run
from edgeformer.system.host import cpu_name
from edgeformer.training.plan.duration import SHARE_OF_PEAK, StepWork
from edgeformer.training.plan.memory import predict_peak

SIZE, ROUNDS = 2048, 12


@dataclass(frozen=True)
class Reached:
    """One training."""

    run: str
    threads: int
    precision: str
    operations: float
    seconds: float
    peak_flops: float
    """FP32, measured now."""

    @property
    def share(self) -> float:
        """Of the peak; above 1 is possible in bf16."""
        return self.operations / self.seconds / self.peak_flops


def peak(threads: int) -> float:
    """FP32 operations per second of a product of two square matrices: the best of some."""
    torch.set_float32_matmul_precision("medium")  # the faster of the two libraries on AMD, at the same accuracy
    torch.set_num_threads(threads)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    times = []
    for _ in range(ROUNDS):
        mark = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - mark)
    return 2 * SIZE**3 / min(times)


def reached(folder: Path) -> Reached:
    """What a finished training reached. Raises EdgeformerError for a folder that is none."""
    run = Run.open(folder)
    run.require_finished()
    manifest, recipe = run.manifest, read_run_recipe(folder)
    lengths = manifest.data.text_tokens.get("train")
    tokens = math.ceil(lengths.mean) if lengths is not None else recipe.data.tokens_at_once
    rows = manifest.steps * recipe.training.effective_batch
    work = StepWork()
    predict_peak(recipe, device_kind="cpu", precision="fp32", work=work)
    operations = work.operations * tokens / recipe.data.tokens_at_once / recipe.training.batch_size * rows
    threads = int(manifest.host["threads"])
    return Reached(manifest.run, threads, manifest.precision, operations, manifest.seconds, peak(threads))


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    results = [reached(folder) for folder in arguments.runs]
    for run in results:
        rates = f"{run.operations / run.seconds / 1e9:.0f} of {run.peak_flops / 1e9:.0f} GFLOP/s"
        print(f"{run.run}: {run.share:.2f} ({rates}, {run.precision}, {run.threads} threads, {run.seconds:.0f} s)")
    print(f"shares {min(run.share for run in results):.2f} to {max(run.share for run in results):.2f}; plan takes "
          f"{SHARE_OF_PEAK[0]} to {SHARE_OF_PEAK[1]}, and twice the upper one for bf16 on a CPU")  # fmt: skip
    if arguments.json is not None:
        rows = [{**asdict(run), "share": run.share} for run in results]
        write_json(arguments.json, {"processor": cpu_name(), "torch": torch.__version__, "runs": rows})


if __name__ == "__main__":
    main()
