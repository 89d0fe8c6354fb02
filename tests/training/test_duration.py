"""Predicted time: length of a training, rates of a CPU, kernels on a CUDA card, timed steps."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.plan import PlannedTime
from edgeformer.artifacts.recipe import CompileConfig, Recipe
from edgeformer.models import load_recipe
from edgeformer.report.tables import time_text
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.plan import duration
from edgeformer.training.plan.duration import SHARE_OF_PEAK, PlannedData, StepWork, planned_data, planned_time
from edgeformer.training.plan.memory import predict_peak
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.training.runs import Messages

PI, RTX = load_profile("raspberry-pi-5"), load_profile("rtx4050")
ONE_LAYER = load_recipe(
    "quickstart",
    ["model.layers=1", "model.iterations=2", "training.batch_size=4", "training.precision=fp32", "data.max_length=16"],
)
TOKENS = 16


def cpu_with_rate(operations_per_s: float) -> DeviceProfile:
    fact = Fact[float](value=operations_per_s, source="this test", verified="measured here")
    return PI.model_copy(update={"peaks": Peaks(fp32=fact)})


def count_step(recipe: Recipe, kind: Literal["cpu", "cuda"], precision: str = "fp32") -> StepWork:
    work = StepWork()
    predict_peak(recipe, device_kind=kind, precision=precision, work=work)
    return work


def planned(recipe: Recipe, device: DeviceProfile, cache: Path, *, fits: bool = True) -> PlannedTime:
    return planned_time(planned_data(recipe, cache), count_step(recipe, "cpu"), device, "fp32", cache, fits=fits)


def test_operations() -> None:
    """Forward: projections, scores and values, feed-forward; the last layer reads one token; backward twice of it."""
    d, f, rows = ONE_LAYER.model.hidden_size, ONE_LAYER.model.ffn_size, 4  # type: ignore[attr-defined]
    products = 2 * TOKENS * (4 * d * d + 3 * d * f)
    last = 2 * TOKENS * 2 * d * d + 2 * (2 * d * d + 3 * d * f)
    scores = 2 * 2 * TOKENS * TOKENS * d + 2 * 2 * TOKENS * d
    head = 2 * d * 2
    # The backward pass computes scores once more.
    without_dropout = ONE_LAYER.model_copy(update={"model": ONE_LAYER.model.model_copy(update={"dropout": 0.0})})
    expected = 3 * rows * (products + last + scores + head)
    assert count_step(without_dropout, "cpu").operations == pytest.approx(expected, rel=0.06)
    work = count_step(ONE_LAYER, "cuda")
    last = 2 * TOKENS * 3 * d * d + 2 * (d * d + 3 * d * f)
    assert work.operations == rows * (3 * (products + last + head) + 3.5 * scores)
    assert work.parameters > 0 and len(work.kernels) > 50 and all(kernel.moved_bytes > 0 for kernel in work.kernels)


@pytest.mark.slow
def test_length_of_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("recurrent_sst2")
    time = planned(recipe, cpu_with_rate(1e12), tmp_path)
    assert recipe.data.expected_rows == 54_576 and time.rows == 54_576 * recipe.training.epochs
    assert time.steps == -(-54_576 // recipe.training.effective_batch) * recipe.training.epochs
    assert time.rows_from == "recipe" and "number of rows as in data.expected_rows" in time_text(time)
    assert time.status == "estimated" and "--data" in time.basis
    operations = count_step(recipe, "cpu").operations / recipe.training.batch_size * time.rows
    assert time.low_s == pytest.approx(operations / (1e12 * SHARE_OF_PEAK[1]))
    # An override of the data drops the number of rows.
    time = planned(load_recipe("recurrent_sst2", ["data.max_length=64"]), cpu_with_rate(1e12), tmp_path)
    assert (time.rows, time.rows_from, time.steps) == (1000, "unknown", None)
    assert "per 1,000 training rows" in time_text(time) and "the number of rows is unknown" in time_text(time)


def test_wrong_expected_rows_are_reported(tiny_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    data = tiny_recipe.data.model_copy(update={"expected_rows": 200})
    recipe, progress = tiny_recipe.model_copy(update={"data": data}), Messages()
    result = planned_data(recipe, tmp_path / "cache")
    assert (result.problem, result.rows_from, result.rows) == ("", "data", 320 * 2)
    train(recipe, TrainOptions(tmp_path, accelerator="cpu", max_steps=1), progress)
    for messages in (result.notes, progress.lines):
        assert sum("states 200 training rows" in text and "has 320" in text for text in messages) == 1


@pytest.mark.slow
def test_timed_steps(tiny_recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "TIMED_S", 0.1)
    result = plan(tiny_recipe, load_profile("host"))
    time: Any = result.time
    assert result.fits and "now" in result.budget_source
    assert (time.status, time.steps) == ("estimated", 8) and "steps timed on this host" in time.basis
    assert 0 < time.low_s < time.high_s < 600
    time = planned(tiny_recipe, load_profile("host"), tmp_path, fits=False)
    assert (time.status, time.low_s, time.high_s) == ("unavailable", None, None) and "unknown" in time.basis


class TestGpu:
    def test_rates_and_launches(self, tmp_path: Path) -> None:
        def time_on(recipe: Recipe, **facts: Any) -> PlannedTime:
            values = {key: fact and getattr(RTX, key).model_copy(update={"value": fact}) for key, fact in facts.items()}
            data, device = PlannedData(recipe, rows=400, tokens=TOKENS), RTX.model_copy(update=values)
            return planned_time(data, count_step(recipe, "cuda"), device, "fp32", tmp_path, fits=True)

        time, slow = time_on(ONE_LAYER), time_on(ONE_LAYER, launch_overhead_us=1000.0)
        assert "published measurements of torch" in time.basis and "no training was compared" in time.basis
        # 100 micro-batches, whose kernels are launched one after another.
        launches_s = len(count_step(ONE_LAYER, "cuda").kernels) * 1e-3 * 100
        assert time.low_s < launches_s / 3 < slow.low_s < 3 * launches_s
        compiled = ONE_LAYER.training.model_copy(update={"compile": CompileConfig()})
        fused = time_on(ONE_LAYER.model_copy(update={"training": compiled}))
        assert "torch.compile" in fused.basis and fused.low_s < time.low_s
        missing = time_on(ONE_LAYER, bandwidth_bytes_per_s=None)
        assert missing.status == "unavailable" and "'rtx4050' has no value for bandwidth" in missing.basis

    @pytest.mark.slow
    def test_recipe_for_six_gigabytes(self, tmp_path: Path) -> None:
        """An H200 trained the recipe at 12.0 rows per second (benchmarks/results/nvidia-h200, levers)."""
        recipe = load_recipe("crt_deep_rtx4050")
        data, work = planned_data(recipe, tmp_path), count_step(recipe, "cuda", "bf16")
        time = planned_time(data, work, load_profile("h200"), "bf16", tmp_path, fits=True)
        assert (time.rows, time.rows_from, time.steps) == (70_590, "recipe", 4_420)
        assert time.rows / time.high_s < 12.0 < time.rows / time.low_s
        assert re.search(r"(min|s) an epoch\): 10 epochs", time_text(time))


def test_init_does_not_import_torch() -> None:
    code = "import sys, edgeformer.training.init; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
