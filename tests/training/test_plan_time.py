"""plan: how long training takes, by a device's stated rates or by steps that are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.jobs import recipe_sha256
from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.plan import PlannedTime
from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.data_warnings import load_and_look
from edgeformer.data.splits import split
from edgeformer.models import load_recipe
from edgeformer.report.tables import time_text
from edgeformer.tasks import task_named
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.duration import SHARE_OF_PEAK, planned_data, planned_time, step_operations
from edgeformer.training.train import TrainOptions, train

PI = load_profile("raspberry-pi-5")


def at(operations_per_s: float) -> DeviceProfile:
    fact = Fact[float](value=operations_per_s, source="this test", verified=True)
    return PI.model_copy(update={"peaks": Peaks(fp32=fact)})


def planned(recipe: Recipe, device: DeviceProfile, cache: Path, *, fits: bool = True) -> PlannedTime:
    return planned_time(planned_data(recipe, cache), device, "fp32", cache, fits=fits)


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


def test_half_the_rate_takes_twice_as_long(tmp_path: Path) -> None:
    recipe = load_recipe("recurrent_sst2")
    fast, slow = (planned(recipe, at(rate), tmp_path) for rate in (2e12, 1e12))
    assert slow.low_s == pytest.approx(2 * fast.low_s) and slow.high_s == pytest.approx(2 * fast.high_s)
    assert fast.status == "estimated" and "--data" in fast.basis
    work = step_operations(recipe, 128) / recipe.training.batch_size * fast.rows
    assert fast.low_s == pytest.approx(work / (2e12 * SHARE_OF_PEAK[1]))


def test_rows_that_the_recipe_states_are_planned_with_and_marked(tmp_path: Path) -> None:
    recipe = load_recipe("recurrent_sst2")
    found = planned(recipe, at(1e12), tmp_path)
    assert recipe.data.expected_rows == 54_576 and found.rows == 54_576 * recipe.training.epochs
    assert found.steps == -(-54_576 // recipe.training.effective_batch) * recipe.training.epochs
    assert found.rows_from == "recipe" and "as the recipe states them, not counted" in time_text(found)


@pytest.mark.parametrize("change", ["data.max_length=64", "data.rows.train=0.05", "tokenizer.name=other"])
def test_a_stated_count_is_dropped_where_an_override_changes_what_is_read(change: str, tmp_path: Path) -> None:
    recipe = load_recipe("recurrent_sst2", [change])
    found = planned(recipe, at(1e12), tmp_path)
    assert recipe.data.expected_rows is None
    assert (found.rows, found.rows_from, found.steps) == (1000, "unknown", None)
    assert "per 1,000 training rows" in time_text(found) and "the number of rows is not known" in time_text(found)
    assert load_recipe("recurrent_sst2", [change, "data.expected_rows=7"]).data.expected_rows == 7
    assert load_recipe("recurrent_sst2", ["training.epochs=1"]).data.expected_rows == 54_576


def test_a_stated_count_decides_nothing_of_the_weights() -> None:
    plain, stated = (load_recipe("quickstart", more) for more in ([], ["data.expected_rows=5"]))
    assert plain.fingerprint() == stated.fingerprint() and recipe_sha256(plain) == recipe_sha256(stated)


class Messages(Silent):
    """Keeps every message."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_a_wrong_count_is_reported_once_the_data_is_read(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    stated = {"data": small_recipe.data.model_copy(update={"expected_rows": 2000})}
    recipe, progress = small_recipe.model_copy(update=stated), Messages()
    data = planned_data(recipe, tmp_path / "cache")
    assert data.length is not None and (data.length.rows_from, data.length.rows) == ("data", 2400 * 3)
    train(recipe, TrainOptions(tmp_path, accelerator="cpu", max_steps=1), progress)
    for texts in (data.notes, progress.texts):
        assert sum("states 2,000 training rows" in text and "has 2,400" in text for text in texts) == 1
    right = small_recipe.model_copy(update={"data": small_recipe.data.model_copy(update={"expected_rows": 2400})})
    assert planned_data(right, tmp_path / "cache").notes == ()


@pytest.mark.data
@pytest.mark.parametrize("name", ["baseline_sst2", "recurrent_wide_sst2_fast", "minilm_sst2", "minilm_folded_sst2"])
def test_the_stated_counts_are_those_of_the_data(name: str, data_folder: Path) -> None:
    recipe = load_recipe(name)
    data, _ = task_named(recipe.task).local_data(recipe.data, data_folder / "sst2")
    parts, _ = load_and_look(data)  # type: ignore[arg-type]
    assert len(split(data, parts)["train"]) == recipe.data.expected_rows  # type: ignore[arg-type]


@pytest.mark.data
def test_the_stated_count_of_crt_mini_is_that_of_the_data(data_folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe("crt_mini")
    data, _ = task_named(recipe.task).local_data(recipe.data, data_folder / "wikitext-2")
    assert planned_data(recipe.model_copy(update={"data": data}), tmp_path).notes == ()


def test_data_that_is_here_gives_the_steps_that_training_takes(
    small_recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    found = planned(small_recipe, at(1e12), tmp_path / "cache")
    folder = train(small_recipe, TrainOptions(tmp_path, accelerator="cpu"))
    assert found.steps == json.loads((folder / "run.json").read_text(encoding="utf-8"))["steps"]


def test_on_this_host_steps_are_timed(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    found = planned(small_recipe, load_profile("host"), tmp_path)
    assert found.status == "estimated" and "steps timed here" in found.basis
    assert found.low_s is not None and found.high_s is not None and 0 < found.low_s < found.high_s < 600


def test_without_rates_there_is_no_time(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    unknown = PI.model_copy(update={"peaks": Peaks()})
    found = planned(small_recipe, unknown, tmp_path)
    assert (found.status, found.low_s, found.high_s) == ("unavailable", None, None) and "not known" in found.basis


def test_what_does_not_fit_is_not_tried(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    assert planned(small_recipe, load_profile("host"), tmp_path, fits=False).status == "unavailable"
