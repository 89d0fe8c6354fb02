"""Training on a set that is kept on disk: the same weights as in memory, and as without an interruption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_checkpoints import assert_same

from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.training import memory, objective
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE
from tests.training.test_train import StopAfter, weights


@pytest.fixture(params=["classification", "language-modeling"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    """Rows of one JSONL file for each part, streamed: ten steps or more in each of two epochs."""
    parts = {}
    for part, count, seed in (("train", 200, 1), ("validation", 40, 2), ("test", 40, 3)):
        rows = (json.dumps({"text": row.text, "label": row.label}) for row in synthetic_reviews(count, seed))
        (tmp_path / f"{part}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        parts[part] = f"[{{kind: file, path: {tmp_path / part}.jsonl}}]"
    found = f"data.parts={{{', '.join(f'{part}: {sources}' for part, sources in parts.items())}}}"
    if request.param == "classification":
        kept = [setting for setting in SMALL if not setting.startswith("data.parts")]
        small = [*kept, "data.split=given", "model.hidden_size=16", "training.epochs=2", "training.batch_size=8"]
        return load_recipe("quickstart", [*small, found, "data.stream=true"])
    kept = [setting for setting in SMALL_LANGUAGE if not setting.startswith("data.parts")]
    return load_recipe("crt_mini", [*kept, found, "data.first_n=null", "data.stream=true"])


def in_memory(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"stream": False})})


def test_a_resumed_run_ends_with_the_same_weights(recipe: Recipe, tmp_path: Path) -> None:
    straight = train(recipe, TrainOptions(tmp_path / "straight", name="run"))
    assert read_run(straight).steps > 26
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path / "stopped", name="run"), StopAfter(13))
    run = train(recipe, TrainOptions(tmp_path / "stopped", name="run", resume=True))
    assert_same(run, straight)


def test_the_weights_are_those_of_training_in_memory(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one thing that differs is the order, so the streamed run gets the other's."""
    streamed_rows: list[int] = []

    def plan_in_memory(rows: Any, size: int, *, streamed: bool, **options: Any) -> Sequence[Any]:
        streamed_rows.extend([len(rows)] * streamed)
        return plan_batches(rows, size, **options)

    monkeypatch.setattr(objective, "plan_batches", plan_in_memory)
    one = train(in_memory(recipe), TrainOptions(tmp_path / "one"))
    other = train(recipe, TrainOptions(tmp_path / "two"))
    assert read_run(one).data == read_run(other).data
    assert read_run(one).tokenizer_fingerprint == read_run(other).tokenizer_fingerprint
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name
    assert streamed_rows == [read_run(one).data.rows["train"]] * 2  # by the streamed run only, in each epoch


def test_resume_notices_a_changed_file(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(3))
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "One review more, and that is long enough for a paragraph.", "label": 1}\n')
    # With a tokenizer that is trained on the same text that has changed, too.
    with pytest.raises(InputError, match=r"the (data|tokenizer) changed since this run began"):
        train(recipe, TrainOptions(tmp_path, name="run", resume=True))


def test_files_that_memory_cannot_hold_are_refused_unless_they_stream(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {part: (tmp_path / f"{part}.jsonl").stat().st_size for part in ("train", "validation", "test")}
    needed = 2 * sum(sizes.values())
    monkeypatch.setattr(memory, "free_bytes", lambda kind: (needed, "free"))
    memory.check_data_fits(in_memory(recipe).data)
    monkeypatch.setattr(memory, "free_bytes", lambda kind: (needed - 1, "free"))
    memory.check_data_fits(recipe.data)
    with pytest.raises(InputError, match=r"data\.parts: .* in memory, and .* are free; set data\.stream: true"):
        memory.check_data_fits(in_memory(recipe).data)
    with pytest.raises(InputError, match=r"--set data\.stream=true"):
        train(in_memory(recipe), TrainOptions(tmp_path / "run"))
    monkeypatch.setattr(memory, "free_bytes", lambda kind: (2 * (needed // 2 - sizes["train"]) - 1, "free"))
    with pytest.raises(InputError, match="make the sets besides train smaller: only train is streamed"):
        memory.check_data_fits(recipe.data)
