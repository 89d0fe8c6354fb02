"""Data of a training: sets that are streamed from disk, and vocabularies smaller than the recipe states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe, read_run_recipe
from edgeformer.run import read_run
from edgeformer.training.loop import objective
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE, classifier_recipe
from tests.training.runs import Messages, StopAfter, assert_equal_weights, assert_same_run, weights


class TestStreaming:
    @pytest.fixture(params=["classification", "language-modeling"])
    def recipe(self, request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
        """Streamed rows of one JSONL file per part."""
        parts = {}
        for part, count, seed in (("train", 80, 1), ("validation", 40, 2), ("test", 40, 3)):
            rows = (json.dumps({"text": row.text, "label": row.label}) for row in synthetic_reviews(count, seed))
            (tmp_path / f"{part}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
            parts[part] = f"[{{kind: file, path: {tmp_path / part}.jsonl}}]"
        data = f"data.parts={{{', '.join(f'{part}: {sources}' for part, sources in parts.items())}}}"
        if request.param == "classification":
            base = [setting for setting in SMALL if not setting.startswith("data.parts")]
            small = [*base, "data.split=given", "model.hidden_size=16", "training.epochs=2", "training.batch_size=8"]
            return load_recipe("quickstart", [*small, data, "data.stream=true"])
        base = [setting for setting in SMALL_LANGUAGE if not setting.startswith("data.parts")]
        small = [*base, "model.loops=2", "model.exits=[1]"]
        return load_recipe("crt_mini", [*small, data, "data.first_n=null", "data.stream=true"])

    def in_memory(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"stream": False})})

    def test_resumed_run_is_identical(self, recipe: Recipe, tmp_path: Path) -> None:
        expected = train(recipe, TrainOptions(tmp_path / "expected", name="run"))
        assert read_run(expected).steps > 13
        options = TrainOptions(tmp_path / "stopped", name="run")
        with pytest.raises(InterruptedRun):
            train(recipe, options, StopAfter(13))
        assert_same_run(train(recipe, TrainOptions(tmp_path / "stopped", name="run", resume=True)), expected)

    def test_weights_are_those_of_training_in_memory(
        self, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the order of the rows differs, so the streamed run gets the order in memory."""
        row_counts: list[int] = []

        def plan_in_memory(rows: Any, size: int, *, streamed: bool, **options: Any) -> Sequence[Any]:
            row_counts.extend([len(rows)] * streamed)
            return plan_batches(rows, size, **options)

        monkeypatch.setattr(objective, "plan_batches", plan_in_memory)
        expected = train(self.in_memory(recipe), TrainOptions(tmp_path / "memory"))
        run = train(recipe, TrainOptions(tmp_path / "stream"))
        assert read_run(run).data == read_run(expected).data
        assert read_run(run).tokenizer_fingerprint == read_run(expected).tokenizer_fingerprint
        assert_equal_weights(run, expected)
        assert row_counts == [read_run(expected).data.rows["train"]] * 2  # in each epoch of the streamed run


def test_model_and_saved_recipe_follow_a_smaller_tokenizer(tmp_path: Path) -> None:
    """Both the original recipe, whose ``model.vocab_size`` is too large, and the saved one resume the run."""
    oversized = classifier_recipe([*SMALL, "training.epochs=1", "data.rows.train=0.05", "model.vocab_size=4000"])
    messages = Messages()
    run = train(oversized, TrainOptions(tmp_path, name="complete"), messages)
    saved = read_run_recipe(run)
    size = saved.model.vocab_size
    note = f"model.vocab_size is {size} instead of 4000"
    assert 100 < size < 4000 and read_run(run).vocabulary == size and messages.containing(note)
    assert size in {len(tensor) for tensor in weights(run).values()}
    for name, recipe in (("original", oversized), ("saved", saved)):
        with pytest.raises(InterruptedRun):
            train(oversized, TrainOptions(tmp_path, name=name), StopAfter(1))
        resumed = train(recipe, TrainOptions(tmp_path, name=name, resume=True))
        assert read_run(resumed).recipe_sha256 == read_run(run).recipe_sha256 == saved.fingerprint()
        assert_equal_weights(resumed, run)
    planned = plan(oversized, load_profile("rtx4050"))
    assert planned.parameters == read_run(run).parameters and any(note in line for line in planned.notes)
