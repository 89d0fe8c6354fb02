"""Data of a training: sets that are streamed from disk, and vocabularies smaller than the recipe states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe, read_run_recipe
from edgeformer.run import read_run
from edgeformer.training import objective
from edgeformer.training.plan import plan
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

    @pytest.mark.parametrize("recipe", ["classification"], indirect=True)
    def test_changed_file_is_refused(self, recipe: Recipe, tmp_path: Path) -> None:
        with pytest.raises(InterruptedRun):
            train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(3))
        with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"text": "One review more, and that is long enough for a paragraph.", "label": 1}\n')
        # The tokenizer may be trained on the same text.
        with pytest.raises(InputError, match=r"the (data|tokenizer) changed since this run began"):
            train(recipe, TrainOptions(tmp_path, name="run", resume=True))


@pytest.fixture(scope="module")
def oversized() -> Recipe:
    """A recipe whose ``model.vocab_size`` is larger than its trained tokenizer."""
    return classifier_recipe([*SMALL, "training.epochs=1", "data.rows.train=0.05", "model.vocab_size=4000"])


@pytest.fixture(scope="module")
def oversized_run(tmp_path_factory: pytest.TempPathFactory, oversized: Recipe) -> tuple[Path, Messages]:
    messages = Messages()
    run = train(oversized, TrainOptions(tmp_path_factory.mktemp("oversized"), name="run"), messages)
    return run, messages


class TestSmallerVocabulary:
    def test_model_and_saved_recipe_follow_the_tokenizer(
        self, oversized_run: tuple[Path, Messages], tmp_path: Path
    ) -> None:
        run, messages = oversized_run
        saved = read_run_recipe(run)
        size = saved.model.vocab_size
        assert 100 < size < 4000 and read_run(run).vocabulary == size
        assert messages.containing(f"model.vocab_size is {size} instead of 4000")
        assert size in {len(tensor) for tensor in weights(run).values()}
        repeated = train(saved, TrainOptions(tmp_path))
        assert read_run(repeated).recipe_sha256 == read_run(run).recipe_sha256 == saved.fingerprint()
        assert_equal_weights(repeated, run)

    @pytest.mark.parametrize("is_saved", [False, True])
    def test_resumed_with_the_original_and_the_saved_recipe(
        self, tmp_path: Path, oversized: Recipe, is_saved: bool
    ) -> None:
        with pytest.raises(InterruptedRun):
            train(oversized, TrainOptions(tmp_path, name="run"), StopAfter(1))
        resumed = read_run_recipe(tmp_path / "run") if is_saved else oversized
        assert read_run(train(resumed, TrainOptions(tmp_path, name="run", resume=True))).status == "finished"

    def test_plan(self, oversized_run: tuple[Path, Messages], oversized: Recipe) -> None:
        run, _ = oversized_run
        size = read_run_recipe(run).model.vocab_size
        planned = plan(oversized, load_profile("rtx4050"))
        assert planned.parameters == read_run(run).parameters
        assert any(f"model.vocab_size is {size} instead of 4000" in note for note in planned.notes)
