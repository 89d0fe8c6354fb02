"""plan: how long training takes, by a device's stated rates or by steps that are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeformer.families import load_recipe
from edgeformer.formats.device import DeviceProfile, Fact, Peaks
from edgeformer.formats.documents import load_profile
from edgeformer.stages.training.duration import SHARE_OF_PEAK, planned_time, step_operations
from edgeformer.stages.training.train import TrainOptions, train
from edgeformer.tasks.classification.recipe import ClassificationRecipe

RTX = load_profile("rtx4050")


def at(operations_per_s: float) -> DeviceProfile:
    fact = Fact[float](value=operations_per_s, source="this test", verified=True)
    return RTX.model_copy(update={"peaks": Peaks(fp32=fact)})


def test_operations_are_those_of_the_equations() -> None:
    """Forward: projections, scores and values, feed-forward, and the last layer's and head's [CLS]; backward twice."""
    shape = ["model.layers=1", "model.iterations=2", "training.batch_size=4", "model.dropout=0"]
    recipe = load_recipe("quickstart", shape)
    model, tokens, rows = recipe.model, 16, 4
    d, f = model.hidden_size, model.ffn_size  # type: ignore[attr-defined]
    full = 2 * tokens * (4 * d * d + 3 * d * f) + 2 * 2 * tokens * tokens * d
    last = 2 * tokens * 2 * d * d + 2 * (2 * d * d + 3 * d * f) + 2 * 2 * tokens * d  # one query
    head = 2 * d * 2
    assert step_operations(recipe, tokens) == pytest.approx(
        3 * rows * (full + last + head), rel=0.03
    )  # the backward pass computes scores again


def test_half_the_rate_takes_twice_as_long() -> None:
    recipe = load_recipe("recurrent_sst2")
    fast, slow = (planned_time(recipe, at(rate), "fp32", fits=True) for rate in (2e12, 1e12))
    assert slow.low_s == pytest.approx(2 * fast.low_s) and slow.high_s == pytest.approx(2 * fast.high_s)
    assert fast.status == "estimated" and fast.steps is None and "--data" in fast.basis
    epochs = recipe.training.epochs
    assert fast.rows == 1000 * epochs
    work = step_operations(recipe, 128) / recipe.training.batch_size * 1000 * epochs
    assert fast.low_s == pytest.approx(work / (2e12 * SHARE_OF_PEAK[1]))
    assert "never checked on a GPU" in fast.basis


def test_data_that_is_here_gives_the_steps_that_training_takes(
    small_recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    found = planned_time(small_recipe, at(1e12), "fp32", fits=True)
    folder = train(small_recipe, TrainOptions(tmp_path, accelerator="cpu"))
    assert found.steps == json.loads((folder / "run.json").read_text(encoding="utf-8"))["steps"]


def test_on_this_host_steps_are_timed(small_recipe: ClassificationRecipe) -> None:
    found = planned_time(small_recipe, load_profile("host"), "fp32", fits=True)
    assert found.status == "estimated" and "steps timed here" in found.basis
    assert found.low_s is not None and found.high_s is not None and 0 < found.low_s < found.high_s < 600


def test_without_rates_there_is_no_time(small_recipe: ClassificationRecipe) -> None:
    unknown = RTX.model_copy(update={"peaks": Peaks()})
    found = planned_time(small_recipe, unknown, "fp32", fits=True)
    assert (found.status, found.low_s, found.high_s) == ("unavailable", None, None) and "not known" in found.basis


def test_what_does_not_fit_is_not_tried(small_recipe: ClassificationRecipe) -> None:
    assert planned_time(small_recipe, load_profile("host"), "fp32", fits=False).status == "unavailable"
