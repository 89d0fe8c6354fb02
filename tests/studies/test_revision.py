"""What a seeded training computes is held: results of studies are found by TRAINING_REVISION, which must follow it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.results import TRAINING_REVISION
from edgeformer.artifacts.recipe import Recipe
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.tasks.language_modeling import LanguageRecipe
from edgeformer.training.train import TrainOptions, train

pytestmark = pytest.mark.slow

ENCODER = [0.69111, 0.69774, 0.70010, 0.68471, 0.69950]
CRT = [5.98147, 5.80980, 5.41923, 5.11702, 4.95232]
BUMP = (
    "training computes something else than when results were kept: count TRAINING_REVISION up (in "
    "benchmarks/studies/results.py), so that no study takes them for its own, and put these losses here"
)


def losses(recipe: Recipe, artifacts: Path) -> list[float]:
    """Mean losses of 5 steps each, then the validation loss, after 20 steps."""
    folder = train(recipe, TrainOptions(artifacts, max_steps=20, accelerator="cpu"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record.get("loss", record.get("val_loss")) for record in records]


def test_an_encoder_is_trained_as_before(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    results = losses(small_recipe, tmp_path)
    assert results == pytest.approx(ENCODER, abs=1e-3), f"{BUMP}: {results}"


def test_a_language_model_is_trained_as_before(small_language_recipe: LanguageRecipe, tmp_path: Path) -> None:
    results = losses(small_language_recipe, tmp_path)
    assert results == pytest.approx(CRT, abs=1e-3), f"{BUMP}: {results}"


def test_the_losses_are_those_of_this_revision() -> None:
    assert TRAINING_REVISION == 1, "a new revision comes with new losses above"
